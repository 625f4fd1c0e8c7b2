"""Comparison of newly computed rewards or advantages with stored ones, for example after a reward function has changed.

This module does not import torch.

Shapes: N completions in the order of their shards, with NaN for missing rewards; K samples that are both stored and
new; T completion tokens of these K samples.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.models.records.columns import Floats, Integers


def read_total_rewards(store: Store, scores: Sequence[ShardRef]) -> Floats:
    """Return the total rewards in all rows of the given score shards, concatenated. Missing rewards are NaN."""
    columns = [read_shard(store, ref, ("reward",))["reward"].to_numpy() for ref in scores]
    return np.concatenate([np.empty(0), *(np.asarray(column, np.float64) for column in columns)])


def read_rewards(store: Store, samples: Sequence[ShardRef]) -> pa.Table:
    """Return the columns of the given sample shards that `compare_advantages` needs: `prompt_row`, `sample` and
    `advantages`."""
    return pa.concat_tables(read_shard(store, ref, ("prompt_row", "sample", "advantages")) for ref in samples)


def compare_rewards(stored_N: Floats, new_N: Floats) -> dict[str, float]:
    """Compare new with stored rewards of the same completions, and return metrics: both means, their correlation, and
    the share of rewards that changed.

    A mean is omitted if there are no values, and the correlation if all rewards of one side are equal.
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
    """Compare new with stored advantages of the same samples, and return metrics: the number of samples that can be
    compared, the mean absolute new advantage, and the per-token correlation.

    Both tables need the columns `prompt_row`, `sample` and `advantages`. The samples of one completion must be
    adjacent.
    """
    values_T = _values(new)
    _, places_K, others_K = np.intersect1d(_row_keys(stored), _row_keys(new), assume_unique=True, return_indices=True)
    lists = (_take_advantages(table, rows) for table, rows in ((stored, places_K), (new, others_K)))
    (first, first_counts_K), (second, second_counts_K) = lists
    alike_K = (
        first_counts_K == second_counts_K
    )  # one table may have masked or emptied a completion that the other trains on
    first_T, second_T = first[np.repeat(alike_K, first_counts_K)], second[np.repeat(alike_K, second_counts_K)]
    return {
        "coinciding": float(alike_K.sum()),
        **({"advantage_size": float(np.abs(values_T).mean())} if len(values_T) else {}),
        **correlation(first_T, second_T),
    }


def correlation(left_N: Floats, right_N: Floats) -> dict[str, float]:
    """Return Pearson's correlation over the positions at which both arrays are finite, under the key `correlation`.
    Empty if an array is constant at these positions, or if there are fewer than two."""
    both_N = np.isfinite(left_N) & np.isfinite(right_N)
    left_K, right_K = left_N[both_N], right_N[both_N]
    if len(left_K) < 2 or np.ptp(left_K) == 0 or np.ptp(right_K) == 0:
        return {}
    return {"correlation": float(np.corrcoef(left_K, right_K)[0, 1])}


def _mean(name: str, values_N: Floats) -> dict[str, float]:
    finite_N = values_N[np.isfinite(values_N)]
    return {name: float(finite_N.mean())} if len(finite_N) else {}


def _row_keys(table: pa.Table) -> Integers:
    """Return an integer key for each row, which encodes the row's prompt, its sample, and its position among the rows
    of the same completion."""
    prompts_N, samples_N = (np.asarray(table[name].to_numpy(), np.int64) for name in ("prompt_row", "sample"))
    names_N: Integers = prompts_N << 16 | samples_N
    first_N = np.flatnonzero(np.diff(names_N, prepend=-1))
    place_N = np.arange(len(names_N)) - np.repeat(first_N, np.diff(first_N, append=len(names_N)))
    return names_N << 16 | place_N


def _take_advantages(table: pa.Table, rows_K: Integers) -> tuple[Floats, Integers]:
    """Return the advantages in the rows `rows_K`, concatenated, and the number of tokens of each row."""
    chosen = table.take(pa.array(rows_K))
    return _values(chosen), np.asarray(pc.list_value_length(chosen["advantages"]).to_numpy(), np.int64)


def _values(table: pa.Table) -> Floats:
    return np.asarray(pc.list_flatten(table["advantages"]).to_numpy(), np.float64)
