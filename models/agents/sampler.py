"""Sampling of single turns for programs that drive their own episodes: limits, engine calls and records.

This module does not import torch.
"""

import json
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Final, Protocol

from blake3 import blake3

from rheostat.models.agents.branches import EpisodeRecord, Place, RecordedTurn
from rheostat.models.agents.matching import ChatIndex
from rheostat.models.agents.wire import RefusedRequest
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.data.problems import Message
from rheostat.models.engines.protocol import Completion, Generate, Request, ScoreTokens, SequenceScores
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.turns import CHARACTERS_PER_TOKEN

CONTEXT_EXCEEDED: Final = "context_length_exceeded"
"""Error code of a request whose context leaves no room for a turn. Harnesses shorten their history after it."""
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
    """Turns of one episode that were sampled before a restart of its program, and a place to record new ones."""

    def find(self, request: str, /, *, max_tokens: int) -> Completion | None:
        """Return the recorded answer to a request, named by a digest, or None if there is none that sampling with at
        most `max_tokens` tokens could give."""

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
    replayed: set[int] = field(default_factory=set)
    """Numbers of the turns that were recorded before a restart of the program and returned to it again."""
    abandoned: Event = field(default_factory=Event, repr=False)
    """Event that is set when the episode has ended, so that the engine need not finish its turns."""
    last_chat: tuple[int, tuple[Message, ...]] = (-1, ())
    """Number of the last turn that answered a chat, and the messages of this chat with the answer."""

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
            if not 0 < len(tokens) <= episode.limits.context:
                raise _context_error(episode.limits, f"{len(tokens)} tokens")

    def score(self, episode: OpenEpisode, sequences: Sequence[Sequence[int]], top: int) -> list[SequenceScores]:
        """Return the log-probs of the tokens of sequences, and the `top` most probable tokens at each place. Raises
        CancelledError if the episode ends before."""
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
        with episode.opening:
            _check_requests(episode, len(places))
            numbers = [episode.record.open_turn(place, seed=episode.seed) for place in places]
        try:
            stop = tuple(dict.fromkeys((*self.sampling.stop, *wish.stop)))
            completions = self._answer(episode, numbers, limits, stop)
            return [
                SampledTurn(episode.record.extend_turn(number, completion, self.version), length, completion.text)
                for number, length, completion in zip(numbers, lengths, completions, strict=True)
            ]
        finally:
            for number in numbers:
                episode.record.drop_turn(number)  # only turns without tokens, after an error

    def _answer(
        self, episode: OpenEpisode, numbers: Sequence[int], limits: Sequence[int], stop: tuple[str, ...]
    ) -> list[Completion]:
        """Return the completions of opened turns: recorded ones, and new ones of the policy, which are recorded."""
        turns = [episode.record.turn(number) for number in numbers]
        digests = [blake3(json.dumps([turn.key, turn.occurrence, stop]).encode()).hexdigest() for turn in turns]
        known = [episode.answers.find(digest, max_tokens=limit) for digest, limit in zip(digests, limits, strict=True)]
        requests = [
            Request(
                row=episode.row,
                inputs=(ModelInput.from_prompt(episode.record.context_of(turn.number)),),
                seeds=(turn.seed,),
                max_tokens=limit,
                abandoned=episode.abandoned,
            )
            for turn, limit, answer in zip(turns, limits, known, strict=True)
            if answer is None
        ]
        sampling = self.sampling.model_copy(update={"stop": stop})
        new = iter(self.generate(requests, sampling) if requests else ())
        completions = []
        for turn, digest, answer in zip(turns, digests, known, strict=True):
            if answer is None:
                [answer] = next(new)
                episode.answers.add(digest, answer)
            else:
                episode.replayed.add(turn.number)
            completions.append(answer)
        return completions


def _count_context(episode: OpenEpisode, place: Place) -> int:
    """Return the number of tokens before a turn at this place."""
    earlier = 0 if place.parent is None else len(episode.record.tokens_of(place.parent))
    return earlier + len(place.context)


def check_length(text: str, limits: TurnLimits) -> None:
    """Raise RefusedRequest if a text is so long that it cannot fit into the context. Its tokens are not counted, which
    would take long."""
    if len(text) > limits.context * CHARACTERS_PER_TOKEN:
        raise _context_error(limits, f"{len(text)} characters")


def _context_error(limits: TurnLimits, length: str) -> RefusedRequest:
    return RefusedRequest(
        f"This model's maximum context length is {limits.context} tokens, but the request has {length} and needs room "
        "for an answer. Send at least one token, and fewer than that",
        code=CONTEXT_EXCEEDED,
    )


def _find_turn_limit(episode: OpenEpisode, num_context_tokens: int, wish: SamplingWish) -> int:
    """Return the maximum number of tokens of a turn after a context. Raises RefusedRequest if no token fits."""
    limits = episode.limits
    room = limits.context - num_context_tokens
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
