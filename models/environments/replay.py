"""Stored episodes played again: their turns, as they stand, into new environments. Torch-free.

Whatever comes, the stored turns go on, so each answer is compared on its own. Not compared is what no shard has: an
observation beyond the length of its episode.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from transformers import PreTrainedTokenizerFast

from infra.store.shards import read_shard
from infra.store.storage import Store, open_store
from models.config.engines import SamplingConfig
from models.engines.protocol import Completion, Request
from models.environments.answers import answering_of
from models.environments.clock import EnvironmentClock
from models.environments.episodes import Episodes
from models.environments.histories import history_of, turn_seeds
from models.environments.scene import read_turns
from models.records.replays import Difference, ReplayWork
from models.records.schemas import PROMPT_SCHEMA, FinishReason
from models.rollouts.groups import Group, PartialCompletion, TurnRecord, fresh_groups, groups_of

SHOWN: Final = 60
"""Characters of an answer in a message."""
BEFORE: Final = 12
"""Of these, those before the first that differs."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """An episode of a shard."""

    shard: str
    row: int
    begun: Group
    """As it began, alone in its group."""
    draft: PartialCompletion
    """As it ended."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """All that a turn's environment did."""

    observation: tuple[int, ...]
    reward: float | None
    ending: str
    """Why the episode ended here; empty where it went on."""

    def told(self, tokenizer: PreTrainedTokenizerFast) -> str:
        """Say it."""
        parts = [repr(tokenizer.decode(self.observation))] if self.observation else []
        parts += [f"reward {self.reward:g}"] if self.reward is not None else []
        parts += [f"the end ({self.ending})"] if self.ending else []
        return ", ".join(parts) or "nothing"


def replay(work: ReplayWork) -> list[Difference]:
    """Play episodes again, all of them in new processes. Raises BadInput where their environment cannot be used."""
    stored = _read(open_store(work.run_uri), work)
    form, parse = read_turns(work.policy, work.environment)
    answers = answering_of(work.environment)
    episodes = Episodes(
        engine=_StoredTurns(stored, past=form.ends[0]),
        environments=answers,
        settings=work.environment,
        sampling=work.sampling,
        version=0,
        partial=None,
        history=history_of(work.environment, form, work.sampling.max_new_tokens),
        form=form,
        parse=parse,
        clock=EnvironmentClock(),
    )
    try:
        played = episodes.complete([each.begun for each in stored])
    finally:
        answers.close()
    pairs = zip(stored, played, strict=True)
    return [found for each, group in pairs for found in _differences(each, group.drafts[0], form.tokenizer)]


class _StoredTurns:
    """Writes the turns that shards hold, whatever was said to them; whoever asks for more gets one token and an end."""

    def __init__(self, stored: Sequence[_Stored], *, past: int) -> None:
        turns = [(each.draft, iter(_turns(each.draft))) for each in stored]
        self._left = {seed: left for draft, left in turns for seed in turn_seeds(draft)}
        self._past = Completion((past,), (0.0,), "", FinishReason.LENGTH)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        """Return the next turn of each."""
        return [[next(self._left[seed], self._past) for seed in request.seeds] for request in requests]


def _read(store: Store, work: ReplayWork) -> list[_Stored]:
    prompts = read_shard(store, work.prompts, PROMPT_SCHEMA.names)
    found = []
    for shard in dict.fromkeys(shard for shard, _ in work.episodes):
        groups = groups_of(read_shard(store, shard), prompts)
        rows = [(group, draft) for group in groups for draft in group.drafts]
        for row in (row for each, row in work.episodes if each == shard):
            group, draft = rows[row]
            [fresh] = fresh_groups(
                prompts.slice(group.prompt_row, 1), [group.prompt_row], group_size=1, seed=0, iteration=0
            )
            begun = replace(fresh, drafts=(replace(fresh.drafts[0], seed=draft.seed),))
            found.append(_Stored(shard.key, row, begun, draft))
    order = {(shard.key, row): place for place, (shard, row) in enumerate(work.episodes)}
    return sorted(found, key=lambda each: order[each.shard, each.row])


def _turns(draft: PartialCompletion) -> Iterator[Completion]:
    """Cut what the policy wrote out of an episode."""
    for number, (turn, tokens) in enumerate(zip(draft.turns, draft.written_turns(), strict=False), start=1):
        is_cut = number == len(draft.turns) and draft.finish_reason is FinishReason.LENGTH and turn.reward is None
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        if tokens:
            yield Completion(tokens, (0.0,) * len(tokens), "", reason)


def _differences(
    stored: _Stored, played: PartialCompletion, tokenizer: PreTrainedTokenizerFast
) -> Iterator[Difference]:
    pairs = zip(_answers(stored.draft, stored.begun), _answers(played, stored.begun), strict=False)
    for turn, (expected, found) in enumerate(pairs):
        if expected != found:
            left, right = expected.told(tokenizer), found.told(tokenizer)
            same = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), len(left))
            yield Difference(
                shard=stored.shard,
                row=stored.row,
                turn=turn,
                expected=_shortened(left, same),
                found=_shortened(right, same),
            )


def _answers(draft: PartialCompletion, begun: Group) -> Iterator[_Answer]:
    """What the environment did at the beginning, and to each turn."""
    opening = draft.input.prompt[begun.drafts[0].input.num_prompt_tokens :]
    before = 0 if draft.turns and draft.turns[0].tokens else len(draft.turns)
    yield _Answer(tuple(map(int, opening)), None, _ending(draft, draft.turns[0]) if before else "")
    at, turns = 0, draft.turns[before:]
    for number, turn in enumerate(turns, start=1):
        end = at + turn.tokens + turn.observation
        said = draft.input.completion[at + turn.tokens : end]
        at = end
        ending = _ending(draft, turn) if number == len(turns) else ""
        yield _Answer(tuple(map(int, said)), turn.reward, ending)


def _ending(draft: PartialCompletion, last: TurnRecord) -> str:
    return last.error or draft.finish_reason.value


def _shortened(text: str, same: int) -> str:
    """Cut a text to what is around the first character that differs."""
    begin = max(0, same - BEFORE) if len(text) > SHOWN else 0
    end = begin + SHOWN
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"
