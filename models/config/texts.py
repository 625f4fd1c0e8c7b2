"""Configuration of the encoding of texts that are not formatted by a chat template. Torch-free."""

from typing import Annotated, Final, Literal, NamedTuple

from infra.config import Settings, Since


class TextRules(NamedTuple):
    """Rules for encoding prompts, and the completions of training examples, as tokens."""

    special_tokens: Literal["text", "parse"] = "text"
    """Encoding of control tokens, such as `<|im_end|>`, that occur in a text: as ordinary text, or as control
    tokens."""
    turn_end: Literal["template", "eos"] = "template"
    """Source of the token that ends the assistant's turns: the chat template, or the EOS token."""

    @property
    def parses_control_tokens(self) -> bool:
        """Whether control tokens that occur in a text are encoded as control tokens and not as ordinary text."""
        return self.special_tokens == "parse"

    @property
    def ends_as_template(self) -> bool:
        """Whether the token with which the chat template ends a turn also ends completions."""
        return self.turn_end == "template"


RULES_BEFORE: Final = TextRules("parse", "eos")
"""Rules of runs that began before version 0.2.0."""


class TextSettings(Settings):
    """Settings for encoding the texts of problems."""

    special_tokens: Annotated[Literal["text", "parse"], Since("0.2.0", before="parse")] = "text"
    """Encoding of control tokens, such as `<|im_end|>`, that occur in a prompt or in the completion of an example:
    "text" encodes them as ordinary text, so only the chat template can insert control tokens. "parse" encodes them as
    control tokens, for prompts that already contain the markers of a template. Control tokens are special tokens, and
    added tokens with punctuation that the chat template writes. The same rule applies to `template` and `system` of a
    file, because they are part of the prompt."""
    turn_end: Annotated[Literal["template", "eos"], Since("0.2.0", before="eos")] = "template"
    """Token that ends a turn of the assistant. With "template", the token with which the chat template ends an
    assistant turn also ends completions, and warm-up and DPO on chats train this token. Tokens that the tokenizer
    appends to plain-text prompts are removed. With "eos", EOS and the tokens in generation_config.json end completions,
    and EOS is trained."""

    @property
    def text_rules(self) -> TextRules:
        """Rules for encoding prompts and completions."""
        return TextRules(self.special_tokens, self.turn_end)


class ContinuingModel(Settings):
    """Model other than the policy that continues plain texts: a simulated user or a judge."""

    @property
    def text_rules(self) -> TextRules:
        """Rules for encoding the texts."""
        return RULES_BEFORE


class AppendedTokens(ContinuingModel):
    """Key `appended_tokens`, for models that use another tokenizer than the policy: judges and simulated users."""

    appended_tokens: Annotated[Literal["drop", "keep"], Since("0.2.0", before="keep")] = "drop"
    """Tokens, such as EOS, that the model's tokenizer appends to plain texts: "drop" removes them, so that the model
    continues the text, "keep" does not. They have no effect on chats."""

    @property
    def text_rules(self) -> TextRules:
        """Rules for encoding the texts, which do not end with appended tokens unless `appended_tokens` is "keep"."""
        return RULES_BEFORE if self.appended_tokens == "keep" else RULES_BEFORE._replace(turn_end="template")
