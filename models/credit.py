"""From rollouts and their scores to training samples: pure functions over tables.

Shapes: N completions, G groups, K kept completions, T tokens of all kept completions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from infra.errors import Damaged
from models.algorithms.config import AlgorithmConfig
from models.algorithms.grpo import Floats, GroupStatistics, Integers, advantages, group_statistics
from models.records import SAMPLE_SCHEMA, FinishReason
from models.selection import Mask, Selection, Wanted, select_groups

ROLLOUT_COLUMNS = ("prompt_row", "sample", "prompt_tokens", "completion_tokens", "logprobs", "finish_reason")
"""Columns of the rollout shards that credit reads."""
BAD_LOGPROBS = "rollout: behaviour log-probs are not finite"
"""The reason that a completion without usable log-probs is missing."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Training samples, what they were made from in numbers, and what went missing."""

    samples: pa.Table
    metrics: dict[str, float]
    errors: Counter[str]
    """Reasons of the missing completions, each with its count."""
    surplus: tuple[tuple[int, ...], ...] = ()
    """Prompt rows of informative groups beyond the target, by pair of tables."""


def assign_credit(
    rollouts: Sequence[pa.Table],
    scores: Sequence[pa.Table],
    *,
    terms: Sequence[str],
    algorithm: AlgorithmConfig,
    wanted: Wanted | None = None,
) -> Credit:
    """Give each scored completion its advantage; paired tables must list the same completions in the same order.

    Missing completions are left out, and so are groups that teach nothing, unless the algorithm keeps them. Where
    sampling is dynamic, the groups that are wanted are trained, whatever the algorithm would keep.
    """
    for position, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
        _check_paired(position, rollout, score)
    _check_apart(rollouts)
    table, judged = pa.concat_tables(rollouts).combine_chunks(), pa.concat_tables(scores).combine_chunks()
    bad_N = _bad_logprobs(table)
    rewards_N = _floats(judged["reward"])
    rewards_N[bad_N] = np.nan
    groups = group_statistics(rewards_N, _integers(table["prompt_row"]))
    selection = None if wanted is None else _selection(judged, rewards_N, groups, wanted)
    kept_N, filling_N = _kept(rewards_N, groups, selection, algorithm)
    samples, num_tokens = _samples(
        table, kept_N, advantages(rewards_N, groups, algorithm.kind == "grpo"), filling_N=filling_N
    )
    metrics = {
        "samples": float(samples.num_rows),
        "tokens": float(num_tokens),
        "bad_logprobs": float(bad_N.sum()),
        **_reward_metrics(rewards_N, groups),
        **_length_metrics(table),
        **(selection.metrics() if selection else {}),
    }
    for term in terms:
        metrics |= _mean(f"term_{term}_mean", _floats(judged[f"reward_{term}"]))
    surplus = _surplus(rollouts, selection) if selection else ()
    return Credit(samples=samples, metrics=metrics, errors=_errors(judged, bad_N), surplus=surplus)


def _check_paired(position: int, rollout: pa.Table, score: pa.Table) -> None:
    for name in ("prompt_row", "sample"):
        if not rollout[name].equals(score[name]):
            raise Damaged(
                f"pair {position} of {rollout.num_rows} rollouts and {score.num_rows} scores: their {name} differ"
            )


def _check_apart(rollouts: Sequence[pa.Table]) -> None:
    """Refuse a prompt in two tables: its groups would be taken for one."""
    seen: set[int] = set()
    for position, rollout in enumerate(rollouts):
        rows = set(pc.unique(rollout["prompt_row"]).to_pylist())
        if seen & rows:
            raise Damaged(f"pair {position}: prompt row {min(seen & rows)} is in an earlier pair too")
        seen |= rows


