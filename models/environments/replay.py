"""Replay of stored episodes: newly started environments answer the stored turns again. Does not import torch.

Each new answer is compared with the stored answer. The next stored turn follows whatever the environment answers, so
one difference does not hide later ones. An observation that exceeded the length limit of its episode was not stored and
is not compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from transformers import PreTrainedTokenizerFast

from rheostat.infra.store.contracts import Store
from rheostat.infra.store.runs import run_store
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.protocol import Completion, Request
from rheostat.models.environments.clock import EnvironmentClock
from rheostat.models.environments.context import build_context_builder, turn_seeds
from rheostat.models.environments.episodes import Episodes
from rheostat.models.environments.responders import build_responder
from rheostat.models.environments.runtime import read_turns
from rheostat.models.records.replays import Difference, ReplayWork
from rheostat.models.records.schemas import PROMPT_SCHEMA, FinishReason
from rheostat.models.rollouts.groups import Group, PartialCompletion, TurnRecord, fresh_groups, read_groups

SHOWN: Final = 60
"""Maximum number of characters of an answer that the description of a difference quotes."""
BEFORE: Final = 12
"""Number of characters before the first difference that are quoted as context."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Episode to replay, read from a rollout shard."""

    shard: str
    row: int
    begun: Group
    """Group that contains only this episode, without any turns. The replay starts from this group."""
    draft: PartialCompletion
    """Episode as stored in the shard, with all turns and observations."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """Response of the environment to one turn: the observation (as tokens), the reward, and whether the episode
    ended."""

    observation: tuple[int, ...]
    reward: float | None
    ending: str
    """Reason why the episode ended with this turn, or an empty string if it continued."""

    def told(self, tokenizer: PreTrainedTokenizerFast) -> str:
        """Return the response as one line of text, which is compared between original and replay, and shown in
        messages."""
        parts = [repr(tokenizer.decode(self.observation))] if self.observation else []
        parts += [f"reward {self.reward:g}"] if self.reward is not None else []
        parts += [f"the end ({self.ending})"] if self.ending else []
        return ", ".join(parts) or "nothing"


def replay(work: ReplayWork) -> list[Difference]:
    """Run stored episodes again in new environment processes, with the stored turns of the policy, and return the
    differences between stored and new answers of the environment.

    Raises BadInput if the environment cannot be used.
    """
    home, _, name = work.run_uri.rpartition("/")
    stored = _read_episodes(run_store(home, name), work)
    environment = work.environment.stepped
    assert environment is not None, "episodes of agents are not replayed"
    form, parse = read_turns(work.policy, environment)
    answers = build_responder(environment)
    episodes = Episodes(
        engine=_StoredTurns(stored, past=form.ends[0]),
        environments=answers,
        settings=environment,
        sampling=work.sampling,
        version=0,
        partial=None,
        history=build_context_builder(environment, form, work.sampling.max_new_tokens),
        form=form,
        parse=parse,
        clock=EnvironmentClock(),
    )
    try:
        played = episodes.complete([each.begun for each in stored])
    finally:
        answers.close()
    pairs = zip(stored, played, strict=True)
    return [
        difference for each, group in pairs for difference in _find_differences(each, group.drafts[0], form.tokenizer)
    ]


class _StoredTurns:
    """Replacement for the engine that returns the turns stored in shards instead of generating, regardless of the
    environment's answers.

    A request after the last stored turn of an episode gets one token and the finish reason LENGTH.
    """

    def __init__(self, stored: Sequence[_Stored], *, past: int) -> None:
        turns = [(each.draft, iter(_iterate_turns(each.draft))) for each in stored]
        self._left = {seed: stored_turns for draft, stored_turns in turns for seed in turn_seeds(draft)}
        self._past = Completion((past,), (0.0,), "", FinishReason.LENGTH)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        """Return the next stored turn of the episode that belongs to each seed in the requests."""
        return [[next(self._left[seed], self._past) for seed in request.seeds] for request in requests]


def _read_episodes(store: Store, work: ReplayWork) -> list[_Stored]:
    """Read the episodes to replay from their rollout shards, in the order of `work.episodes`."""
    prompts = read_shard(store, work.prompts, PROMPT_SCHEMA.names)
    episodes = []
    for shard in dict.fromkeys(shard for shard, _ in work.episodes):
        groups = read_groups(read_shard(store, shard), prompts)
        rows = [(group, draft) for group in groups for draft in group.drafts]
        for row in (row for each, row in work.episodes if each == shard):
            group, draft = rows[row]
            [fresh] = fresh_groups(
                prompts.slice(group.prompt_row, 1), [group.prompt_row], group_size=1, seed=0, iteration=0
            )
            fresh_group = replace(fresh, drafts=(replace(fresh.drafts[0], seed=draft.seed),))
            episodes.append(_Stored(shard.key, row, fresh_group, draft))
    order = {(shard.key, row): place for place, (shard, row) in enumerate(work.episodes)}
    return sorted(episodes, key=lambda each: order[each.shard, each.row])


def _iterate_turns(draft: PartialCompletion) -> Iterator[Completion]:
    """Yield each turn of a stored episode that the policy generated, as the completion that the engine would have
    returned."""
    for number, (turn, tokens) in enumerate(zip(draft.turns, draft.generated_turns(), strict=False), start=1):
        is_cut = number == len(draft.turns) and draft.finish_reason is FinishReason.LENGTH and turn.reward is None
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        if tokens:
            yield Completion(tokens, (0.0,) * len(tokens), "", reason)


def _find_differences(
    stored: _Stored, played: PartialCompletion, tokenizer: PreTrainedTokenizerFast
) -> Iterator[Difference]:
    """Yield the differences between the environment's answers stored with an episode and those in its replay
    (`played`)."""
    pairs = zip(_answers(stored.draft, stored.begun), _answers(played, stored.begun), strict=False)
    for turn, (expected, replayed) in enumerate(pairs):
        if expected != replayed:
            expected_text, replayed_text = expected.told(tokenizer), replayed.told(tokenizer)
            same = next(
                (at for at, (a, b) in enumerate(zip(expected_text, replayed_text, strict=False)) if a != b),
                len(expected_text),
            )
            yield Difference(
                shard=stored.shard,
                row=stored.row,
                turn=turn,
                expected=_shortened(expected_text, same),
                found=_shortened(replayed_text, same),
            )


def _answers(draft: PartialCompletion, begun: Group) -> Iterator[_Answer]:
    """Yield the environment's first message, and then its response to each turn of an episode (`draft`).

    `begun` is the group before the first turn, whose prompt shows where the first message begins.
    """
    opening = draft.input.prompt[begun.drafts[0].input.num_prompt_tokens :]
    before = 0 if draft.turns and draft.turns[0].tokens else len(draft.turns)
    yield _Answer(tuple(map(int, opening)), None, _ending(draft, draft.turns[0]) if before else "")
    at, turns = 0, draft.turns[before:]
    for number, turn in enumerate(turns, start=1):
        end = at + turn.tokens + turn.observation
        observation = draft.input.completion[at + turn.tokens : end]
        at = end
        ending = _ending(draft, turn) if number == len(turns) else ""
        yield _Answer(tuple(map(int, observation)), turn.reward, ending)


def _ending(draft: PartialCompletion, last: TurnRecord) -> str:
    """Return why an episode ended: the environment's error, or else the finish reason. `last` is the episode's last
    turn."""
    return last.error or draft.finish_reason.value


def _shortened(text: str, same: int) -> str:
    """Return at most `SHOWN` characters of a text, around the first character that differs from another text. `same` is
    the number of equal characters before it."""
    begin = max(0, same - BEFORE) if len(text) > SHOWN else 0
    end = begin + SHOWN
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"
