"""Episodes of agents: programs of the user that request the policy's turns. Does not import torch.

An agent runs in a process of its own and sends requests to the door, which samples and records the turns. The engine
holds nothing of an episode between its requests. A failure of an agent costs its own episode alone: the episode has
failed, its score is missing, and the reason is stored with its last turn.
"""

import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from pydantic import JsonValue

from rheostat.infra.errors import WorkerLost
from rheostat.infra.plugins import nearest_name
from rheostat.infra.processes.agents import AgentEnd, AgentHosts, AgentOrder
from rheostat.infra.processes.child import MAX_ENDS
from rheostat.models.agents.branches import EpisodeRecord
from rheostat.models.agents.door import Door
from rheostat.models.agents.journal import EndedEpisode, EpisodeJournal
from rheostat.models.agents.routes import AgentRoutes
from rheostat.models.agents.sampler import OpenEpisode, TurnLimits
from rheostat.models.agents.stored_branches import Ending, fill
from rheostat.models.config.agents import AgentSettings
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.seeds import derive_seed
from rheostat.models.rollouts.groups import Group, PartialCompletion, store_messages

MAX_REFUSED: Final = 200
"""Number of refused requests after which an agent is stopped."""
POLL_SECONDS: Final = 0.1
"""Interval in which the time limits of agents are checked."""
RESULT_KEYS: Final = ("reward", "rewards")
"""Keys of an agent's result."""


@dataclass(slots=True, eq=False)
class _Episode:
    """One completion in progress, whose agent runs or will run."""

    group: Group
    draft: PartialCompletion
    index: tuple[int, int]
    """Index of the group, and of the completion in the group."""
    name: str = ""
    """Name of the agent in its current run."""
    key: str = ""
    """API key of the agent in its current run."""
    open: OpenEpisode | None = None
    """Turns that the current run of the agent has requested. None before the agent was started."""
    seconds: float = 0.0
    """Time that the agent has used."""
    ends: list[str] = field(default_factory=list)
    """Reasons why earlier runs of the agent were lost."""

    @property
    def label(self) -> str:
        """Name of the episode in the journal."""
        return f"{self.group.prompt_row}-{self.index[1]}"

    @property
    def recorded(self) -> OpenEpisode:
        """Turns that the running agent has requested."""
        assert self.open is not None, "the agent was started"
        return self.open