def _selection(judged: pa.Table, rewards_N: Floats, groups: GroupStatistics, wanted: Wanted) -> Selection:
    raw_N = np.where(np.isfinite(rewards_N), _floats(judged[f"reward_{wanted.metric}"]), np.nan)
    return select_groups(groups, group_statistics(raw_N, groups.group_N), wanted)


def _kept(
    rewards_N: Floats, groups: GroupStatistics, selection: Selection | None, algorithm: AlgorithmConfig
) -> tuple[Mask, Mask]:
    """Return which completions become samples, and which of these only fill."""
    scored_N: Mask = np.isfinite(rewards_N)
    if selection is not None:
        filling_N = selection.filling_G[groups.group_N]
        return scored_N & (selection.trained_G[groups.group_N] | filling_N), filling_N
    kept_N = (
        scored_N if getattr(algorithm, "keep_uninformative", False) else scored_N & groups.informative_G[groups.group_N]
    )
    return kept_N, np.zeros_like(kept_N)


def _surplus(rollouts: Sequence[pa.Table], selection: Selection) -> tuple[tuple[int, ...], ...]:
    begin = 0
    surplus: list[tuple[int, ...]] = []
    for rollout in rollouts:
        first = np.sort(selection.first_G[selection.surplus_G])
        mine = first[(first >= begin) & (first < begin + rollout.num_rows)] - begin
        surplus.append(tuple(_integers(rollout["prompt_row"])[mine].tolist()))
        begin += rollout.num_rows
    return tuple(surplus)


def _bad_logprobs(table: pa.Table) -> Mask:
    """Find completions whose log-probs would poison the update."""
    lengths_N = _lengths(table["logprobs"])
    if not np.array_equal(lengths_N, _lengths(table["completion_tokens"])):
        raise Damaged("rollouts: expected one log-prob per completion token, found other lengths")
    row_T = np.repeat(np.arange(table.num_rows), lengths_N)
    finite_T = np.isfinite(_values(table["logprobs"]))
    bad_N: Mask = np.bincount(row_T[~finite_T], minlength=table.num_rows) > 0
    return bad_N


def _samples(table: pa.Table, kept_N: Mask, advantages_N: Floats, *, filling_N: Mask) -> tuple[pa.Table, int]:
    """Build the sample table, ordered by (prompt_row, sample), and count its tokens.

    A sample that only fills has its prompt and no token of its completion. So it has a place in a minibatch, and
    neither a share in the loss or its penalty nor in what they are divided by.
    """
    order_K = np.lexsort((_integers(table["sample"]), _integers(table["prompt_row"])))
    order_K = order_K[kept_N[order_K]]
    rows = table.take(pa.array(order_K)).combine_chunks()
    tokens, logprobs = rows["completion_tokens"], rows["logprobs"]
    if filling_N[order_K].any():
        tokens, logprobs = (_emptied(column, filling_N[order_K]) for column in (tokens, logprobs))
    prompts_K, completions_K = _lengths(rows["prompt_tokens"]), _lengths(tokens)
    advantages_T = np.repeat(advantages_N[order_K].astype(np.float32), completions_K)
    columns = {
        "prompt_row": rows["prompt_row"],
        "sample": rows["sample"],
        "tokens": _joined(rows["prompt_tokens"], tokens),
        "num_prompt_tokens": pa.array(prompts_K.astype(np.int32)),
        "logprobs": logprobs,
        "advantages": _lists(advantages_T, completions_K),
        "staleness": _lists(np.zeros(len(advantages_T), np.int16), completions_K),
        "values": pa.nulls(rows.num_rows, pa.list_(pa.float32())),
        "returns": pa.nulls(rows.num_rows, pa.list_(pa.float32())),
    }
    return pa.table(columns, schema=SAMPLE_SCHEMA), int(prompts_K.sum() + completions_K.sum())


def _emptied(column: pa.ChunkedArray, emptied_K: Mask) -> pa.ChunkedArray:
    """Make the lists of some rows empty."""
    lengths_K = _lengths(column)
    kept_T = np.repeat(~emptied_K, lengths_K)
    return pa.chunked_array([_lists(_values(column)[kept_T], np.where(emptied_K, 0, lengths_K))])


