"""End of a turn of the assistant as the chat template writes it. Torch-free."""

from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from infra.errors import BadInput
from models.text.turns import find_end_of_last_turn, turn_format


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Text and token that a chat template writes after the content of an assistant's message."""

    text: str
    """Text between the content and the end token, mostly empty."""
    token: int
    """Token that ends the turn."""


def find_turn_end(tokenizer: PreTrainedTokenizerFast, *, stated: Collection[int] = ()) -> TurnEnd | None:
    """Return how the chat template of a tokenizer ends turns of the assistant.

    `stated` are the tokens that end a completion according to the generation config. The end is the first of these
    tokens and EOS that the template writes after a turn, otherwise the first control token there. Returns None if there
    is no such token, no template, or the template rejects a short chat.
    """
    if not tokenizer.chat_template:
        return None
    try:
        found = find_end_of_last_turn(turn_format(tokenizer, stated=stated))
    except BadInput:
        return None
    if found is None:
        return None
    text, token = found
    return TurnEnd(text, int(tokenizer.convert_tokens_to_ids(token)))
