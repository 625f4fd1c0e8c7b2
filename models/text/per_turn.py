"""Separate prompts for each turn: before each turn, the chat template renders the whole chat again, including earlier
turns.

Control tokens in texts from an environment are always encoded as ordinary text, as in `rheostat.models.text.turns`.
Torch-free.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rheostat.infra.errors import BadInput
from rheostat.models.data.problems import Message, Prompt, TemplateArguments
from rheostat.models.text.calls import Call, ParsedTurn, encode_call
from rheostat.models.text.chats import TemplateFailed
from rheostat.models.text.control_tokens import ControlTokens, Marks, separator_for
from rheostat.models.text.message_texts import as_message
from rheostat.models.text.template_fields import fit_chats
from rheostat.models.text.turns import (
    QUESTION,
    REPLY,
    TURN,
    Chat,
    TurnFormat,
    encode_answers,
    first_error_line,
    text_of,
)

_TOOL: Final = "find"
_CALL: Final = Call(_TOOL, {"of": TURN})


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn of the policy with the environment's reply. Later prompts are rendered from the exchanges so far."""

    turn: Mapping[str, object]
    """Turn of the policy as a message in the format of chat templates."""
    observations: tuple[Message, ...]
    """Messages of the environment's reply to the turn."""


def render_prompt(
    form: TurnFormat, asked: Sequence[Message], exchanges: Sequence[Exchange], *, prompt: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the prompt of the next turn as tokens: the chat so far, rendered in the format `form`. `asked` are the
    messages of the problem, and `prompt` holds the tokens before the first turn. Control tokens in the problem's
    messages are encoded in the same way as in `prompt`. Raises ValueError if the chat template rejects the chat."""
    control, arguments = ControlTokens.of(form.tokenizer), TemplateArguments(form.tools, form.kwargs)
    observations = [text_of(message.content) for exchange in exchanges for message in exchange.observations]
    others = [*observations, *(str(each.turn) for each in exchanges)]
    asked_prompts: list[Prompt] = [tuple(asked), (as_message(arguments),)]
    marks = control.choose_marks([*asked_prompts, *map(_as_user, observations)], others=others)
    is_text = control.choose_marks(asked_prompts) is not None and _render_plainly(form, asked) != tuple(prompt)
    if marks is not None and is_text:
        return _render_marked(form, asked, exchanges, control, marks)
    mark = separator_for("".join([*others, *(f"{each.text}{each.fields}" for each in asked)]))
    chat = _encode_messages(form, asked)
    for exchange in exchanges:
        chat += _encode_exchange(form, exchange, lambda text: form.break_control_tokens(text, mark))
    first, *pieces = _render_chat(form, chat).split(mark)
    return (*form.tokenizer(first, add_special_tokens=False)["input_ids"], *form.encode_pieces(pieces))


def _as_user(text: str) -> Prompt:
    """Return a text from an environment as a chat with one user message, so that control tokens can be found in it."""
    return (Message("user", text),)


def _render_marked(
    form: TurnFormat, asked: Sequence[Message], exchanges: Sequence[Exchange], control: ControlTokens, marks: Marks
) -> tuple[int, ...]:
    """Return the tokens of a chat. Control tokens in the problem's messages (`asked`) are encoded as ordinary text, by
    replacing them with `marks` while the chat is rendered."""
    problem = control.mark_prompt(tuple(asked), marks)
    arguments = control.mark_arguments(TemplateArguments(form.tools, form.kwargs), marks)
    marked_form = replace(form, tools=arguments.tools, kwargs=arguments.kwargs)
    chat = _encode_messages(form, [message for message in problem if isinstance(message, Message)])
    for exchange in exchanges:
        chat += _encode_exchange(form, exchange, lambda text: control.mark_text(text, marks))
    return tuple(control.encode([_render_chat(marked_form, chat)], marks, add_special_tokens=False)[0])


def _encode_exchange(form: TurnFormat, exchange: Exchange, change: Callable[[str], str]) -> Chat:
    """Return a turn of the policy and the environment's reply as messages for the chat template. `change` is applied to
    the texts of the reply, to mark their control tokens."""
    answers = [Message(each.role, change(text_of(each.content)), each.name) for each in exchange.observations]
    return [dict(exchange.turn), *encode_answers(form, answers)]


def _render_chat(form: TurnFormat, chat: Chat) -> str:
    """Render a chat up to the point at which the policy's next turn begins. Raises ValueError if the chat template
    rejects the chat."""
    try:
        [text] = form.render([chat], generation_prompt=True)
    except TemplateFailed as error:
        raise ValueError(f"the policy's chat template {first_error_line(error)}") from error
    return text


def _render_plainly(form: TurnFormat, asked: Sequence[Message]) -> tuple[int, ...]:
    """Return the tokens of a problem's messages, with control tokens in the text encoded as control tokens."""
    text = _render_chat(form, _encode_messages(form, asked))
    return tuple(form.tokenizer(text, add_special_tokens=False)["input_ids"])


def _encode_messages(form: TurnFormat, asked: Sequence[Message]) -> Chat:
    """Return the messages of a problem (`asked`) in the format that the chat template requires."""
    [chat] = fit_chats([[form.encode_message(message) for message in asked]], form.tokenizer, [form.arguments])
    return [*chat]


def encode_turn(form: TurnFormat, turn: ParsedTurn, text: str, *, in_calls: bool) -> dict[str, object]:
    """Return a turn of the policy as a message in the format of chat templates. With `in_calls`, its tool calls become
    a separate field of the message. Without `in_calls`, or if a tool call could not be parsed, the content of the
    message is the unchanged `text`."""
    if turn.calls and (not in_calls or any(call.error for call in turn.calls)):
        return form.encode_message(Message("assistant", text))
    encoded = {**form.encode_message(Message("assistant", turn.text)), **turn.other_fields}
    calls = [encode_call(call.name, call.arguments, number=number) for number, call in enumerate(turn.calls)]
    return {**encoded, "tool_calls": calls} if calls else encoded


def decode_turn(form: TurnFormat, tokens: Sequence[int]) -> str:
    """Decode the tokens of a turn to text with special tokens, without the token that ends the turn."""
    own = tokens[:-1] if tokens and tokens[-1] in form.ends else tokens
    text: str = form.tokenizer.decode(own, skip_special_tokens=False)
    return text


def renders_calls(form: TurnFormat) -> bool:
    """Return whether the chat template renders tool calls in a separate field of a message."""
    turn = encode_turn(form, ParsedTurn("", (_CALL,)), "", in_calls=True)
    try:
        [text] = form.render([[form.encode_message(QUESTION), turn]], generation_prompt=False)
    except TemplateFailed:
        return False
    return TURN in text


def check_turn_prompts(form: TurnFormat, *, role: str, where: str) -> None:
    """Check that the chat template renders turns, with valid and with malformed tool calls, and messages of the role
    `role`. Raises BadInput if the template fails or omits one of the messages. `where` is the beginning of the error
    message."""
    reply = Message(role, REPLY, _TOOL if role == "tool" else "")
    turns = [ParsedTurn(TURN)]
    if role == "tool":
        turns = [ParsedTurn("", (_CALL,)), ParsedTurn(TURN, (Call("", {}, "cannot be read"),))]
    for turn in turns:
        exchange = Exchange(encode_turn(form, turn, TURN, in_calls=renders_calls(form)), (reply,))
        chat: Chat = [form.encode_message(QUESTION)]
        for _ in range(2):
            chat += [dict(exchange.turn), *encode_answers(form, exchange.observations)]
        try:
            [text] = form.render([chat], generation_prompt=True)
        except TemplateFailed as error:
            raise BadInput(f"{where}: the policy's chat template {first_error_line(error)}") from error
        if text.count(REPLY) < 2:
            raise BadInput(
                f"{where}: the policy's chat template does not render messages with role {role!r}, so the policy "
                "would not receive them. Use another policy, or an environment with other roles"
            )
