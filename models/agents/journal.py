"""Journal of the episodes of a rollout shard that is being generated, so that a killed worker loses no finished episode
and no answered request. Does not import torch.

The journal of a shard has its own folder in the run's store, named by a digest of the work. It contains an object for
each turn as soon as its tokens were sampled, and an object for each episode that has ended or was cut. A worker that
does the same work again takes these episodes from the journal. Agents of other episodes start again. A request that the
journal contains gets the recorded turn, whatever the order of the requests. The journal is deleted when the shard is
stored.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Self

from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

from rheostat.infra.errors import StoreFailed
from rheostat.infra.store.contracts import Objects
from rheostat.models.agents.branches import RecordedTurn
from rheostat.models.agents.earlier import is_possible_length
from rheostat.models.agents.stored_branches import Ending
from rheostat.models.config.episodes import EpisodeSettings
from rheostat.models.engines.protocol import Completion
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.work import RolloutWork
from rheostat.models.rollouts.groups import ChatMessage

logger = logging.getLogger(__name__)

FOLDER: Final = "episodes"
"""Folder of the run's store with the journals of unfinished rollout shards."""
_END: Final = "end.json"
_PARALLEL: Final = 8


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    """Episode that has ended or was cut in this iteration: its turns, and why it ended."""

    turns: tuple[RecordedTurn, ...]
    finish_reason: FinishReason
    error: str
    reward: float | None
    rewards: Mapping[int, float]
    replayed: frozenset[int]
    messages: tuple[tuple[str, str, str | None], ...]
    """Role, content and name of each message."""
    begun: int | None = None
    """Policy version with which a cut episode began, or None if the episode has ended."""

    @classmethod
    def of(cls, turns: Sequence[RecordedTurn], ending: Ending) -> Self:
        """Return an episode as the journal stores it."""
        messages = tuple((each["role"], each["content"], each["name"]) for each in ending.messages)
        numbers = ending.reward, ending.rewards, ending.replayed
        return cls(tuple(turns), ending.finish_reason, ending.error, *numbers, messages, ending.begun)

    @property
    def ending(self) -> Ending:
        """State with which the episode has ended."""
        messages = tuple(ChatMessage(role=role, content=text, name=name) for role, text, name in self.messages)
        numbers = self.reward, self.rewards, self.replayed
        return Ending(self.finish_reason, self.error, *numbers, messages, self.begun)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Turn that was sampled for a request."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason


_WORK: Final = TypeAdapter(RolloutWork)
_ENDED: Final = TypeAdapter(EndedEpisode)
_ANSWER: Final = TypeAdapter(_Answer)


@dataclass(frozen=True, slots=True)
class RecordedAnswers:
    """Answered requests of one episode, which are recorded in the store."""

    store: Objects
    folder: str
    """Prefix of the keys of the episode's objects."""
    found: dict[str, Completion] = field(default_factory=dict)
    """Completions by the digest of the request."""
    on_failure: Callable[[StoreFailed], None] = lambda error: None
    """Function that is called if an answer cannot be recorded."""

    def find(self, request: str, /, *, max_tokens: int) -> Completion | None:
        """Return the recorded completion of the request with this digest. Return None if there is none, or if sampling
        with at most `max_tokens` tokens could not have ended there."""
        answer = self.found.get(request)
        if answer is None or not is_possible_length(len(answer.tokens), answer.finish_reason, max_tokens=max_tokens):
            return None
        return answer

    def add(self, request: str, completion: Completion, /) -> None:
        """Record the answer to a request. A kill of this process does not lose the record, but a power failure may.
        Raises StoreFailed if it cannot be stored."""
        self.found[request] = completion
        answer = _Answer(completion.tokens, completion.logprobs, completion.text, completion.finish_reason)
        try:
            self.store.put(f"{self.folder}{request}.json", _ANSWER.dump_json(answer), durable=False)
        except StoreFailed as error:
            self.on_failure(error)
            raise


class EpisodeJournal:
    """Journal of the episodes of one rollout shard. Episodes are named by prompt row and sample, such as `12-0`."""

    def __init__(self, store: Objects, work: RolloutWork, settings: EpisodeSettings) -> None:
        """Read the journal that an earlier worker has left for the same work with the same settings, if there is
        one."""
        self._store = store
        digest = blake3(_WORK.dump_json(work) + settings.model_dump_json().encode()).hexdigest(length=8)
        self._prefix = f"{FOLDER}/{digest}/"
        self._answers: dict[str, RecordedAnswers] = {}
        self.failure: StoreFailed | None = None
        """First error of the store, such as a full disk, or None. It ends the work, because the agent is not its
        cause."""
        self.ended: dict[str, EndedEpisode] = {}
        """Episodes that have ended or were cut in this iteration, by name."""
        keys = [entry.key for entry in store.entries(self._prefix)]
        with ThreadPoolExecutor(_PARALLEL) as threads:
            for key, content in zip(keys, threads.map(store.find, keys), strict=True):
                if content is not None:  # otherwise it was deleted meanwhile
                    self._read(key.removeprefix(self._prefix), content)

    def _read(self, name: str, content: bytes) -> None:
        """Read an object of the journal. A power failure may have damaged the object: it is then deleted, and the turn
        or the episode is sampled again."""
        episode, _, part = name.partition("/")
        try:
            if part == _END:
                self.ended[episode] = _ENDED.validate_json(content)
                return
            answer = _ANSWER.validate_json(content)
        except ValidationError:
            logger.warning("%s%s in %s is damaged and was deleted", self._prefix, name, self._store.uri)
            self._store.delete(f"{self._prefix}{name}")
            return
        completion = Completion(answer.tokens, answer.logprobs, answer.text, answer.finish_reason)
        self.answers_of(episode).found[part.removesuffix(".json")] = completion

    def answers_of(self, episode: str) -> RecordedAnswers:
        """Return the answered requests of an episode."""
        new = RecordedAnswers(self._store, f"{self._prefix}{episode}/", on_failure=self._keep_failure)
        return self._answers.setdefault(episode, new)

    def _keep_failure(self, error: StoreFailed) -> None:
        self.failure = self.failure or error

    def add_ended(self, episode: str, ended: EndedEpisode) -> None:
        """Record the end of an episode, or that the episode was cut in this iteration."""
        self.ended[episode] = ended
        self._store.put(f"{self._prefix}{episode}/{_END}", _ENDED.dump_json(ended), durable=False)

    def delete(self) -> None:
        """Delete the journal, because its shard is stored or its turns are void."""
        self._answers, self.ended = {}, {}
        keys = [entry.key for entry in self._store.entries(self._prefix)]
        with ThreadPoolExecutor(_PARALLEL) as threads:
            for _ in threads.map(self._store.delete, keys):
                pass
