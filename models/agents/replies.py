"""Answers in the formats of OpenAI and vLLM: bodies, and event streams with the whole answer in one burst."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from pydantic import JsonValue

from rheostat.models.agents.matching import THOUGHTS
from rheostat.models.agents.sampler import SampledTurn
from rheostat.models.data.problems import Message
from rheostat.models.engines.protocol import SequenceScores
from rheostat.models.records.schemas import FinishReason
from rheostat.models.text.calls import Call, ParsedTurn

Body = dict[str, JsonValue]
"""JSON object of an answer or of one event."""

WAIT_EVENT: Final = b": wait\n\n"
"""Comment in an event stream, which keeps the connection in use while a turn is sampled."""
DONE_EVENT: Final = b"data: [DONE]\n\n"
MIN_LOGPROB: Final = -9999.0
"""Log-prob in answers of tokens that have probability 0, because JSON has no infinite numbers. vLLM uses the same."""
_THOUGHT_FIELDS: Final = (THOUGHTS, "reasoning", "thinking")
"""Fields in which response templates return the reasoning of a turn."""


@dataclass(frozen=True, slots=True)
class DoorReply:
    """Answer to a request, as one body and as the events of a stream."""

    body: Body
    events: tuple[Body, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Values that every answer of a server contains."""

    model: str
    """Name of the model that the server reports."""
    created: int
    """Unix time in seconds at which the server started. It is the same in all answers."""


def models_body(head: ReplyHead, *, context: int) -> Body:
    """Return the body of `GET /v1/models`. `context` is the context length of the policy in tokens."""
    model: Body = {"id": head.model, "object": "model", "created": head.created, "owned_by": "rheostat"}
    return {"object": "list", "data": [{**model, "max_model_len": context}]}


# ---- chats
def build_answer(turn: ParsedTurn, text: str, *, number: int) -> Message:
    """Return a turn of the policy as the message that the client receives. `text` is the turn's text before parsing,
    and `number` the number of the turn in its episode.

    Calls with a name are passed on even if their arguments are malformed, so that the program can report the error to
    the policy. If no call has a name, the message contains the whole text.
    """
    calls = [call for call in turn.calls if call.name]
    if turn.calls and not calls:
        return Message("assistant", text)
    thoughts = next((value for name in _THOUGHT_FIELDS if (value := turn.other_fields.get(name))), None)
    fields: dict[str, JsonValue] = {
        "tool_calls": [_encode_call(call, f"t{number % 10_000:04d}{index:04d}") for index, call in enumerate(calls)],
        THOUGHTS: thoughts if isinstance(thoughts, str) else None,
    }
    return Message("assistant", turn.text, fields={name: value for name, value in fields.items() if value})