@dataclass(slots=True, eq=False)
class AgentEpisodes:
    """Runner of all episodes of a rollout shard. Agents run at the same time, as many as keep the engine busy."""

    settings: AgentSettings
    hosts: AgentHosts
    routes: AgentRoutes
    find_limits: Callable[[PartialCompletion], TurnLimits]
    """Function that returns the limits on the requests of an episode."""
    places: int
    """Number of completions that the engine decodes at the same time."""
    names: Iterator[str]
    """Iterator over names of agents, which are never used twice."""
    on_progress: Callable[[], None]
    """Function that is called when an episode advances without the engine."""
    find_failure: Callable[[], BaseException | None]
    """Function that returns an error of the engine, with which all episodes end, or None."""
    tokenizer: str
    """Directory of the policy's tokenizer, for programs that need it, or an empty text."""
    journal: EpisodeJournal
    """Journal of the shard, from which ended episodes are taken."""
    _live: dict[str, _Episode] = field(default_factory=dict)
    """Episodes whose agents run, by the name of the agent."""

    def complete(self, groups: Sequence[Group]) -> list[Group]:
        """Run each unfinished completion as an episode to its end, and return the groups with the resulting
        completions.

        Raises BadInput if the agent cannot be used, WorkerLost if its processes are repeatedly ended from outside, and
        every error of the engine.
        """
        drafts = [[self._read_ended(group, sample) for sample in range(len(group.drafts))] for group in groups]
        waiting = deque(
            _Episode(group, draft, (place, sample))
            for place, group in enumerate(groups)
            for sample, draft in enumerate(drafts[place])
            if draft.finish_reason is FinishReason.CUT
        )
        door = Door(self.routes)
        try:
            while waiting or self._live:
                while waiting and self._has_room(door):
                    self._start(waiting.popleft(), door)
                for episode, draft in self._advance(door):
                    if draft is None:
                        waiting.appendleft(episode)
                    else:
                        drafts[episode.index[0]][episode.index[1]] = draft
                    self.on_progress()
        finally:
            for name in self._live:
                self.hosts.stop(name)
            self._live.clear()
            door.close()
        return [replace(group, drafts=tuple(new)) for group, new in zip(groups, drafts, strict=True)]

    def _read_ended(self, group: Group, sample: int) -> PartialCompletion:
        """Return a completion as it is in the journal if its episode has ended there, else unchanged."""
        draft, ended = group.drafts[sample], self.journal.ended.get(f"{group.prompt_row}-{sample}")
        if ended is None:
            return draft
        return fill(EpisodeRecord(ended.turns), draft, ended.ending, decode=self.routes.decode)

    def _has_room(self, door: Door) -> bool:
        """Return whether another agent may start. No agent starts while as many turns are being generated, or agents
        have not sent their first request, as the engine decodes at the same time."""
        if len(self._live) >= self.settings.open_episodes:
            return False
        busy = sum(
            door.count_requests(each.key)[0] > 0 or not each.recorded.record.num_requests
            for each in self._live.values()
        )
        return busy < self.places

    def _start(self, episode: _Episode, door: Door) -> None:
        """Start the agent of an episode, with no turns."""
        episode.open = OpenEpisode(
            seed=episode.draft.seed,
            limits=self.find_limits(episode.draft),
            row=episode.group.prompt_row,
            answers=self.journal.answers_of(episode.label),
        )
        episode.seconds, episode.name, episode.key = 0.0, next(self.names), door.admit(episode.open)
        self._live[episode.name] = episode
        group = episode.group
        problem: Mapping[str, JsonValue] = {**group.columns, "prompt": group.prompt, "answer": group.answer}
        if self.tokenizer:
            problem = {**problem, "tokenizer": self.tokenizer}
        seed = derive_seed(episode.draft.seed, "environment")
        self.hosts.start(AgentOrder(episode.name, problem, seed, url=door.url, key=episode.key))

    def _advance(self, door: Door) -> Iterator[tuple[_Episode, PartialCompletion | None]]:
        """Wait until agents end, and yield each ended episode with its completion, or with None if it must run again.
        Agents that exceed a limit are stopped."""
        began = time.monotonic()
        for end in self.hosts.wait(POLL_SECONDS, partial(self._listen, door)):
            episode = self._live.pop(end.episode, None)
            if episode is not None:  # otherwise it was stopped
                door.dismiss(episode.key)
                yield episode, self._finish(episode, end)
        if (error := self.find_failure()) is not None:
            raise error
        passed = time.monotonic() - began
        for episode in [*self._live.values()]:
            num_sampled, num_refused = door.count_requests(episode.key)
            if not num_sampled and self.hosts.has_started(episode.name):
                episode.seconds += passed
                self.on_progress()
            if reason := self._find_excess(episode, num_refused):
                del self._live[episode.name]
                door.dismiss(episode.key)
                self.hosts.stop(episode.name)
                yield episode, self._fail(episode, reason)

    def _listen(self, door: Door, name: str, listener: socket.socket) -> None:
        """Let the agent in a sandbox reach the door."""
        if name in self._live:
            door.listen(listener, self._live[name].key)
        else:
            listener.close()

    def _find_excess(self, episode: _Episode, num_refused: int) -> str:
        """Return the limit that an agent exceeds, or an empty text."""
        if episode.seconds > self.settings.agent_seconds:
            return f"the agent ran longer than {self.settings.agent_seconds:g} s (rollout.environment.agent_seconds)"
        if num_refused > MAX_REFUSED:
            return f"the agent sent more than {MAX_REFUSED} requests that were refused"
        return ""

    # ---- ends
    def _finish(self, episode: _Episode, end: AgentEnd) -> PartialCompletion | None:
        """Return the completion of an episode whose agent has ended, or None if the agent was lost and must run
        again."""
        if end.is_lost:
            episode.ends.append(end.error)
            if len(episode.ends) < MAX_ENDS:
                return None
            if not self.hosts.is_isolated:
                raise WorkerLost(
                    f"{self.settings.run.where}: the process of the agents ended {len(episode.ends)} times in a row "
                    f"({end.error}). Check that the machine has enough memory and that nothing kills the process."
                )
        if end.error:
            return self._fail(episode, f"the agent failed: {end.error}")
        try:
            reward, rewards = read_result(end.result)
        except ValueError as error:
            return self._fail(episode, str(error))
        if not episode.recorded.record.turns():
            return self._fail(episode, "the agent ended without a turn of the policy")
        last = episode.recorded.record.turns()[-1]
        reason = FinishReason.LENGTH if last.finish_reason is FinishReason.LENGTH else FinishReason.STOP
        return self._fill(episode, Ending(reason, reward=reward, rewards=rewards))

    def _fail(self, episode: _Episode, reason: str) -> PartialCompletion:
        return self._fill(episode, Ending(FinishReason.FAILED, error=reason))

    def _fill(self, episode: _Episode, ending: Ending) -> PartialCompletion:
        """Return the completion that stores the turns of an episode."""
        opened = episode.recorded
        messages, replayed = store_messages(opened.last_chat[1]), frozenset(opened.replayed)
        ending = replace(ending, messages=messages, replayed=replayed)
        record = EpisodeRecord(opened.record.turns())
        self.journal.add_ended(episode.label, EndedEpisode.of(record.turns(), ending))
        return fill(record, episode.draft, ending, decode=self.routes.decode)


def read_result(result: JsonValue) -> tuple[float | None, dict[int, float]]:
    """Return the reward of the episode and the rewards of single turns from the result of an agent: None, a number, or
    an object with `reward` and `rewards`. Raises ValueError for anything else."""
    if result is None or _is_number(result):
        return (None if result is None else _read_number(result, "the result")), {}
    if not isinstance(result, dict):
        raise ValueError(f"the agent must return None, a number or an object, but it returned {result!r:.60}")
    for name in result:
        if name not in RESULT_KEYS:
            hint = nearest_name(name, RESULT_KEYS)
            raise ValueError(f"the result of the agent has the unknown key {name!r:.60}{hint}")
    reward, rewards = result.get("reward"), result.get("rewards") or {}
    if not isinstance(rewards, dict) or not all(number.isascii() and number.isdigit() for number in rewards):
        raise ValueError("rewards of the agent's result must be an object whose keys are numbers of requests")
    return (
        None if reward is None else _read_number(reward, "reward"),
        {int(number): _read_number(value, f"rewards[{number}]") for number, value in rewards.items()},
    )


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_number(value: JsonValue, name: str) -> float:
    """Return a finite number. Raises ValueError for anything else."""
    if _is_number(value) and isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise ValueError(f"{name} of the agent must be a finite number, but it is {value!r:.60}")
