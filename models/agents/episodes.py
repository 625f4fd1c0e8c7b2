"""Episodes of agents: programs of the user that request the policy's turns. Does not import torch.

An agent runs in a separate process and sends requests to the policy server (`Door`), which samples and records the
turns. Between the requests of an episode, the engine keeps nothing of it. If an agent fails, only its episode fails:
the score is missing, and the reason is stored with the last turn.

With partial rollout, an episode is cut when it has used its token budget of the iteration, or when the time of the
shard is over. The agent is stopped, and the next iteration starts it again with the stored turns.
"""

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Final

from pydantic import JsonValue

from rheostat.infra.counts import format_count
from rheostat.infra.errors import WorkerLost
from rheostat.infra.plugins import nearest_name
from rheostat.infra.processes.agents import AgentEnd, AgentHosts, AgentOrder
from rheostat.infra.processes.child import MAX_ENDS
from rheostat.models.agents.branches import EpisodeRecord
from rheostat.models.agents.door import Door
from rheostat.models.agents.earlier import EarlierTurns
from rheostat.models.agents.journal import EndedEpisode, EpisodeJournal
from rheostat.models.agents.routes import AgentRoutes
from rheostat.models.agents.sampler import OpenEpisode, TurnLimits
from rheostat.models.agents.stored_branches import Ending, fill, read
from rheostat.models.config.agents import AgentSettings
from rheostat.models.config.rollout import PartialRollout
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.seeds import derive_seed
from rheostat.models.rollouts.groups import Group, PartialCompletion, store_messages

