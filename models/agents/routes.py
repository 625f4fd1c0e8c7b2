"""Routes of the door: convert requests to turns of the policy, and turns to answers. Does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TypeVar

from rheostat.models.agents.branches import Place
from rheostat.models.agents.matching import ChatInput, match_messages, match_tokens
from rheostat.models.agents.replies import (
    Body,
    ContinuedText,
    DoorReply,
    ReplyHead,
    build_answer,
    chat_reply,
    encode_scores,
    models_body,
    text_reply,
    token_reply,
)
from rheostat.models.agents.sampler import OpenEpisode, SampledTurn, SamplingWish, TurnSampler, check_length
from rheostat.models.agents.wire import ChatRequest, RefusedRequest, TextRequest, TokenRequest
from rheostat.models.config.policy_server import ObservedHistory
from rheostat.models.engines.requests import decode_texts, generation_settings, stated_ends
from rheostat.models.records.schemas import FinishReason
from rheostat.models.text.calls import ParsedTurn, Parser, build_parser
from rheostat.models.text.per_turn import decode_turn
from rheostat.models.text.tokenizer import build_token_decoder, load_tokenizer, tokenize_prompts
from rheostat.models.text.turns import TurnFormat, turn_format

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class AgentRoutes:
    """Answers to the requests of programs, sampled by one policy. Several threads may use the routes concurrently."""

    sampler: TurnSampler
    form: TurnFormat
    """Format of the policy's turns, without tools."""
    head: ReplyHead
    parser: str = "auto"
    """Name of the parser of tool calls (`rheostat.models.text.calls.build_parser`)."""
    history: ObservedHistory = "append"
    _text: Lock = field(default_factory=Lock, init=False, repr=False)
    """Lock that is held while a tokenizer or template is used."""

    def list_models(self, episode: OpenEpisode) -> Body:
        """Return the body of `GET /v1/models`."""
        return models_body(self.head, context=episode.limits.context)

    def answer_chat(self, episode: OpenEpisode, request: ChatRequest) -> DoorReply:
        """Sample the next message of a chat. Raises RefusedRequest if the chat cannot be rendered or a limit is
        reached."""
        if not self.form.is_chat:
            raise RefusedRequest("the policy's tokenizer has no chat template. Use /v1/completions", param="messages")
        check_length(request.model_dump_json(), episode.limits)
        chat, parse, place = self._read(lambda: self._match_chat(episode, request), param="messages")
        wish = SamplingWish(request.longest, request.stops)
        [sampled] = self.sampler.sample(episode, [place], wish)
        turn, text = self._parse(sampled, parse, wish)
        number, calls = sampled.turn.number, turn.calls
        errors = sum(bool(call.error) for call in calls)
        episode.record.describe_turn(number, text=turn.text, calls=len(calls), errors=errors)
        answer = build_answer(turn, text, number=number)
        episode.chats.add(chat, answer, number)
        episode.note_chat(number, (*chat.messages, answer))
        wants = {"logprobs": bool(request.logprobs), **_wants(request)}
        return chat_reply(self.head, sampled, answer, decode=build_token_decoder(self.form.tokenizer), wants=wants)

    def answer_texts(self, episode: OpenEpisode, request: TextRequest) -> DoorReply:
        """Sample continuations of texts or token sequences, and compute log-probs. Raises RefusedRequest if a limit is
        reached, or if the engine cannot compute log-probs of prompts."""
        if request.max_tokens == 0 and not request.echo:
            raise RefusedRequest("max_tokens may only be 0 together with echo", param="max_tokens")
        for prompt in request.prompts:
            check_length(prompt if isinstance(prompt, str) else "", episode.limits)
        prompts = self._read(lambda: [self._encode(prompt) for prompt in request.prompts], param="prompt")
        if request.logprobs is not None:
            self.sampler.check_scored(episode, prompts)
        continued = self._continue_texts(episode, request, prompts)
        if request.echo:
            echoed = [each if isinstance(each, str) else self.decode(each) for each in request.prompts]
            continued = [replace(each, text=prompt + each.text) for prompt, each in zip(echoed, continued, strict=True)]
        if request.logprobs is not None:
            continued = self._add_scores(episode, request, continued)
        return text_reply(self.head, continued, wants=_wants(request))

    def _continue_texts(
        self, episode: OpenEpisode, request: TextRequest, prompts: Sequence[Sequence[int]]
    ) -> list[ContinuedText]:
        """Sample the continuation of each prompt, unless `max_tokens` is 0."""
        if request.max_tokens == 0:
            episode.count_scored(len(prompts))
            return [ContinuedText(prompt, None, "") for prompt in prompts]
        wish = SamplingWish(request.max_tokens, request.stops, is_scored=request.logprobs is not None)
        places = self._read(lambda: [match_tokens(episode.record, prompt) for prompt in prompts], param="prompt")
        continued = []
        for prompt, sampled in zip(prompts, self.sampler.sample(episode, places, wish), strict=True):
            text = self._cut(sampled.text, sampled, wish)
            episode.record.describe_turn(sampled.turn.number, text=text)
            continued.append(ContinuedText(prompt, sampled, text))
        return continued

    def _add_scores(
        self, episode: OpenEpisode, request: TextRequest, continued: Sequence[ContinuedText]
    ) -> list[ContinuedText]:
        """Return answers with the log-probs of the sampled tokens, and of the prompts if they are part of the text."""
        top, sequences = request.logprobs or 0, [(*each.prompt, *each.tokens) for each in continued]
        scores = self.sampler.score(episode, sequences, top)
        decode = build_token_decoder(self.form.tokenizer)
        with self._text:
            return [
                replace(
                    each,
                    logprobs=encode_scores(tokens, found, first=0 if request.echo else len(each.prompt), decode=decode),
                )
                for each, tokens, found in zip(continued, sequences, scores, strict=True)
            ]

    def answer_tokens(self, episode: OpenEpisode, request: TokenRequest) -> DoorReply:
        """Sample the tokens that follow a token sequence. Raises RefusedRequest if a limit is reached, or if the
        request has other end tokens than the policy."""
        sampling = request.sampling_params
        if others := sorted({*(sampling.stop_token_ids or [])} - {*self.form.ends}):
            raise RefusedRequest(
                f"sampling_params.stop_token_ids: {others} do not end turns of this policy, whose end tokens are "
                f"{list(self.form.ends)}. Add them to eos_token_id in the policy's generation_config.json",
                param="sampling_params.stop_token_ids",
            )
        place = self._read(lambda: match_tokens(episode.record, self._encode(request.token_ids)), param="token_ids")
        [sampled] = self.sampler.sample(episode, [place], SamplingWish(sampling.max_tokens, sampling.stops))
        episode.record.describe_turn(sampled.turn.number, text=sampled.text)
        return token_reply(self.head, sampled)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special tokens."""
        with self._text:
            [text] = decode_texts(self.form.tokenizer, [tokens])
            return text

    def _read(self, read: Callable[[], _T], *, param: str) -> _T:
        """Return the result of `read`, which uses the tokenizer. Raises RefusedRequest for the field `param` if the
        input is invalid."""
        try:
            with self._text:
                return read()
        except ValueError as error:  # BadInput, or a chat that the template rejects
            raise RefusedRequest(str(error).strip().partition("\n")[0], param=param) from error

    def _match_chat(self, episode: OpenEpisode, request: ChatRequest) -> tuple[ChatInput, Parser, Place]:
        chat = request.chat()
        tools = chat.arguments.tools  # without tools, the text of a turn is not parsed
        parse = build_parser(self.parser, self.form.tokenizer, tools=tools) if tools else ParsedTurn
        return chat, parse, match_messages(episode.record, episode.chats, chat, self.form, history=self.history)

    def _parse(self, sampled: SampledTurn, parse: Parser, wish: SamplingWish) -> tuple[ParsedTurn, str]:
        """Return the parsed turn, and its text before parsing. Special tokens are part of the text only if the turn is
        parsed for tool calls."""
        with self._text:
            whole = sampled.text if parse is ParsedTurn else decode_turn(self.form, sampled.turn.tokens)
            text = self._cut(whole, sampled, wish)
            return parse(text), text

    def _cut(self, text: str, sampled: SampledTurn, wish: SamplingWish) -> str:
        """Return the text of a turn before the stop text that ended the turn, if a stop text ended it."""
        turn = sampled.turn
        if turn.finish_reason is not FinishReason.STOP or not {*turn.tokens[-1:]}.isdisjoint(self.form.ends):
            return text
        found = [text.find(stop) for stop in (*self.sampler.sampling.stop, *wish.stop)]
        return text[: min((at for at in found if at >= 0), default=None)]

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """Return the tokens of a prompt. Control tokens in a text are encoded as ordinary text. Raises ValueError for
        IDs that the tokenizer does not have."""
        if isinstance(prompt, str):
            [tokenized] = tokenize_prompts([prompt], self.form.tokenizer, sources=["request"])
            tokens: list[int] = tokenized.input.tokens.tolist()
            return tokens
        if unknown := [token for token in prompt if token >= len(self.form.tokenizer)]:
            raise ValueError(
                f"the token {unknown[0]} is not in the vocabulary, which has {len(self.form.tokenizer)} tokens"
            )
        return prompt


def read_form(directory: Path) -> TurnFormat:
    """Return the format of the policy's turns. `directory` contains the policy's tokenizer."""
    tokenizer = load_tokenizer(directory)
    ends = stated_ends(generation_settings(directory))
    return turn_format(tokenizer, stated=ends, is_chat=bool(tokenizer.chat_template))


def _wants(request: ChatRequest | TextRequest) -> Mapping[str, bool]:
    """Return which optional parts of an answer are requested."""
    options = request.stream_options
    return {
        "usage": bool(options and options.include_usage),
        "token_ids": bool(request.return_token_ids),
    }
