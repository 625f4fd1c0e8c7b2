"""Reading training samples: every column of a row has one number per completion token."""

from pathlib import Path

import pyarrow as pa
import pytest

from rheostat.infra.errors import Damaged
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.records.schemas import SAMPLE_SCHEMA
from rheostat.models.training.samples import open_samples, read_training_rows, weighted_lengths
from tests.support.training import write_samples


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def change_row(store: Store, shard: ShardRef, row: int, **columns: object) -> ShardRef:
    rows = read_shard(store, shard).to_pylist()
    rows[row] |= columns
    return write_shard(store, pa.Table.from_pylist(rows, SAMPLE_SCHEMA), kind="samples", metadata={})


def test_rows_are_restored_in_any_order_and_have_values_and_returns_only_with_a_critic(store, tmp_path):
    shard = write_samples(str(tmp_path), prompts=2, group=2, filling=1, critic=True)
    rows = read_shard(store, shard).to_pylist()
    found = read_training_rows(open_samples(store, [shard]), [3, 0, 5])
    assert list(found) == [3, 0, 5]
    for row, sample in found.items():
        assert sample.input.tokens.tolist() == rows[row]["tokens"]
        assert sample.input.num_prompt_tokens == rows[row]["num_prompt_tokens"]
        for name in ("logprobs", "advantages", "staleness", "values", "returns"):
            assert getattr(sample, name).tolist() == rows[row][name]
    samples = open_samples(store, [write_samples(str(tmp_path), prompts=1)])
    assert {(part.values, part.returns) for part in read_training_rows(samples, [0, 1]).values()} == {(None, None)}


def test_tokens_that_are_too_stale_do_not_count_for_a_step(store, tmp_path):
    shard = write_samples(str(tmp_path), prompts=2, group=2, filling=1, stalest=3)
    rows = read_shard(store, shard).to_pylist()
    samples = open_samples(store, [shard])
    assert list(weighted_lengths(samples, 1)) == [sum(age <= 1 for age in row["staleness"]) for row in rows]
    assert weighted_lengths(samples, None) == samples.trained_lengths


@pytest.mark.parametrize("column", ["logprobs", "advantages", "staleness", "values", "returns"])
def test_a_row_with_too_few_numbers_is_damaged(store, tmp_path, column):
    shard = write_samples(str(tmp_path), prompts=1, critic=True)
    for broken in (None, []):
        with pytest.raises(Damaged, match=f"row 2 .*{column}.*has 0"):
            open_samples(store, [change_row(store, shard, 2, **{column: broken})])
