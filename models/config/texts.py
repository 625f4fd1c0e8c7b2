"""Configuration of the encoding of texts that no chat template wrote. Torch-free."""

from typing import Annotated, Final, Literal, NamedTuple

from infra.config import Settings, Since

NOTE: Final = "note: "
"""Prefix of facts of the input check whose name is a note for the plan. Their number has no meaning."""


class TextRules(NamedTuple):
    """Rules for encoding prompts, and the completions of training examples."""

    special_tokens: Literal["text", "parse"] = "text"
    """Encoding of control tokens that a text contains."""
    turn_end: Literal["template", "eos"] = "template"
    """Token that ends turns of the assistant."""

    @property
    def parses_control_tokens(self) -> bool:
        """Whether control tokens that a text contains become control tokens."""
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
    """Encoding of control tokens that a prompt or the completion of an example contains, such as `<|im_end|>`: "text"
    encodes them as ordinary text, so only the chat template writes control tokens. "parse" turns them into control
    tokens, for prompts that already contain the markers of a template. Control tokens are special tokens, and added
    tokens with punctuation that the chat template writes. Markers in `template` and `system` of a file are part of the
    prompt, so they follow the same rule."""
    turn_end: Annotated[Literal["template", "eos"], Since("0.2.0", before="eos")] = "template"
    """End of turns. With "template", the token with which the chat template ends a turn of the assistant also ends
    completions, warm-up and DPO on chats train it, and tokens that the tokenizer appends to plain-text prompts are
    removed. With "eos", EOS and the tokens in generation_config.json end completions, and EOS is trained."""

    @property
    def text_rules(self) -> TextRules:
        """Rules for encoding prompts and completions."""
        return TextRules(self.special_tokens, self.turn_end)


class AppendedTokens(Settings):
    """Setting of other models that continue plain texts: simulated users and judges."""

    appended_tokens: Annotated[Literal["drop", "keep"], Since("0.2.0", before="keep")] = "drop"
    """Tokens, such as EOS, that the model's tokenizer appends to plain texts: "drop" removes them, so that the model
    continues the text, "keep" does not. They have no effect on chats."""
