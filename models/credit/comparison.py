"""How new rewards or advantages compare with stored ones. Torch-free.

N completions in the order of their shards, where NaN is missing; K samples of both sides, T their completion tokens.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.store.shards import ShardRef, read_shard
from infra.store.storage import Store
from models.records.columns import Floats, Integers


def rewards_of(store: Store, scores: Sequence[ShardRef]) -> Floats:
    """Total rewards of some score shards, one after the other; NaN where one is missing."""
    columns = [read_shard(store, ref, ("reward",))["reward"].to_numpy() for ref in scores]
    return np.concatenate([np.empty(0), *(np.asarray(column, np.float64) for column in columns)])


def read_rewards(store: Store, samples: Sequence[ShardRef]) -> pa.Table:
    """What is compared of some sample shards."""
    return pa.concat_tables(read_shard(store, ref, ("prompt_row", "sample", "advantages")) for ref in samples)


def compare_rewards(stored_N: Floats, new_N: Floats) -> dict[str, float]:
    """Describe new rewards beside the stored ones of the same completions.

    A mean over nothing is left out, and so is the correlation where one side is the same everywhere.
    """
    same_N = (stored_N == new_N) | (np.isnan(stored_N) & np.isnan(new_N))
    return {
        "completions": float(len(new_N)),
        "missing": float(np.isnan(new_N).sum()),
        "changed_fraction": float((~same_N).mean()) if len(new_N) else 0.0,
        **_mean("stored_reward_mean", stored_N),
        **_mean("reward_mean", new_N),
        **correlation(stored_N, new_N),
    }


def compare_advantages(stored: pa.Table, new: pa.Table) -> dict[str, float]:
    """Describe new advantages, token by token, and beside the stored ones where both have the completion.

    Tables of samples with `prompt_row`, `sample` and `advantages`; those of a completion follow each other.
    """
    values_T = _values(new)
    _, places_K, others_K = np.intersect1d(_names(stored), _names(new), assume_unique=True, return_indices=True)
    lists = (_lists(table, rows) for table, rows in ((stored, places_K), (new, others_K)))
    (left, lefts_K), (right, rights_K) = lists
    alike_K = lefts_K == rights_K  # one side may have masked or emptied a completion that the other learns from
    left_T, right_T = left[np.repeat(alike_K, lefts_K)], right[np.repeat(alike_K, rights_K)]
    return {
        "coinciding": float(alike_K.sum()),
        **({"advantage_size": float(np.abs(values_T).mean())} if len(values_T) else {}),
        **correlation(left_T, right_T),
    }


def correlation(left_N: Floats, right_N: Floats) -> dict[str, float]:
    """Pearson's correlation of what both sides have; none where one side does not vary."""
    both_N = np.isfinite(left_N) & np.isfinite(right_N)
    left_K, right_K = left_N[both_N], right_N[both_N]
    if len(left_K) < 2 or np.ptp(left_K) == 0 or np.ptp(right_K) == 0:
        return {}
    return {"correlation": float(np.corrcoef(left_K, right_K)[0, 1])}


def _mean(name: str, values_N: Floats) -> dict[str, float]:
    found_N = values_N[np.isfinite(values_N)]
    return {name: float(found_N.mean())} if len(found_N) else {}


def _names(table: pa.Table) -> Integers:
    """Prompt row, sample and place among the samples of a completion as one number."""
    prompts_N, samples_N = (np.asarray(table[name].to_numpy(), np.int64) for name in ("prompt_row", "sample"))
    names_N: Integers = prompts_N << 16 | samples_N
    first_N = np.flatnonzero(np.diff(names_N, prepend=-1))
    place_N = np.arange(len(names_N)) - np.repeat(first_N, np.diff(first_N, append=len(names_N)))
    return names_N << 16 | place_N


def _lists(table: pa.Table, rows_K: Integers) -> tuple[Floats, Integers]:
    """Advantages of some rows, one after the other, and how many each has."""
    chosen = table.take(pa.array(rows_K))
    return _values(chosen), np.asarray(pc.list_value_length(chosen["advantages"]).to_numpy(), np.int64)


def _values(table: pa.Table) -> Floats:
    return np.asarray(pc.list_flatten(table["advantages"]).to_numpy(), np.float64)
