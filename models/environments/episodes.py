"""Episodes: the policy writes a turn, the environment answers, until one of them is done. Torch-free.

Tokens in, tokens out (T1 to T4 of "Environments"): what the policy sampled stays as it is, what the environment says is
appended behind it, and no text is ever tokenised again.

All live episodes of a batch write their next turn in one call of the engine; which episodes meet follows from the work
alone, so a shard repeats itself to the bit where the engine does and the environment is a function of problem, seed and
turns. While one batch's environments answer, the next generates. An engine that batches requests as they come has every
episode go at its own pace instead.

With partial rollout the policy writes so many tokens of an episode in an iteration: it is cut in a turn, or before one.
Its environment is told all turns again when the next turn has ended, as where a process was lost.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from threading import Event
from typing import Final

from infra.processes.episodes import Asked, EnvironmentStep
from models.config.engines import SamplingConfig
from models.config.environments import EpisodeSettings
from models.config.rollout import PartialRollout
from models.data.problems import Message
from models.engines.protocol import Completion, Generate, InterleavingEngine, Request, WritesCompletions
from models.environments.answers import Answered, Answering
from models.environments.clock import EnvironmentClock
from models.environments.histories import History
from models.records.schemas import FinishReason
from models.records.seeds import derive_seed
from models.rollouts.groups import ChatMessage, Group, PartialCompletion, TurnRecord
from models.text.calls import ParsedTurn, Parser
from models.text.own_prompts import Exchange
from models.text.turns import TurnFormat

LEAST_OBSERVATION: Final = 8
"""Tokens that a message is given at least: what is left out takes seven to mark."""
IN_FLIGHT: Final = 512
"""Episodes of a shard that go at their own pace at a time."""


@dataclass(slots=True)
class _Episode:
    """One completion on its way."""

    number: int
    group: Group
    draft: PartialCompletion
    limit: int | None
    """Tokens that policies have written where it is cut, for now; none where it comes to its end."""
    turns: list[ParsedTurn] = field(default_factory=list)
    """Those that have ended."""
    spelt: list[Mapping[str, object]] = field(default_factory=list)
    """The turns that ended in this iteration, as the history has them."""
    exchanges: list[Exchange] = field(default_factory=list)
    """Those of this iteration."""

    @property
    def left(self) -> int | None:
        """Tokens of the budget."""
        return None if self.limit is None else self.limit - self.draft.num_written

    @property
    def is_live(self) -> bool:
        return self.draft.finish_reason is FinishReason.CUT and self.left != 0

    @property
    def is_asking(self) -> bool:
        """Whether its last turn waits for an answer, if it was just written."""
        return self.draft.finish_reason is FinishReason.CUT and not self.draft.num_open

    def asked(self) -> Asked:
        """Ask the environment about the last turn."""
        return Asked(
            episode=f"{self.number}-{self.draft.seed}",
            problem={**self.group.columns, "prompt": self.group.prompt, "answer": self.group.answer},
            seed=derive_seed(self.draft.seed, "environment"),
            turns=tuple({"text": turn.text, "calls": [asdict(call) for call in turn.calls]} for turn in self.turns),
        )

    def end(self, reason: FinishReason, *, error: str = "") -> None:
        """Let it be over; where the environment failed, its last turn tells why."""
        self.draft = replace(self.draft, finish_reason=reason)
        if error:
            last = self.draft.turns[-1] if self.draft.turns else TurnRecord(tokens=0)
            self.draft = replace(self.draft, turns=(*self.draft.turns[:-1], replace(last, error=error)))


@dataclass(frozen=True, slots=True)
class Episodes:
    """What the episodes of a shard have to do with each other: engine, environments, and how turns are read."""

    engine: WritesCompletions
    environments: Answering
    settings: EpisodeSettings
    sampling: SamplingConfig
    version: int
    """Of the policy."""
    partial: PartialRollout | None
    history: History
    form: TurnFormat
    parse: Parser
    clock: EnvironmentClock

    def complete(self, groups: Sequence[Group]) -> list[Group]:
        """Bring every completion to its end, or to the budget."""
        with self.clock.running():
            if isinstance(self.engine, InterleavingEngine):
                episodes = self.engine.interleaved(lambda generate: self._side_by_side(groups, generate))
            else:
                episodes = self._in_rounds(groups, self.engine.generate)
        drafts = iter(each.draft for each in episodes)
        return [replace(group, drafts=tuple(next(drafts) for _ in group.drafts)) for group in groups]

    def _side_by_side(self, groups: Sequence[Group], generate: Generate) -> list[_Episode]:
        """Have every episode go at its own pace."""
        episodes = self._episodes(groups)
        broken = Event()

        def play(episode: _Episode) -> None:
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

    def _in_rounds(self, groups: Sequence[Group], generate: Generate) -> list[_Episode]:
        """Have the live episodes of a batch write their turns together, one batch after the other."""
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
        self.environments.end([each.asked().episode for each in episodes], [each.number for each in episodes])

    def _begin(self, batch: Sequence[_Episode]) -> None:
        """Have the environments of new episodes begin; what they say first belongs to the prompt."""
        for episode, answered in self._answers([each for each in batch if each.is_live and not each.draft.segments]):
            if answered.step is None:
                episode.end(FinishReason.FAILED, error=answered.failure)
            elif answered.step.messages:
                self._open(episode, answered.step)

    def _open(self, episode: _Episode, step: EnvironmentStep) -> None:
        if self.form.is_chat:
            episode.end(FinishReason.FAILED, error="reset: expected None, since the prompts are chats; found a text")
            return
        said = self._shortened(step)
        tokens = self.form.observation(said)
        episode.draft = replace(episode.draft, input=episode.draft.input.answered(tokens), messages=_chatted(said))

    def _write(self, live: Sequence[_Episode], generate: Generate) -> None:
        """Have the policy write the next turn of each."""
        asked = self._requests(live)
        with self.clock.interrupted():
            written = generate([request for request, _ in asked], self.sampling)
        for (_, episodes), completions in zip(asked, written, strict=True):
            for episode, completion in zip(episodes, completions, strict=True):
                self._take(episode, completion)

    def _requests(self, live: Sequence[_Episode]) -> list[tuple[Request, list[_Episode]]]:
        """Ask for a turn of each, group by group."""
        groups: dict[int, list[_Episode]] = {}
        for episode in live:
            groups.setdefault(id(episode.group), []).append(episode)
        return [
            (request, [members[index] for index in places])
            for members in groups.values()
            for request, places in self.history.requests(
                members[0].group, [each.draft for each in members], [self._budget(each) for each in members]
            )
        ]

    def _budget(self, episode: _Episode) -> int:
        """Count the tokens that may still come of a turn, in this iteration."""
        rest = self.settings.turn_tokens - episode.draft.num_open
        return rest if episode.left is None else min(rest, episode.left)

    def _take(self, episode: _Episode, completion: Completion) -> None:
        """Read a turn unless the budget cut it; one that the length limit ended is the last."""
        episode.draft = draft = episode.draft.continued(completion, self.version)
        is_whole = completion.finish_reason is not FinishReason.CUT or draft.num_open == self.settings.turn_tokens
        if episode.left == 0 and not is_whole:
            return
        text = self._text(draft.written_turns()[-1])
        turn = self.parse(text)
        errors = sum(bool(call.error) for call in turn.calls)
        record = TurnRecord(tokens=draft.num_open, calls=len(turn.calls), errors=errors)
        wrote = ChatMessage(role="assistant", content=turn.text, name=None)
        draft = replace(draft, messages=(*draft.messages, wrote))
        if completion.finish_reason is FinishReason.STOP:
            episode.draft = replace(draft, finish_reason=FinishReason.CUT, turns=(*draft.turns, record))
            episode.turns.append(turn)
            episode.spelt.append(self.history.spelt(turn, text))
        else:
            episode.draft = replace(draft, finish_reason=FinishReason.LENGTH, turns=(*draft.turns, record))

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.form.tokenizer.decode(
            tokens[:-1] if tokens[-1] in self.form.ends else tokens, skip_special_tokens=False
        )
        return text

    def _answer(self, live: Sequence[_Episode]) -> None:
        """Have the environments answer the turns that were ended; episodes go on, or are over."""
        for episode, answered in self._answers([episode for episode in live if episode.is_asking]):
            if answered.step is None:
                episode.end(FinishReason.FAILED, error=answered.failure)
                continue
            try:
                self._append(episode, answered.step)
            except ValueError as error:  # the chat template refuses what the environment said
                episode.end(FinishReason.FAILED, error=str(error))

    def _append(self, episode: _Episode, step: EnvironmentStep) -> None:
        draft = episode.draft
        *before, last = draft.turns
        last = replace(last, reward=step.reward)
        if step.done or len(episode.turns) == self.settings.max_turns:
            episode.draft = replace(draft, turns=(*before, last))
            episode.end(FinishReason.STOP if step.done else FinishReason.TURNS)
            return
        said = self._shortened(step)
        episode.exchanges.append(Exchange(episode.spelt[-1], tuple(said)))
        followed = self.history.followed(draft, episode.group.chat, episode.exchanges)
        if followed is None:
            episode.draft = replace(draft, turns=(*before, last))
            episode.end(FinishReason.LENGTH)
            return
        observation = len(followed.logprobs) - len(draft.logprobs)
        episode.draft = replace(
            followed,
            turns=(*before, replace(last, observation=observation)),
            messages=(*draft.messages, *_chatted(said)),
        )

    def _shortened(self, step: EnvironmentStep) -> list[Message]:
        """Say what was said; all of it together is cut to the longest observation."""
        most = max(LEAST_OBSERVATION, self.settings.observation_tokens // max(1, len(step.messages)))
        return [Message(each.role, self.form.shortened(each.content, most), each.name) for each in step.messages]

    def _answers(self, episodes: Sequence[_Episode]) -> list[tuple[_Episode, Answered]]:
        asked = [episode.asked() for episode in episodes]
        told = self.environments.answer(asked, [each.number for each in episodes])
        self.clock.answered(sum(each.seconds for each in told))
        return [*zip(episodes, told, strict=True)]

    def _episodes(self, groups: Sequence[Group]) -> list[_Episode]:
        pairs = [(group, draft) for group in groups for draft in group.drafts]
        return [self._episode(number, *pair) for number, pair in enumerate(pairs)]

    def _episode(self, number: int, group: Group, draft: PartialCompletion) -> _Episode:
        """Begin an episode, or read back what was written of one."""
        budget = group.budget(self.version, self.partial)
        limit = None if budget is None else draft.num_written + budget
        is_cut = draft.finish_reason is FinishReason.CUT
        ended = [self.parse(self._text(turn)) for turn in draft.written_turns()[:-1]] if is_cut else []
        return _Episode(number, group, draft, limit, turns=ended)


def _chatted(said: Sequence[Message]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=each.role, content=each.text, name=each.name or None) for each in said)
