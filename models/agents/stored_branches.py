"""Storage of the branches of an agent's episode in one row of a rollout shard. Does not import torch.

The prompt of the row is the prompt of the first request. The completion contains the branches one after the other, in
the order of their first turns. Before a turn that continues its branch, the tokens that its request added are stored as
text of an environment. Before the first turn of a later branch, the whole prompt of its request is stored as the
separate prompt of a turn. Training therefore reads each branch as a separate sequence, and trains each sampled token
once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import pyarrow as pa

from rheostat.infra.errors import Damaged
from rheostat.models.agents.branches import EpisodeRecord, RecordedTurn
from rheostat.models.records.model_input import ModelInput, rollout_inputs
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.seeds import derive_seed
from rheostat.models.rollouts.groups import ChatMessage, PartialCompletion, Segment, TurnRecord

Decode = Callable[[Sequence[int]], str]
"""Function that returns the text of tokens."""


@dataclass(frozen=True, slots=True)
class Ending:
    """State of an episode when it is stored: why it ended or was cut, and what its agent returned."""

    finish_reason: FinishReason
    """Reason why the episode ended. `cut` if the episode continues in a later iteration."""
    error: str = ""
    """Reason why the episode failed, or an empty string."""
    reward: float | None = None
    """Reward of the whole episode. It is added to the reward of the last turn."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of single turns, by the number of the turn. Numbers without a turn are ignored."""
    replayed: frozenset[int] = frozenset()
    """Numbers of the turns that were recorded before a restart of the agent and returned to the agent again."""
    messages: tuple[ChatMessage, ...] = ()
    """Messages of the conversation that ends with the last turn."""
    begun: int | None = None
    """Policy version with which a cut episode began, or None if the episode has ended. All tokens of the
    episode may be from newer versions."""


def fill(record: EpisodeRecord, draft: PartialCompletion, ending: Ending, *, decode: Decode) -> PartialCompletion:
    """Return the completion that stores the turns of a record. The last turn is the turn with the highest number.

    `draft` contains the seed and the prompt of the episode. `decode` returns the text of tokens without special tokens.
    Turns without tokens are left out. Without any turn, the completion is empty, and an error is stored with an empty
    turn. If a cut episode began with an older policy version than that of its oldest token, the segments start with an
    empty segment of this version.
    """
    row = _lay_out(record, draft)
    last = max((turn.number for turn in record.turns()), default=None)
    turns = tuple(
        replace(
            turn,
            reward=_reward_of(turn.order, ending, is_last=turn.order == last),
            error=(ending.error or None) if turn.order == last else None,
            replayed=turn.order in ending.replayed,
            text=record.turn(turn.order).text,
        )
        for turn in row.turns
        if turn.order is not None
    )
    versions = [segment.policy_version for segment in row.segments if segment.policy_version >= 0]
    is_older = ending.begun is not None and ending.begun < min(versions, default=ending.begun + 1)
    start = (Segment(policy_version=ending.begun, tokens=0),) if is_older and ending.begun is not None else ()
    no_turns = (TurnRecord(tokens=0, error=ending.error),) if ending.error else ()
    return replace(
        row,
        text="\n".join(decode(_tokens_after_prompt(branch)) for branch in record.branches()),
        finish_reason=ending.finish_reason,
        segments=start + row.segments,
        turns=turns or no_turns,
        messages=ending.messages,
    )


def _lay_out(record: EpisodeRecord, draft: PartialCompletion) -> PartialCompletion:
    """Return a completion with the tokens and turns of all branches of a record, without texts and rewards. It has the
    seed of `draft`, and also the prompt of `draft` if the record has no turns."""
    branches = record.branches()
    prompt = branches[0][0].context if branches else draft.input.prompt
    row = PartialCompletion(seed=draft.seed, input=ModelInput.from_prompt(prompt))
    for branch in branches:
        for turn in branch:
            if turn is not branch[0]:
                row = row.append_observation(turn.context)
            elif row.turns:
                row = row.append_turn_prompt(record.context_of(turn.number).tolist(), "")
            row = _append_turn(row, turn)
    return row


def _append_turn(row: PartialCompletion, turn: RecordedTurn) -> PartialCompletion:
    """Return a completion with a turn appended. The tokens after the turn before it become the observation of that
    turn."""
    before = tuple(replace(last, observation=row.num_turn_tokens) for last in row.turns[-1:])
    stored = TurnRecord(
        tokens=len(turn.tokens),
        calls=turn.calls,
        errors=turn.errors,
        order=turn.number,
        parent=turn.parent,
        finish_reason=turn.finish_reason,
    )
    return replace(
        row,
        input=row.input.append_completion(turn.tokens),
        logprobs=row.logprobs + turn.logprobs,
        segments=row.segments + turn.segments,
        turns=(*row.turns[:-1], *before, stored),
    )


def _tokens_after_prompt(branch: Sequence[RecordedTurn]) -> list[int]:
    """Return the tokens of a branch without the prompt of its first turn."""
    tokens = [token for turn in branch for token in turn.context + turn.tokens]
    return tokens[len(branch[0].context) :]


def _reward_of(number: int, ending: Ending, *, is_last: bool) -> float | None:
    """Return the reward of a turn, or None if the agent returned none for it."""
    values = [ending.rewards.get(number), ending.reward if is_last else None]
    rewards = [value for value in values if value is not None]
    return sum(rewards) if rewards else None


