"""Prompts of turns: the whole chat as its template writes it before each turn, with what it does to earlier ones.

Text that an environment said becomes no control token, as in `models.text.turns`. Torch-free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from infra.errors import BadInput
from models.data.problems import Message
from models.text.calls import Call, ParsedTurn, spelt_call
from models.text.chats import TemplateFailed
from models.text.turns import QUESTION, REPLY, TURN, Chat, TurnFormat, reason_of, separator_for, spelt_answers, text_of

_TOOL: Final = "find"
_CALL: Final = Call(_TOOL, {"of": TURN})


@dataclass(frozen=True, slots=True)
class Exchange:
    """A turn of the policy, and what was said to it."""

    turn: Mapping[str, object]
    """As chat templates read it."""
    said: tuple[Message, ...]


def prompt_of(form: TurnFormat, asked: Sequence[Message], exchanges: Sequence[Exchange]) -> tuple[int, ...]:
    """Tokens of a chat up to its next turn. Raises ValueError where the template refuses it."""
    said = [text_of(message.content) for exchange in exchanges for message in exchange.said]
    mark = separator_for(
        "".join([*said, *(message.text for message in asked), *(str(each.turn) for each in exchanges)])
    )
    chat: Chat = [form.spelt(message) for message in asked]
    for exchange in exchanges:
        broken = [Message(each.role, form.broken(text_of(each.content), mark), each.name) for each in exchange.said]
        chat += [dict(exchange.turn), *spelt_answers(form, broken)]
    try:
        [text] = form.rendered([chat], generation_prompt=True)
    except TemplateFailed as error:
        raise ValueError(f"the policy's chat template {reason_of(error)}") from error
    first, *pieces = text.split(mark)
    return (*form.tokenizer(first, add_special_tokens=False)["input_ids"], *form.pieces(pieces))


def spelt_turn(form: TurnFormat, turn: ParsedTurn, text: str, *, in_calls: bool) -> dict[str, object]:
    """Spell a turn as templates read it: its calls as such where `in_calls`; one that cannot be read leaves all of the
    turn's `text` as it is.
    """
    if turn.calls and (not in_calls or any(call.error for call in turn.calls)):
        return form.spelt(Message("assistant", text))
    spelt = {**form.spelt(Message("assistant", turn.text)), **turn.beside}
    calls = [spelt_call(call.name, call.arguments, number=number) for number, call in enumerate(turn.calls)]
    return {**spelt, "tool_calls": calls} if calls else spelt


def takes_calls(form: TurnFormat) -> bool:
    """Say whether the template shows calls of tools that are told apart from a turn's text."""
    turn = spelt_turn(form, ParsedTurn("", (_CALL,)), "", in_calls=True)
    try:
        [text] = form.rendered([[form.spelt(QUESTION), turn]], generation_prompt=False)
    except TemplateFailed:
        return False
    return TURN in text


def check_prompts(form: TurnFormat, *, role: str, where: str) -> None:
    """Refuse a template that does not write a chat of turns and messages of this role, be their calls well written or
    not. `where` begins the message. Raises BadInput.
    """
    reply = Message(role, REPLY, _TOOL if role == "tool" else "")
    turns = [ParsedTurn(TURN)]
    if role == "tool":
        turns = [ParsedTurn("", (_CALL,)), ParsedTurn(TURN, (Call("", {}, "cannot be read"),))]
    for turn in turns:
        exchange = Exchange(spelt_turn(form, turn, TURN, in_calls=takes_calls(form)), (reply,))
        chat: Chat = [form.spelt(QUESTION)]
        for _ in range(2):
            chat += [dict(exchange.turn), *spelt_answers(form, exchange.said)]
        try:
            [text] = form.rendered([chat], generation_prompt=True)
        except TemplateFailed as error:
            raise BadInput(f"{where}: the policy's chat template {reason_of(error)}") from error
        if text.count(REPLY) < 2:
            raise BadInput(f"{where}: the policy's chat template leaves messages of role {role!r} out")
