"""Episodes: the policy generates a turn and the environment answers, until one of them ends the episode.

This module does not import torch. Tokens are never re-tokenized: the policy's sampled tokens stay unchanged, and the
environment's observations are appended after them (rules T1 to T4 in the documentation of environments).

All live episodes of a batch generate their next turn in one engine call. Which episodes share a call does not depend on
timing, so a shard is bit-reproducible if the engine is deterministic and the environment is a function of problem, seed
and turns. While the environments of one batch answer, the next batch generates. With an engine that batches concurrent
calls (`InterleavingEngine`), every episode continues independently of the others instead.

With partial rollout, the policy generates a limited number of tokens of an episode per iteration. The episode is then
cut within or before a turn. If the time of a shard is limited too, its episodes are cut before a turn. When the next
iteration has finished that turn, a new environment receives all turns again, as after the loss of an environment
process.
"""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from threading import Event
from typing import Final

from rheostat.infra.processes.episodes import EnvironmentStep, EpisodeRequest
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.episodes import SteppedEnvironment
from rheostat.models.config.rollout import PartialRollout
from rheostat.models.data.problems import Message
from rheostat.models.engines.protocol import Completion, Generate, GeneratesCompletions, InterleavingEngine, Request
from rheostat.models.environments.clock import EnvironmentClock
from rheostat.models.environments.context import ContextBuilder
from rheostat.models.environments.responders import Responder, TurnAnswer
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.seeds import derive_seed
from rheostat.models.rollouts.groups import ChatMessage, Group, PartialCompletion, TurnRecord, store_messages
from rheostat.models.text.calls import ParsedTurn, Parser
from rheostat.models.text.per_turn import Exchange, decode_turn
from rheostat.models.text.turns import TurnFormat

MIN_OBSERVATION_TOKENS: Final = 8
"""Minimum number of tokens to which an observation (a message of the environment) is shortened. Seven of them are for
the marker of the omitted text."""
IN_FLIGHT: Final = 512
"""Maximum number of episodes that run concurrently, each in a separate thread."""


@dataclass(slots=True)
class _Episode:
    """One completion in progress, with its parsed turns and the environment's answers so far."""

    number: int
    group: Group
    draft: PartialCompletion
    limit: int | None
    """Number of generated tokens at which the episode is interrupted in this iteration and continued in the next, or
    None if there is no limit."""
    deadline: float = math.inf
    """Reading of `time.monotonic` after which the episode is interrupted in this iteration."""
    turns: list[ParsedTurn] = field(default_factory=list)
    """All finished turns of the episode, with the tool calls parsed from them."""
    spelt: list[Mapping[str, object]] = field(default_factory=list)
    """Finished turns of this iteration as messages of the chat template, from which the context builder renders later
    prompts."""
    exchanges: list[Exchange] = field(default_factory=list)
    """Turns that finished in this iteration, each with the environment's answer."""

    @property
    def left(self) -> int | None:
        """Number of tokens that the policy may still generate in this iteration, or None if there is no limit."""
        return None if self.limit is None else self.limit - self.draft.num_generated

    @property
    def is_live(self) -> bool:
        """Whether the episode is unfinished and may generate more tokens in this iteration. Time interrupts no episode
        before its first token."""
        is_late = self.draft.num_generated > 0 and time.monotonic() >= self.deadline
        return self.draft.finish_reason is FinishReason.CUT and self.left != 0 and not is_late

    @property
    def is_asking(self) -> bool:
        """Whether the last turn is finished and waits for the environment's answer."""
        return self.draft.finish_reason is FinishReason.CUT and not self.draft.num_turn_tokens

    def asked(self) -> EpisodeRequest:
        """Build the request to the environment to answer the last turn."""
        return EpisodeRequest(
            episode=f"{self.number}-{self.draft.seed}",
            problem={**self.group.columns, "prompt": self.group.prompt, "answer": self.group.answer},
            seed=derive_seed(self.draft.seed, "environment"),
            turns=tuple({"text": turn.text, "calls": [asdict(call) for call in turn.calls]} for turn in self.turns),
        )

    def end(self, reason: FinishReason, *, error: str = "") -> None:
        """Mark the episode as ended for this reason. `error` is the environment's error, if any, and is stored with the
        last turn."""
        self.draft = replace(self.draft, finish_reason=reason)
        if error:
            last = self.draft.turns[-1] if self.draft.turns else TurnRecord(tokens=0)
            self.draft = replace(self.draft, turns=(*self.draft.turns[:-1], replace(last, error=error)))