def read(draft: PartialCompletion) -> EpisodeRecord:
    """Return the record that `fill` stored in a completion. The record is empty if the completion is not an agent's
    episode, or has no turns.

    Raises Damaged if the turns contradict the tokens and segments of the completion.
    """
    record = EpisodeRecord()
    if all(turn.order is None for turn in draft.turns):
        return record
    try:
        for turn in sorted(_read_turns(draft), key=lambda turn: turn.number):
            record = _add_turn(record, turn, draft.seed)
        is_right = _is_sampled(record) and _is_same_row(_lay_out(record, draft), draft)
    except KeyError:  # the parent of a turn is not an earlier turn
        is_right = False
    if not is_right:
        raise Damaged(
            "the turns of an agent's episode contradict the tokens and segments of its row. Restore the shard from a "
            "copy of the run."
        )
    return record


def _read_turns(draft: PartialCompletion) -> Iterator[RecordedTurn]:
    """Yield the turns of a completion in the order of its tokens. The context of each turn contains all tokens between
    the turn before it and the turn itself. Its key, occurrence and seed are missing."""
    context, completion = draft.input.prompt.tolist(), draft.input.completion.tolist()
    segment_ends = [*accumulate(segment.tokens for segment in draft.segments)]
    begin = 0
    for turn in draft.turns:
        end = begin + turn.tokens
        pairs = zip(draft.segments, segment_ends, strict=True)
        if turn.order is not None:
            yield RecordedTurn(
                number=turn.order,
                parent=turn.parent,
                context=tuple(context),
                key="",
                occurrence=0,
                seed=0,
                tokens=tuple(completion[begin:end]),
                logprobs=draft.logprobs[begin:end],
                segments=tuple(segment for segment, segment_end in pairs if begin < segment_end <= end),
                finish_reason=FinishReason(turn.finish_reason or FinishReason.STOP),
                calls=turn.calls,
                errors=turn.errors,
                text=turn.text or "",
            )
        begin = end + turn.observation
        context = completion[end:begin]


def _add_turn(record: EpisodeRecord, turn: RecordedTurn, seed: int) -> EpisodeRecord:
    """Return a record with a later turn added. `turn` is a turn of `_read_turns`, and `seed` the seed of the episode.

    Raises KeyError if the record does not contain the turn's parent.
    """
    earlier = record.turns()
    begins_branch = turn.parent is None or any(other.parent == turn.parent for other in earlier)
    stored_before = record.tokens_of(turn.parent) if begins_branch and turn.parent is not None else ()
    place = record.place_after(turn.parent, turn.context[len(stored_before) :])
    occurrence = sum(other.key == place.key for other in earlier)
    turn_seed = derive_seed("request", seed, place.key, occurrence)
    added = replace(turn, context=place.context, key=place.key, occurrence=occurrence, seed=turn_seed)
    return EpisodeRecord([*earlier, added])


def _is_sampled(record: EpisodeRecord) -> bool:
    """Return whether policies sampled all tokens of the turns of a record."""
    return all(
        sum(segment.tokens for segment in turn.segments) == len(turn.tokens)
        and all(segment.policy_version >= 0 for segment in turn.segments)
        for turn in record.turns()
    )


def _is_same_row(one: PartialCompletion, other: PartialCompletion) -> bool:
    """Return whether two completions have the same tokens, log-probs and segments, and the same tree of turns."""
    one_layout, other_layout = (
        (
            *(draft.input.prompt.tolist(), draft.input.completion.tolist(), draft.logprobs),
            tuple(segment for segment in draft.segments if segment.tokens),
            *((turn.order, turn.parent, turn.tokens, turn.observation) for turn in draft.turns),
        )
        for draft in (one, other)
    )
    return one_layout == other_layout


def has_branches(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the turns of a row are those of an agent, which are stored branch after branch."""
    return any(turn["order"] is not None for turn in turns)


def read_records(rollouts: pa.Table) -> list[EpisodeRecord]:
    """Return the record of each row of a rollout table. The record of a row that is not an episode of an agent is
    empty.

    Raises Damaged if the columns of a row contradict each other.
    """
    rows = rollouts.select(["seed", "logprobs", "segments", "turns"]).to_pylist()
    return [
        read(
            PartialCompletion(
                seed=row["seed"],
                input=model_input,
                logprobs=tuple(row["logprobs"]),
                segments=tuple(Segment(**segment) for segment in row["segments"]),
                turns=tuple(TurnRecord(**turn) for turn in row["turns"] or ()),
            )
        )
        for row, model_input in zip(rows, rollout_inputs(rollouts), strict=True)
    ]


def continues(record: EpisodeRecord, earlier: EpisodeRecord, *, version: int) -> bool:
    """Return whether a record can continue the earlier record of the same episode with policy version `version`. Every
    turn that starts with tokens of an older version must extend a different earlier turn with the same context.

    Earlier turns may be missing, because the agent starts again and may send other requests.
    """
    unused = earlier.turns()
    for turn in record.turns():
        if turn.segments[0].policy_version < version:
            found = next((each for each in unused if _extends(turn, each)), None)
            if found is None:
                return False
            unused.remove(found)
    return True


def _extends(now: RecordedTurn, before: RecordedTurn) -> bool:
    """Return whether a turn has the context of an earlier turn and begins with its tokens, log-probs and versions."""
    count = len(before.tokens)
    return (
        (now.key, now.tokens[:count], now.logprobs[:count]) == (before.key, before.tokens, before.logprobs)
        and now.segments[: len(before.segments)] == before.segments
        and (before.finish_reason is FinishReason.CUT or len(now.tokens) == count)
    )
