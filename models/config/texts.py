"""Configuration of the encoding of texts that are not formatted by a chat template. Torch-free."""

from typing import Annotated, Final, Literal, NamedTuple

from rheostat.infra.config import Settings, Since


class TextRules(NamedTuple):
    """Rules for converting prompts, and the completions of training examples, to tokens."""

    special_tokens: Literal["text", "parse"] = "text"
    """Encoding of control tokens, such as `<|im_end|>`, that occur in a text: "text" encodes them as ordinary text,
    "parse" as control tokens."""
    turn_end: Literal["template", "eos"] = "template"
    """Source of the token that ends a turn of the assistant: the chat template ("template"), or the EOS token
    ("eos")."""

    @property
    def parses_control_tokens(self) -> bool:
        """Whether control tokens that occur in a text, such as `<|im_end|>`, are encoded as control tokens and not as
        ordinary text."""
        return self.special_tokens == "parse"

    @property
    def ends_as_template(self) -> bool:
        """Whether the token with which the chat template ends an assistant turn also ends completions."""
        return self.turn_end == "template"


RULES_BEFORE: Final = TextRules("parse", "eos")
"""Rules that runs use if they began before version 0.2.0."""


class TextSettings(Settings):
    """Settings for converting the texts of problems to tokens."""

    special_tokens: Annotated[Literal["text", "parse"], Since("0.2.0", before="parse")] = "text"
    """Encoding of control tokens, such as `<|im_end|>`, that occur in a prompt or in the completion of a training
    example: "text" encodes them as ordinary text, so only the chat template can insert control tokens. "parse" encodes
    them as control tokens, for prompts that already contain the markers of a template. Control tokens are the
    tokenizer's special tokens, and its added tokens with punctuation that the chat template writes. The same rule
    applies to `template` and `system` of a data file, because they become a part of the prompt."""
    turn_end: Annotated[Literal["template", "eos"], Since("0.2.0", before="eos")] = "template"
    """Token that ends a turn of the assistant. With "template", this is the token with which the chat template ends an
    assistant turn: it ends completions, and warm-up and DPO on chats train it. Tokens that the tokenizer appends to
    plain-text prompts are removed. With "eos", the EOS token and the tokens in generation_config.json end completions,
    and warm-up and DPO train the EOS token."""

    @property
    def text_rules(self) -> TextRules:
        """Rules for converting prompts and completions to tokens."""
        return TextRules(self.special_tokens, self.turn_end)


class ContinuingModel(Settings):
    """Fields common to models other than the policy that may continue plain texts: simulated users and judges."""

    @property
    def text_rules(self) -> TextRules:
        """Rules for converting the model's prompts to tokens."""
        return RULES_BEFORE


class AppendedTokens(ContinuingModel):
    """Fields common to judges and simulated users that have their own tokenizer, which may append tokens to a text."""

    appended_tokens: Annotated[Literal["drop", "keep"], Since("0.2.0", before="keep")] = "drop"
    """Treatment of tokens, such as EOS, that the model's tokenizer appends to plain texts: "drop" removes them, so that
    the model continues the text, "keep" leaves them in the prompt. The key has no effect on chats."""

    @property
    def text_rules(self) -> TextRules:
        """Rules for converting the model's prompts to tokens. Appended tokens are removed unless `appended_tokens` is
        "keep"."""
        return RULES_BEFORE if self.appended_tokens == "keep" else RULES_BEFORE._replace(turn_end="template")