def _encode_call(call: Call, identifier: str) -> JsonValue:
    """Return a tool call in OpenAI's format. The ID has nine characters, because Mistral's templates require this
    length, and is unique within the first 10,000 turns of an episode."""
    arguments = call.arguments_text or json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": identifier, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def chat_reply(
    head: ReplyHead, sampled: SampledTurn, answer: Message, *, decode: Callable[[int], str], wants: Mapping[str, bool]
) -> DoorReply:
    """Return the answer to a request for a chat. `decode` returns the text of a token, and `wants` states whether the
    request contains "logprobs", "usage" (in a stream) and "token_ids"."""
    calls = answer.fields.get("tool_calls")
    message: Body = {"role": "assistant", "content": answer.text or (None if calls else "")}
    message |= dict(answer.fields)
    finish = finish_reason(sampled, has_calls=bool(calls))
    choice: Body = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    if wants["logprobs"]:
        choice["logprobs"] = {"content": [_encode_logprob(each, value, decode) for each, value in _scored(sampled)]}
    if wants["token_ids"]:
        choice["token_ids"] = [*sampled.turn.tokens]
    common, usage = _identify(head, "chatcmpl", sampled.turn.number), _usage_of_turn(sampled)
    body: Body = {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
    return DoorReply(body, tuple(_chat_events(common, choice, message, usage if wants["usage"] else None)))


def _chat_events(common: Body, choice: Body, message: Body, usage: Body | None) -> Iterator[Body]:
    """Yield the chunks of an event stream: the whole message, the reason of its end, and the usage if required."""
    calls = message.get("tool_calls")
    delta = dict(message)
    if isinstance(calls, list):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls) if isinstance(call, dict)]
    others = {name: value for name, value in choice.items() if name not in ("index", "message", "finish_reason")}
    chunk: Body = {**common, "object": "chat.completion.chunk"}
    yield {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **others}]}
    yield {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    if usage is not None:
        yield {**chunk, "choices": [], "usage": usage}


def _encode_logprob(token: int, logprob: float, decode: Callable[[int], str]) -> JsonValue:
    text = decode(token)
    return {"token": text, "logprob": logprob, "bytes": [*text.encode()], "top_logprobs": []}


# ---- texts and tokens
@dataclass(frozen=True, slots=True)
class ContinuedText:
    """Answer to one prompt of a request that continues texts."""

    prompt: Sequence[int]
    """Tokens of the prompt."""
    sampled: SampledTurn | None
    """Sampled turn, or None if only log-probs of the prompt are requested."""
    text: str
    """Text of the turn. With `echo`, the text of the prompt precedes it."""
    logprobs: Body | None = None
    """Log-probs of tokens (`encode_scores`), or None if they are not requested."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Sampled tokens."""
        return () if self.sampled is None else self.sampled.turn.tokens


def text_reply(head: ReplyHead, continued: Sequence[ContinuedText], *, wants: Mapping[str, bool]) -> DoorReply:
    """Return the answer to a request that continues texts. `wants` states whether "usage" (in a stream) and
    "token_ids" are requested."""
    choices: list[JsonValue] = []
    for index, each in enumerate(continued):
        finish = "length" if each.sampled is None else finish_reason(each.sampled)
        choice: Body = {"index": index, "text": each.text, "finish_reason": finish, "logprobs": each.logprobs}
        choices.append(choice | ({"token_ids": [*each.tokens]} if wants["token_ids"] else {}))
    first = continued[0].sampled
    number = "prompt" if first is None else first.turn.number
    common = {**_identify(head, "cmpl", number), "object": "text_completion"}
    usage = usage_of(sum(len(each.prompt) for each in continued), sum(len(each.tokens) for each in continued))
    last: list[Body] = [{**common, "choices": [], "usage": usage}] if wants["usage"] else []
    return DoorReply({**common, "choices": choices, "usage": usage}, ({**common, "choices": choices}, *last))


def encode_scores(tokens: Sequence[int], scores: SequenceScores, *, first: int, decode: Callable[[int], str]) -> Body:
    """Return the log-probs of the tokens from index `first` on, with the most probable tokens at each position. The
    first token of a sequence has no log-prob. `decode` returns the text of a token."""
    texts = [decode(token) for token in tokens[first:]]
    logprobs: list[JsonValue] = [None, *(max(each, MIN_LOGPROB) for each in scores.logprobs)]
    best: list[JsonValue] = [None]
    for token, logprob, others in zip(tokens[1:], scores.logprobs, scores.best, strict=True):
        by_text: Body = {}  # of tokens with the same text, the most probable one counts
        for each, value in (*others, (token, logprob)):
            by_text.setdefault(decode(each), max(value, MIN_LOGPROB))
        best.append(by_text)
    return {
        "tokens": [*texts],
        "token_logprobs": logprobs[first:],
        "top_logprobs": best[first:],
        "text_offset": [*accumulate(map(len, texts[:-1]), initial=0)],
    }


def token_reply(head: ReplyHead, sampled: SampledTurn) -> DoorReply:
    """Return the answer to a request for tokens, in vLLM's format.

    Log-probs name their token in two fields, because clients read different ones: `token_id` is vLLM's field, and
    `token` is the field that the package renderers reads.
    """
    content: list[JsonValue] = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
        for token, logprob in _scored(sampled)
    ]
    choice: Body = {
        "index": 0,
        "finish_reason": finish_reason(sampled),
        "stop_reason": None,
        "token_ids": [*sampled.turn.tokens],
        "logprobs": {"content": content},
    }
    common = _identify(head, "generate", sampled.turn.number)
    common["request_id"] = common.pop("id")
    return DoorReply({**common, "usage": _usage_of_turn(sampled), "output_mode": "tokens", "choices": [choice]})


def finish_reason(sampled: SampledTurn, *, has_calls: bool = False) -> str:
    """Return OpenAI's `finish_reason` of a turn: `stop`, `tool_calls` or `length`."""
    if sampled.turn.finish_reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if has_calls else "stop"


def usage_of(prompt: int, generated: int) -> Body:
    """Return OpenAI's object `usage` for these numbers of prompt tokens and generated tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _usage_of_turn(sampled: SampledTurn) -> Body:
    return usage_of(sampled.num_context_tokens, len(sampled.turn.tokens))


def encode_events(events: Sequence[Body]) -> bytes:
    """Encode events as server-sent events, followed by `[DONE]`."""
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + DONE_EVENT


def _identify(head: ReplyHead, kind: str, number: int | str) -> Body:
    """Return the fields that identify an answer. The ID contains the number of the turn, not a random number, so that
    a repeated episode gets the same answers."""
    return {"id": f"{kind}-{number}", "created": head.created, "model": head.model}


def _scored(sampled: SampledTurn) -> Iterator[tuple[int, float]]:
    """Return the tokens of a turn with their log-probs."""
    return zip(sampled.turn.tokens, sampled.turn.logprobs, strict=True)
