"""Sampling of single turns for programs that drive their own episodes: limits, engine calls and records.

This module does not import torch.
"""

import json
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from threading import Event, Lock
from typing import Final, Protocol

from blake3 import blake3

from rheostat.models.agents.branches import EpisodeRecord, Place, RecordedTurn
from rheostat.models.agents.earlier import EarlierTurns
from rheostat.models.agents.matching import ChatIndex
from rheostat.models.agents.wire import RefusedRequest
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.data.problems import Message
from rheostat.models.engines.protocol import Completion, Generate, Request, ScoreTokens, SequenceScores
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FinishReason
from rheostat.models.text.turns import CHARACTERS_PER_TOKEN

CONTEXT_EXCEEDED: Final = "context_length_exceeded"
"""Error code of a request whose context leaves no room for a turn. Agent programs shorten their history when they
receive it."""
EPISODE_LIMIT: Final = "episode_limit"
"""Error code of a request after the episode has used its requests or tokens."""


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Limits on the requests of one episode."""

    turn_tokens: int
    """Maximum number of tokens that the policy samples in one turn."""
    episode_tokens: int
    """Number of sampled tokens in all turns, after which requests are refused. Requests that are answered at the same
    time may together exceed it."""
    requests: int
    """Maximum number of turns in the episode."""
    concurrent: int
    """Maximum number of requests that may be open at the same time."""
    context: int
    """Context length of the policy in tokens: maximum length of a turn and all tokens before it."""


class Answers(Protocol):
    """Store of the sampled turns of one episode, used when its program restarts. `RecordedAnswers` implements it, and
    `TurnSampler` calls it."""

    def find(self, request: str, /, *, max_tokens: int) -> Completion | None:
        """Return the recorded completion of the request with this digest. Return None if there is none, or if sampling
        with at most `max_tokens` tokens could not have ended there."""

    def add(self, request: str, completion: Completion, /) -> None:
        """Record the answer to a request."""


class NoAnswers:
    """Answers of an episode that is not recorded."""

    def find(self, request: str, /, *, max_tokens: int) -> None:
        """Return None."""

    def add(self, request: str, completion: Completion, /) -> None:
        """Do nothing."""


@dataclass(slots=True, eq=False)
class OpenEpisode:
    """Episode that a program drives: its seed, its limits, and the turns so far."""

    seed: int
    limits: TurnLimits
    row: int = 0
    """Index of the problem in its prompt shard, for messages."""
    record: EpisodeRecord = field(default_factory=EpisodeRecord)
    chats: ChatIndex = field(default_factory=ChatIndex)
    opening: Lock = field(default_factory=Lock, repr=False)
    """Lock that is held while turns are counted and opened."""
    answers: Answers = field(default_factory=NoAnswers)
    earlier: EarlierTurns = field(default_factory=EarlierTurns)
    """Turns that earlier iterations have sampled."""
    budget: int | None = None
    """Number of tokens of the present policy version after which the episode is cut, or None for no such limit."""
    is_cut: bool = False
    """Whether the episode continues in a later iteration. Its requests are then refused."""
    num_sampling: int = 0
    """Number of requests whose turns are being sampled."""
    num_scored: int = 0
    """Number of prompts for which only log-probs were requested."""
    replayed: set[int] = field(default_factory=set)
    """Numbers of the turns that were recorded before a restart of the program and returned to it again."""
    abandoned: Event = field(default_factory=Event, repr=False)
    """Event that is set when the episode has ended, so that the engine need not finish its turns."""
    last_chat: tuple[int, tuple[Message, ...]] = (-1, ())
    """Number of the last turn that answered a chat, and the messages of this chat with the answer."""

    def cut(self) -> None:
        """Refuse all further requests, because the episode continues in a later iteration."""
        with self.opening:
            self.is_cut = True

    def open_turns(self, places: Sequence[Place]) -> list[int]:
        """Reserve a turn at each place for a request, and return their numbers. Raises RefusedRequest if the episode is
        cut or may not have that many turns."""
        with self.opening:
            if self.is_cut:
                raise _cut_error()
            _check_requests(self, len(places))
            self.num_sampling += 1
            return [self.record.open_turn(place, seed=self.seed) for place in places]

    def count_scored(self, num_prompts: int) -> None:
        """Count prompts for which only log-probs are requested. Raises RefusedRequest if the episode is cut or has sent
        as many as it may have turns."""
        with self.opening:
            if self.is_cut:
                raise _cut_error()
            if self.num_scored + num_prompts > self.limits.requests:
                raise RefusedRequest(
                    f"the episode may send {self.limits.requests} prompts without sampling, which it has sent",
                    code=EPISODE_LIMIT,
                )
            self.num_scored += num_prompts

    def close_turns(self, numbers: Sequence[int]) -> None:
        """Mark the request of reserved turns as answered. Turns without tokens are removed, because their request has
        failed."""
        with self.opening:
            for number in numbers:
                self.record.drop_turn(number)
            self.num_sampling -= 1

    def note_chat(self, number: int, messages: tuple[Message, ...]) -> None:
        """Record the chat that ends with the turn `number`, unless a later turn has answered a chat."""
        with self.opening:
            if number > self.last_chat[0]:
                self.last_chat = number, messages


@dataclass(frozen=True, slots=True)
class SamplingWish:
    """Settings that a request may choose within the limits of the run."""

    max_tokens: int | None = None
    """Maximum number of tokens of the turn, or None for no further limit."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn, in addition to those of the run."""
    is_scored: bool = False
    """Whether the log-probs of the prompt and the turn are computed. This needs room for one more token, because vLLM
    samples a token after every prompt."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """Turn that the policy sampled for a request."""

    turn: RecordedTurn
    num_context_tokens: int
    """Number of all tokens before the turn."""
    text: str
    """Text of the turn without special tokens."""


@dataclass(frozen=True, slots=True)
class TurnSampler:
    """Sampler of turns with one policy. Temperature, top_p and top_k are those of the run, so that the recorded
    log-probs belong to the distribution that is trained. Several threads may use it concurrently."""

    generate: Generate
    """Function that generates completions and may be called by several threads."""
    sampling: SamplingConfig
    version: int
    """Version of the policy."""
    score_tokens: ScoreTokens | None = None
    """Function that computes the log-probs of the tokens of a sequence, or None if the engine cannot compute them."""

    def check_scored(self, episode: OpenEpisode, prompts: Sequence[Sequence[int]]) -> None:
        """Raise RefusedRequest if the engine cannot compute log-probs of prompts, or if a prompt exceeds the
        context."""
        if self.score_tokens is None:
            raise RefusedRequest(
                "the engine of this policy computes no log-probs of prompts. Use the engine 'transformers', or remove "
                "the field",
                param="logprobs",
            )
        for tokens in prompts:
            if not 0 < len(tokens) < episode.limits.context:
                raise _context_error(episode.limits, f"{len(tokens)} tokens")

    def score(self, episode: OpenEpisode, sequences: Sequence[Sequence[int]], top: int) -> list[SequenceScores]:
        """Return the log-probs of the tokens of sequences, and the `top` most probable tokens at each position. Raises
        CancelledError if the episode has ended."""
        assert self.score_tokens is not None, "`check_scored` was called"
        scores = []
        for tokens in sequences:
            if episode.abandoned.is_set():
                raise CancelledError
            scores.append(self.score_tokens(tokens, top))
        return scores

    def sample(self, episode: OpenEpisode, places: Sequence[Place], wish: SamplingWish) -> list[SampledTurn]:
        """Sample one turn at each place and record it.

        Raises RefusedRequest if the episode has used a limit or a context leaves no room for a turn.
        """
        lengths = [_count_context(episode, place) for place in places]
        limits = [_find_turn_limit(episode, length, wish) for length in lengths]
        numbers = episode.open_turns(places)
        try:
            stop = tuple(dict.fromkeys((*self.sampling.stop, *wish.stop)))
            texts = self._answer(episode, numbers, limits, stop)
            turns = [episode.record.turn(number) for number in numbers]
            if any(turn.finish_reason is FinishReason.CUT for turn in turns):
                for number, text in zip(numbers, texts, strict=True):
                    episode.record.describe_turn(number, text=text)
                episode.cut()
                raise _cut_error()
            return [SampledTurn(*each) for each in zip(turns, lengths, texts, strict=True)]
        finally:
            episode.close_turns(numbers)

    def _answer(
        self, episode: OpenEpisode, numbers: Sequence[int], limits: Sequence[int], stop: tuple[str, ...]
    ) -> list[str]:
        """Fill opened turns with tokens, and return the texts of the turns. The tokens are those of a stored turn of an
        earlier iteration, those that the journal of this iteration contains, or new ones, which are added to the
        journal.

        Raises RefusedRequest if the episode is cut because it has sampled its tokens of this iteration.
        """
        texts = {}
        for number, limit in zip(numbers, limits, strict=True):
            text = episode.earlier.find(episode.record.turn(number), episode.record, stop=stop, max_tokens=limit)
            if text is not None:
                episode.replayed.add(number)
                texts[number] = text
        unfinished = [
            _UnfinishedTurn(turn, limit, _name_request(turn, stop))
            for turn, limit in zip(map(episode.record.turn, numbers), limits, strict=True)
            if turn.finish_reason is FinishReason.CUT
        ]
        for each, completion in zip(unfinished, self._complete(episode, unfinished, stop), strict=True):
            episode.record.extend_turn(each.turn.number, completion, self.version)
            texts[each.turn.number] = completion.text
        return [texts[number] for number in numbers]

    def _complete(
        self, episode: OpenEpisode, turns: Sequence["_UnfinishedTurn"], stop: tuple[str, ...]
    ) -> list[Completion]:
        """Return one completion for each unfinished turn. It is read from the journal if the journal contains it.
        Otherwise it is sampled and added to the journal."""
        known = [episode.answers.find(each.digest, max_tokens=each.num_missing) for each in turns]
        unknown = [each for each, answer in zip(turns, known, strict=True) if answer is None]
        new = iter(self._generate(episode, unknown, stop) if unknown else ())
        completions = []
        for each, answer in zip(turns, known, strict=True):
            if answer is None:
                answer = each.name_length_limit(next(new))
                episode.answers.add(each.digest, answer)
            else:
                episode.replayed.add(each.turn.number)
            completions.append(answer)
        return completions

    def _generate(
        self, episode: OpenEpisode, turns: Sequence["_UnfinishedTurn"], stop: tuple[str, ...]
    ) -> list[Completion]:
        """Sample tokens of turns. Raises RefusedRequest, and cuts the episode, if it may sample no more tokens in this
        iteration."""
        left = None if episode.budget is None else episode.budget - episode.record.count_tokens_of(self.version)
        if left is not None and left <= 0:
            episode.cut()
            raise _cut_error()
        requests = [
            Request(
                row=episode.row,
                inputs=(each.build_input(episode.record),),
                seeds=(each.turn.seed,),
                budget=left,
                max_tokens=each.limit,
                abandoned=episode.abandoned,
            )
            for each in turns
        ]
        answers = self.generate(requests, self.sampling.model_copy(update={"stop": stop}))
        return [completion for [completion] in answers]


@dataclass(frozen=True, slots=True)
class _UnfinishedTurn:
    """Turn that needs more tokens: a new one, or one that an earlier iteration has cut."""

    turn: RecordedTurn
    limit: int
    """Maximum number of tokens of the turn."""
    digest: str
    """Key of the request in `Answers`."""

    @property
    def num_missing(self) -> int:
        """Maximum number of tokens that the turn may still get."""
        return self.limit - len(self.turn.tokens)

    def build_input(self, record: EpisodeRecord) -> ModelInput:
        """Return the context of the turn and its tokens so far."""
        context = ModelInput.from_prompt(record.context_of(self.turn.number))
        return context.append_completion(self.turn.tokens) if self.turn.tokens else context

    def name_length_limit(self, completion: Completion) -> Completion:
        """Replace the finish reason `cut` by `length` if the turn has reached its maximum length. Engines report `cut`
        at a maximum below that of the run."""
        is_longest = completion.finish_reason is FinishReason.CUT and len(completion.tokens) == self.num_missing
        return replace(completion, finish_reason=FinishReason.LENGTH) if is_longest else completion


def _name_request(turn: RecordedTurn, stop: Sequence[str]) -> str:
    """Return the digest by which the further tokens of a turn are recorded."""
    name = [turn.key, turn.occurrence, len(turn.tokens), *stop]
    return blake3(json.dumps(name).encode()).hexdigest()


def _count_context(episode: OpenEpisode, place: Place) -> int:
    """Return the number of tokens before a turn at this place."""
    earlier = 0 if place.parent is None else len(episode.record.tokens_of(place.parent))
    return earlier + len(place.context)


def check_length(text: str, limits: TurnLimits) -> None:
    """Raise RefusedRequest if a text is so long that it cannot fit into the context. Its tokens are not counted, which
    would take long."""
    if len(text) > limits.context * CHARACTERS_PER_TOKEN:
        raise _context_error(limits, f"{len(text)} characters")


def _cut_error() -> RefusedRequest:
    """Return the error of a request whose episode continues in a later iteration. Clients repeat requests with this
    status later, so that an agent is usually stopped before it notices the error."""
    return RefusedRequest(
        "the episode continues in a later iteration of the training run, in which the agent starts again",
        status=409,
        code="episode_cut",
    )


def _context_error(limits: TurnLimits, length: str) -> RefusedRequest:
    return RefusedRequest(
        f"This model's maximum context length is {limits.context} tokens, but the request has {length} and needs room "
        "for an answer. Shorten the request, or send at least one token if it is empty",
        code=CONTEXT_EXCEEDED,
    )


def _find_turn_limit(episode: OpenEpisode, num_context_tokens: int, wish: SamplingWish) -> int:
    """Return the maximum number of tokens of a turn after a context. Raises RefusedRequest if no token fits."""
    limits = episode.limits
    room = limits.context - num_context_tokens - wish.is_scored
    if room <= 0 or num_context_tokens == 0:
        raise _context_error(limits, f"{num_context_tokens} tokens")
    left = limits.episode_tokens - episode.record.num_generated
    if left <= 0:
        raise RefusedRequest(
            f"the episode may generate {limits.episode_tokens} tokens in all its turns, which it has used",
            code=EPISODE_LIMIT,
        )
    return min(room, left, limits.turn_tokens, *([] if wish.max_tokens is None else [wish.max_tokens]))


def _check_requests(episode: OpenEpisode, num_new: int) -> None:
    """Raise RefusedRequest if the episode may not have `num_new` further turns."""
    if episode.record.num_requests + num_new > episode.limits.requests:
        raise RefusedRequest(
            f"the episode may have {episode.limits.requests} turns. It has {episode.record.num_requests} and the "
            f"request needs {num_new} more",
            code=EPISODE_LIMIT,
        )