@dataclass(frozen=True, slots=True)
class Episodes:
    """Runner of all episodes of a rollout shard, with the engine, environments and turn format that they share."""

    engine: GeneratesCompletions
    environments: Responder
    settings: SteppedEnvironment
    sampling: SamplingConfig
    version: int
    """Version of the policy that generates the turns."""
    partial: PartialRollout | None
    history: ContextBuilder
    form: TurnFormat
    parse: Parser
    clock: EnvironmentClock

    def complete(self, groups: Sequence[Group]) -> list[Group]:
        """Run each episode to its end or to its token limit, and return the groups with the resulting completions."""
        with self.clock.measure_idle():
            if isinstance(self.engine, InterleavingEngine):
                episodes = self.engine.run_interleaved(lambda generate: self._run_side_by_side(groups, generate))
            else:
                episodes = self._run_in_rounds(groups, self.engine.generate)
        drafts = iter(each.draft for each in episodes)
        return [replace(group, drafts=tuple(next(drafts) for _ in group.drafts)) for group in groups]

    def _run_side_by_side(self, groups: Sequence[Group], generate: Generate) -> list[_Episode]:
        """Run each episode in a separate thread, without waiting for the others between turns.

        If one episode raises an exception, the others stop after their current turn.
        """
        episodes = self._episodes(groups)
        broken = Event()

        def play(episode: _Episode) -> None:
            """Run one episode to its end or until another episode has failed."""
            try:
                self._begin([episode])
                while episode.is_live and not broken.is_set():
                    self._write([episode], generate)
                    self._answer([episode])
                self._end([episode])
            except BaseException:
                broken.set()
                raise

        with ThreadPoolExecutor(min(len(episodes), IN_FLIGHT), thread_name_prefix="episode") as threads:
            for _ in threads.map(play, episodes):
                pass
        return episodes

    def _run_in_rounds(self, groups: Sequence[Group], generate: Generate) -> list[_Episode]:
        """Run batches of episodes in rotation. In each round, all unfinished episodes of a batch generate their next
        turn in one engine call."""
        episodes = self._episodes(groups)
        place = {id(group): index for index, group in enumerate(groups)}
        count = self.settings.batches
        batches = [[each for each in episodes if place[id(each.group)] % count == batch] for batch in range(count)]
        with ThreadPoolExecutor(count, thread_name_prefix="batch") as threads:
            waiting: list[Future[None] | None] = [threads.submit(self._begin, batch) for batch in batches]
            while any(waiting):
                for index, batch in enumerate(batches):
                    answering = waiting[index]
                    if answering is None:
                        continue
                    answering.result()
                    live = [episode for episode in batch if episode.is_live]
                    if live:
                        self._write(live, generate)
                    waiting[index] = threads.submit(self._answer, live) if live else None
        self._end(episodes)
        return episodes

    def _end(self, episodes: Sequence[_Episode]) -> None:
        """Report to the environments that the episodes have ended, so that the environments release their state."""
        self.environments.end([each.asked().episode for each in episodes], [each.number for each in episodes])

    def _begin(self, batch: Sequence[_Episode]) -> None:
        """Start the environments of new episodes. The environment's first messages, if any, are appended to the
        prompt."""
        for episode, answered in self._request_answers(
            [each for each in batch if each.is_live and not each.draft.segments]
        ):
            if answered.step is None:
                episode.end(FinishReason.FAILED, error=answered.failure)
            elif answered.step.messages:
                self._open(episode, answered.step)

    def _open(self, episode: _Episode, step: EnvironmentStep) -> None:
        """Append the environment's first observation to the prompt. If prompts are chats, an observation makes the
        episode fail, because no text can follow a rendered chat."""
        if self.form.is_chat:
            episode.end(FinishReason.FAILED, error="reset: expected None, since the prompts are chats; found a text")
            return
        messages = self._shorten_messages(step)
        tokens = self.form.encode_observation(messages)
        episode.draft = replace(
            episode.draft, input=episode.draft.input.append_observation(tokens), messages=store_messages(messages)
        )

    def _write(self, live: Sequence[_Episode], generate: Generate) -> None:
        """Generate the next turn of each unfinished episode."""
        requests = self._build_requests(live)
        with self.clock.pause_idle():
            generated = generate([request for request, _ in requests], self.sampling)
        for (_, episodes), completions in zip(requests, generated, strict=True):
            for episode, completion in zip(episodes, completions, strict=True):
                self._take(episode, completion)

    def _build_requests(self, live: Sequence[_Episode]) -> list[tuple[Request, list[_Episode]]]:
        """Build the engine requests for the next turns, group by group. Each request is paired with the episodes that
        it continues."""
        groups: dict[int, list[_Episode]] = {}
        for episode in live:
            groups.setdefault(id(episode.group), []).append(episode)
        return [
            (request, [members[index] for index in places])
            for members in groups.values()
            for request, places in self.history.build_requests(
                members[0].group, [each.draft for each in members], [self._budget(each) for each in members]
            )
        ]

    def _budget(self, episode: _Episode) -> int:
        """Return the maximum number of tokens that the current turn of an episode may still generate in this
        iteration."""
        rest = self.settings.turn_tokens - episode.draft.num_turn_tokens
        return rest if episode.left is None else min(rest, episode.left)

    def _take(self, episode: _Episode, completion: Completion) -> None:
        """Append generated tokens to the episode, and parse the turn if it is now finished. A turn that reached the
        length limit is the last turn of its episode."""
        episode.draft = draft = episode.draft.append_completion(completion, self.version)
        is_whole = (
            completion.finish_reason is not FinishReason.CUT or draft.num_turn_tokens == self.settings.turn_tokens
        )
        if episode.left == 0 and not is_whole:
            return
        text = decode_turn(self.form, draft.generated_turns()[-1])
        turn = self.parse(text)
        errors = sum(bool(call.error) for call in turn.calls)
        record = TurnRecord(tokens=draft.num_turn_tokens, calls=len(turn.calls), errors=errors)
        wrote = ChatMessage(role="assistant", content=turn.text, name=None)
        draft = replace(draft, messages=(*draft.messages, wrote))
        if completion.finish_reason is FinishReason.STOP:
            episode.draft = replace(draft, finish_reason=FinishReason.CUT, turns=(*draft.turns, record))
            episode.turns.append(turn)
            episode.spelt.append(self.history.encode_turn(turn, text))
        else:
            episode.draft = replace(draft, finish_reason=FinishReason.LENGTH, turns=(*draft.turns, record))

    def _answer(self, live: Sequence[_Episode]) -> None:
        """Request the environment's answers to the turns that have finished. Each answer continues or ends its
        episode."""
        for episode, answered in self._request_answers([episode for episode in live if episode.is_asking]):
            if answered.step is None:
                episode.end(FinishReason.FAILED, error=answered.failure)
                continue
            try:
                self._append(episode, answered.step)
            except ValueError as error:  # the chat template rejects the environment's message
                episode.end(FinishReason.FAILED, error=str(error))

    def _append(self, episode: _Episode, step: EnvironmentStep) -> None:
        """Append the environment's answer to the episode, or end the episode.

        The episode ends if the environment reports its end, if the turn limit is reached, or if no room is left for
        another turn.
        """
        draft = episode.draft
        *before, last = draft.turns
        last = replace(last, reward=step.reward)
        if step.done or len(episode.turns) == self.settings.max_turns:
            episode.draft = replace(draft, turns=(*before, last))
            episode.end(FinishReason.STOP if step.done else FinishReason.TURNS)
            return
        messages = self._shorten_messages(step)
        episode.exchanges.append(Exchange(episode.spelt[-1], tuple(messages)))
        followed = self.history.append_context(draft, episode.group, episode.exchanges)
        if followed is None:
            episode.draft = replace(draft, turns=(*before, last))
            episode.end(FinishReason.LENGTH)
            return
        observation = len(followed.logprobs) - len(draft.logprobs)
        episode.draft = replace(
            followed,
            turns=(*before, replace(last, observation=observation)),
            messages=(*draft.messages, *store_messages(messages)),
        )

    def _shorten_messages(self, step: EnvironmentStep) -> list[Message]:
        """Return the messages of an observation, shortened so that together they have at most `observation_tokens`
        tokens."""
        max_tokens = max(MIN_OBSERVATION_TOKENS, self.settings.observation_tokens // max(1, len(step.messages)))
        return [Message(each.role, self.form.shorten(each.content, max_tokens), each.name) for each in step.messages]

    def _request_answers(self, episodes: Sequence[_Episode]) -> list[tuple[_Episode, TurnAnswer]]:
        """Request the environments' answers to the last turns, and record how many seconds they took. Returns each
        episode with its answer."""
        questions = [episode.asked() for episode in episodes]
        answers = self.environments.answer(questions, [each.number for each in episodes])
        self.clock.add_answer_time(sum(each.seconds for each in answers))
        return [*zip(episodes, answers, strict=True)]

    def _episodes(self, groups: Sequence[Group]) -> list[_Episode]:
        """Create an episode for each completion of each group."""
        pairs = [(group, draft) for group in groups for draft in group.drafts]
        seconds = None if self.partial is None else self.partial.iteration_seconds
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        return [self._episode(number, *pair, deadline) for number, pair in enumerate(pairs)]

    def _episode(self, number: int, group: Group, draft: PartialCompletion, deadline: float) -> _Episode:
        """Create an episode from a completion so far (`draft`). If the completion was interrupted in an earlier
        iteration, its finished turns are parsed again."""
        budget = group.find_token_budget(self.version, self.partial)
        limit = None if budget is None else draft.num_generated + budget
        is_cut = draft.finish_reason is FinishReason.CUT
        ended = [self.parse(decode_turn(self.form, turn)) for turn in draft.generated_turns()[:-1]] if is_cut else []
        return _Episode(number, group, draft, limit, math.inf if limit is None else deadline, turns=ended)