logger = logging.getLogger(__name__)

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
    budget: int | None
    """Number of tokens after which the episode is cut in this iteration, or None if the episode runs to its end."""
    name: str = ""
    """Name of the agent in its current run."""
    key: str = ""
    """API key of the agent in its current run."""
    open: OpenEpisode | None = None
    """Turns that the current run of the agent has requested. None before the agent was started."""
    seconds: float = 0.0
    """Seconds that the agent has run, except the time in which the policy generated for it."""
    ends: list[str] = field(default_factory=list)
    """Reasons why earlier runs of the agent were lost."""
    is_stopped: bool = False
    """Whether the agent was stopped because the episode is cut."""

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
    """Runner of all episodes of a rollout shard. As many agents run at the same time as are needed to keep the engine
    busy."""

    settings: AgentSettings
    hosts: AgentHosts
    routes: AgentRoutes
    version: int
    """Version of the policy that samples the turns."""
    partial: PartialRollout | None
    """Settings with which episodes are cut, or None if every episode runs to its end."""
    find_limits: Callable[[Group], TurnLimits]
    """Function that returns the limits on the requests of an episode of a group."""
    places: int
    """Number of completions that the engine decodes at the same time."""
    names: Iterator[str]
    """Iterator over names of agents, which are never used twice."""
    on_progress: Callable[[], None]
    """Function that is called when an episode ends, or while an agent works without waiting for the policy."""
    find_failure: Callable[[], BaseException | None]
    """Function that returns the error of the engine or of the journal, or None. An error ends all episodes."""
    tokenizer: str
    """Directory of the policy's tokenizer, for programs that need it, or an empty string."""
    journal: EpisodeJournal
    """Journal of the shard, from which ended and cut episodes are taken."""
    _began: float = field(default_factory=time.monotonic)
    _live: dict[str, _Episode] = field(default_factory=dict)
    """Episodes whose agents run, by the name of the agent."""

    def complete(self, groups: Sequence[Group]) -> list[Group]:
        """Run each unfinished completion as an episode, to its end or until it is cut, and return the groups with the
        resulting completions.

        Raises BadInput if the agent cannot be used, WorkerLost if its processes are repeatedly ended from outside, and
        every error of the engine.
        """
        drafts = [[self._read_ended(group, sample) for sample in range(len(group.drafts))] for group in groups]
        waiting = deque(self._list_waiting(groups, drafts))
        door = Door(self.routes)
        try:
            while waiting or self._live:
                while waiting and self._has_room(door):
                    self._start(waiting.popleft(), door)
                for episode, draft in chain(self._cut_waiting(waiting), self._advance(door)):
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
        """Return a completion of a group: the one in the journal if its episode has ended or was cut, else the draft of
        the group."""
        draft, ended = group.drafts[sample], self.journal.ended.get(f"{group.prompt_row}-{sample}")
        if ended is None:
            return draft
        return fill(EpisodeRecord(ended.turns), draft, ended.ending, decode=self.routes.decode)

    def _list_waiting(
        self, groups: Sequence[Group], drafts: Sequence[Sequence[PartialCompletion]]
    ) -> Iterator[_Episode]:
        """Yield an episode for each unfinished completion in `drafts` that the journal does not contain."""
        for index, group in enumerate(groups):
            budget = group.find_token_budget(self.version, self.partial)
            for sample, draft in enumerate(drafts[index]):
                episode = _Episode(group, draft, (index, sample), budget)
                if draft.finish_reason is FinishReason.CUT and episode.label not in self.journal.ended:
                    yield episode

    @property
    def _is_late(self) -> bool:
        """Whether the time of the shard is over, so that episodes are cut."""
        seconds = None if self.partial is None else self.partial.iteration_seconds
        return seconds is not None and time.monotonic() - self._began >= seconds

    def _has_room(self, door: Door) -> bool:
        """Return whether another agent may start: if fewer than `open_episodes` agents run, and fewer than `places` of
        them are busy. An agent is busy if it waits for a turn or has not sent its first request."""
        if len(self._live) >= self.settings.open_episodes:
            return False
        busy = sum(
            door.count_requests(each.key)[0] > 0 or not each.recorded.record.num_requests
            for each in self._live.values()
        )
        return busy < self.places

    def _start(self, episode: _Episode, door: Door) -> None:
        """Start the agent of an episode with an empty record. Requests that match stored turns return these turns."""
        earlier = read(episode.draft).turns()
        episode.open = OpenEpisode(
            seed=episode.draft.seed,
            limits=self.find_limits(episode.group),
            row=episode.group.prompt_row,
            answers=self.journal.answers_of(episode.label),
            earlier=EarlierTurns(earlier, decode=self.routes.decode, ends=self.routes.form.ends),
            budget=episode.budget,
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
        """Wait at most `POLL_SECONDS` for agents to end. Yield each ended or cut episode with its completion, or with
        None if it must run again. Stops agents that exceed a limit, and raises the error of the engine or of the
        journal if there is one."""
        began = time.monotonic()
        ends = self.hosts.wait(POLL_SECONDS, partial(self._listen, door))
        if (error := self.find_failure()) is not None:  # the agents may have ended because of it
            raise error
        for end in ends:
            episode = self._live.get(end.episode)
            if episode is not None and not episode.recorded.is_cut:  # otherwise it was stopped, or is cut below
                self._remove(episode, door)
                yield episode, self._finish(episode, end)
        passed = time.monotonic() - began
        yield from self._cut_live(door)
        for episode in [each for each in self._live.values() if not each.recorded.is_cut]:
            num_sampled, num_refused = door.count_requests(episode.key)
            if not num_sampled and self.hosts.has_started(episode.name):
                episode.seconds += passed
                self.on_progress()
            if reason := self._find_excess(episode, num_refused):
                self._remove(episode, door)
                self.hosts.stop(episode.name)
                yield episode, self._fail(episode, reason)

    def _cut_waiting(self, waiting: deque[_Episode]) -> Iterator[tuple[_Episode, PartialCompletion]]:
        """If the time of the shard is over, remove the waiting episodes that may be cut, and yield each one with its
        completion. A completion whose agent has never started is unchanged."""
        for episode in [each for each in waiting if each.budget is not None] if self._is_late else ():
            waiting.remove(episode)
            yield episode, episode.draft if episode.open is None else self._cut(episode)

    def _cut_live(self, door: Door) -> Iterator[tuple[_Episode, PartialCompletion]]:
        """Stop the agents of episodes that are cut, and yield each of these episodes when its last turn is sampled."""
        for episode in [*self._live.values()]:
            if self._is_late and episode.budget is not None:
                episode.recorded.cut()
            if episode.recorded.is_cut and not episode.is_stopped:
                episode.is_stopped = True
                self.hosts.stop(episode.name)
            is_sampling = episode.recorded.num_sampling or door.count_requests(episode.key)[0]
            if episode.recorded.is_cut and not is_sampling:
                self._remove(episode, door)
                yield episode, self._cut(episode)

    def _remove(self, episode: _Episode, door: Door) -> None:
        """Accept no more requests of an episode whose agent has ended or is stopped."""
        del self._live[episode.name]
        door.dismiss(episode.key)

    def _listen(self, door: Door, name: str, listener: socket.socket) -> None:
        """Connect the listener of a sandbox to the policy server. Close it if the episode has ended."""
        if name in self._live:
            door.listen(listener, self._live[name].key)
        else:
            listener.close()

    def _find_excess(self, episode: _Episode, num_refused: int) -> str:
        """Return the limit that an agent exceeds, or an empty string."""
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
            return self._fail(
                episode,
                "the agent ended without a turn of the policy. Check that it sends its requests to OPENAI_BASE_URL",
            )
        last = episode.recorded.record.turns()[-1]
        reason = FinishReason.LENGTH if last.finish_reason is FinishReason.LENGTH else FinishReason.STOP
        return self._fill(episode, Ending(reason, reward=reward, rewards=rewards))

    def _fail(self, episode: _Episode, reason: str) -> PartialCompletion:
        return self._fill(episode, Ending(FinishReason.FAILED, error=reason))

    def _cut(self, episode: _Episode) -> PartialCompletion:
        """Return the completion of an episode that continues in a later iteration."""
        begun = episode.draft.find_first_version(self.version)
        return self._fill(episode, Ending(FinishReason.CUT, begun=begun))

    def _fill(self, episode: _Episode, ending: Ending) -> PartialCompletion:
        """Return the completion that stores the turns of an episode. A cut episode keeps the turns of earlier
        iterations that its agent has not requested again so far."""
        opened = episode.recorded
        messages, replayed = store_messages(opened.last_chat[1]), frozenset(opened.replayed)
        ending = replace(ending, messages=messages, replayed=replayed)
        turns = opened.record.turns()
        if ending.finish_reason is FinishReason.CUT:
            turns = opened.earlier.add_unused(turns)
        elif opened.earlier.num_unused:
            logger.warning(
                "%s of prompt row %d, sample %d, were not requested again by the restarted agent, so they are dropped. "
                "To keep turns, the agent must send the same requests when it starts again: use RHEOSTAT_SEED for what "
                "it chooses at random",
                format_count(opened.earlier.num_unused, "recorded turn"),
                episode.group.prompt_row,
                episode.index[1],
            )
        self.journal.add_ended(episode.label, EndedEpisode.of(turns, ending))
        return fill(EpisodeRecord(turns), episode.draft, ending, decode=self.routes.decode)


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
        raise ValueError(
            'rewards of the agent\'s result must be an object whose keys are the numbers of turns, such as "0" and "1"'
        )
    return (
        None if reward is None else _read_number(reward, "reward"),
        {int(number): _read_number(value, f"rewards[{number}]") for number, value in rewards.items()},
    )


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float)  # True is 1.0


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
