"""Token with which the chat template ends a turn of the assistant. Torch-free."""

from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.models.text.turns import find_end_of_last_turn, turn_format


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Text and token with which a chat template ends a message of the assistant."""

    text: str
    """Text between the content of the message and the token that ends it. It is empty in most templates."""
    token: int
    """ID of the token that ends the message."""


def find_turn_end(tokenizer: PreTrainedTokenizerFast, *, stated: Collection[int] = ()) -> TurnEnd | None:
    """Return the end of an assistant's message as the chat template of a tokenizer writes it. Returns None if there is
    no template or no end token, or if the template rejects a short chat. `stated` are the tokens that end a completion
    according to the generation config.

    The end token is the first token in `stated`, or EOS, that the template writes after a turn. If there is none, it is
    the first control token there.
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