def _joined(left: pa.ChunkedArray, right: pa.ChunkedArray) -> pa.ListArray:
    """Concatenate two list columns row by row."""
    lefts_K, rights_K = _lengths(left), _lengths(right)
    starts_K = _starts(lefts_K + rights_K)
    joined_T = np.empty(lefts_K.sum() + rights_K.sum(), np.int32)
    for values_T, lengths_K, begins_K in ((left, lefts_K, starts_K), (right, rights_K, starts_K + lefts_K)):
        shifts_T = np.repeat(begins_K - _starts(lengths_K), lengths_K)
        joined_T[np.arange(len(shifts_T)) + shifts_T] = _values(values_T)
    return _lists(joined_T, lefts_K + rights_K)


def _reward_metrics(rewards_N: Floats, groups: GroupStatistics) -> dict[str, float]:
    """Describe rewards and groups; a group is counted with two rewards, and a mean over nothing is left out."""
    scored_N = np.isfinite(rewards_N)
    missing = len(rewards_N) - int(scored_N.sum())
    comparable_G = groups.count_G >= 2
    return {
        "prompts": float(len(groups.count_G)),
        "completions": float(len(rewards_N)),
        "missing": float(missing),
        "missing_fraction": missing / max(len(rewards_N), 1),
        "groups": float(comparable_G.sum()),
        "informative_groups": float(groups.informative_G.sum()),
        **_mean("reward_mean", rewards_N),
        **({"reward_std": float(rewards_N[scored_N].std())} if scored_N.any() else {}),
        **_mean("group_reward_std_mean", groups.std_G[comparable_G]),
    }


def _length_metrics(table: pa.Table) -> dict[str, float]:
    """Describe all completions, missing ones too."""
    truncated_N = pc.equal(table["finish_reason"], FinishReason.LENGTH.value).to_numpy().astype(np.float64)
    lengths_N = _lengths(table["completion_tokens"]).astype(np.float64)
    return _mean("length_mean", lengths_N) | _mean("truncated_fraction", truncated_N)


def _errors(judged: pa.Table, bad_N: Mask) -> Counter[str]:
    missing_N = np.isnan(_floats(judged["reward"]))
    reasons = (error for error, missing in zip(judged["error"].to_pylist(), missing_N, strict=True) if missing)
    return Counter(reasons) + Counter({BAD_LOGPROBS: int((bad_N & ~missing_N).sum())})


def _mean(name: str, values_N: Floats) -> dict[str, float]:
    """Name the mean of what is not missing; where all is, there is none to name."""
    found_N = values_N[np.isfinite(values_N)]
    return {name: float(found_N.mean())} if len(found_N) else {}


def _floats(column: pa.ChunkedArray) -> Floats:
    """Copy a column; null becomes NaN."""
    return np.array(column.to_numpy(), dtype=np.float64)


def _integers(column: pa.ChunkedArray) -> Integers:
    return np.array(column.to_numpy(), dtype=np.int64)


def _lengths(column: pa.ChunkedArray) -> Integers:
    return _integers(pc.list_value_length(column))


def _values(column: pa.ChunkedArray) -> NDArray[np.float32] | NDArray[np.int32]:
    values: NDArray[np.float32] | NDArray[np.int32] = pc.list_flatten(column).to_numpy()
    return values


def _starts(lengths_K: Integers) -> Integers:
    return np.cumsum(lengths_K) - lengths_K


def _lists(values_T: NDArray[np.float32] | NDArray[np.int32], lengths_K: Integers) -> pa.ListArray:
    offsets = np.concatenate(([0], np.cumsum(lengths_K)))
    assert offsets[-1] < 2**31, f"{offsets[-1]} tokens are more than one shard's lists can address"
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values_T))
