"""The rollout worker: what it writes, which weights it takes, and that another process writes the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import BadInput, Damaged
from infra.store.shards import read_shard
from infra.store.storage import Store, open_store
from models.records.schemas import ROLLOUT_SCHEMA
from models.records.seeds import sample_seed
from models.records.work import RolloutWork
from tests.support.policies import small_tokenizer
from tests.support.processes import preload, process
from tests.support.rollout_workers import TEXTS, digest, example, publish, worker

preload(__name__)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"{tmp_path}/run")


@pytest.fixture
def work(store: Store, tmp_path: Path) -> RolloutWork:
    return example(store, tmp_path / "made")


def test_a_shard_has_a_row_per_completion_in_the_order_of_prompts_and_samples(store, work, tmp_path):
    outcome = worker(tmp_path).generate(work)
    table = read_shard(store, outcome.shards[0])
    assert table.schema.remove_metadata() == ROLLOUT_SCHEMA
    rows = table.to_pylist()
    names = [(row, sample) for row in (2, 3, 7, 8, 11) for sample in range(4)]
    assert [(row["prompt_row"], row["sample"]) for row in rows] == names
    for row in rows:
        prompt = row["prompt_row"]
        assert row["prompt"] == TEXTS[prompt]
        assert row["prompt_id"] == f"{prompt:016x}"
        assert row["answer"] == str(prompt)
        assert row["prompt_tokens"] == small_tokenizer().encode(TEXTS[prompt])
        assert row["completion"] == small_tokenizer().decode(row["completion_tokens"], skip_special_tokens=True)
        assert len(row["logprobs"]) == len(row["completion_tokens"])
        assert row["seed"] == sample_seed(5, 3, prompt_row=prompt, sample=row["sample"])
        assert row["segments"] == [{"policy_version": 0, "tokens": len(row["completion_tokens"])}]


def test_metrics_count_what_the_shard_holds(store, work, tmp_path):
    worker_ = worker(tmp_path)
    before = worker_.progress()
    outcome = worker_.generate(work)
    rows = read_shard(store, outcome.shards[0]).to_pylist()
    assert outcome.metrics == {
        "completions": 20,
        "tokens": sum(len(row["completion_tokens"]) for row in rows),
        "truncated": sum(row["finish_reason"] == "length" for row in rows),
        "prompt_tokens": sum(len(small_tokenizer().encode(TEXTS[row])) for row in work.rows),
        "groups": 5,
        "carried_groups": 0,
        "sequences": 20,
    }
    assert 0 < outcome.metrics["truncated"] < 20
    lengths = sorted(len(row["completion_tokens"]) for row in rows)
    assert outcome.detail == {"lengths": lengths}
    assert outcome.timings.keys() == {
        "load", "generate", "write", "weights_bytes", "weights_seconds",
        "steps", "step_sequences", "step_sequences_squared", "step_seconds", "step_sequence_seconds",
    }  # fmt: skip
    # Every token but each sequence's first takes a sequence one step forward.
    assert outcome.timings["step_sequences"] == sum(lengths) - 20
    assert worker_.progress() > before


def test_a_shard_says_what_it_came_from(store, work, tmp_path):
    metadata = read_shard(store, worker(tmp_path).generate(work).shards[0]).schema.metadata
    assert metadata[b"iteration"] == b"3"
    assert metadata[b"policy_version"] == b"0"
    assert metadata[b"policy_digest"].decode() == work.policy.digest
    assert metadata[b"producer"] == b"transformers"
    assert metadata[b"seed"] == b"5"
    assert metadata[b"seed_prompt_rows"] == b"2..11"


def test_each_policy_generates_with_its_own_weights_whichever_was_loaded_before(store, work, tmp_path):
    other = replace(work, policy=publish(store, tmp_path / "other", seed=1))
    busy = worker(tmp_path)
    turns = [digest(busy.generate(asked)) for asked in (work, other, work)]
    assert turns[0] == turns[2] == digest(worker(tmp_path).generate(work))
    assert turns[1] == digest(worker(tmp_path).generate(other)) != turns[0]


def test_the_bytes_of_every_load_are_told_once_whenever_it_happened(store, work, tmp_path):
    other = replace(work, policy=publish(store, tmp_path / "other", seed=1))
    awake = worker(tmp_path)
    awake.take(work.policy)
    first, second, third, fourth = (awake.generate(asked).timings for asked in (work, work, other, work))
    size = work.policy.weights.bytes
    assert size == other.policy.weights.bytes > 0
    assert [told["weights_bytes"] for told in (first, second, third, fourth)] == [size, 0, size, size]
    assert first["weights_seconds"] > first["load"]
    assert second["weights_seconds"] == 0


def test_a_policy_is_taken_before_there_is_work_and_loaded_again_after_sleep(store, work, tmp_path):
    other = publish(store, tmp_path / "other", seed=1)
    awake = worker(tmp_path)
    assert awake.take(work.policy) == work.policy.weights.digest
    assert awake.take(other) == other.weights.digest
    taken = awake.progress()
    awake.take(other)
    assert awake.progress() == taken
    awake.sleep()
    assert digest(awake.generate(replace(work, policy=other))) == digest(
        worker(tmp_path).generate(replace(work, policy=other))
    )
    assert awake.progress() > taken + 1


def test_weights_that_are_not_those_of_the_digest_generate_nothing(store, work, tmp_path):
    good = worker(tmp_path)
    good.generate(work)
    other = publish(store, tmp_path / "other", seed=1)
    path = store.local(f"{other.weights.key}/model.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        good.generate(replace(work, policy=other))
    assert digest(good.generate(work)) == digest(worker(tmp_path).generate(work))


@pytest.mark.parametrize("rows", [(), (1, 1), (12,), (-1, 3)])
def test_rows_that_are_not_different_rows_of_the_shard_are_refused(work, rows, tmp_path):
    with pytest.raises(BadInput, match="rollout work: expected"):
        worker(tmp_path).generate(replace(work, rows=rows))


def generate_elsewhere(root: Path) -> None:
    work = example(open_store(f"{root}/run"), root / "made-elsewhere")
    busy = worker(root)
    for iteration in (0, 1):
        busy.generate(replace(work, iteration=iteration, rows=(0, 5)))
    (root / "told").write_text(digest(busy.generate(work)))


def test_another_process_with_another_past_writes_the_same_shard(work, tmp_path):
    with process(generate_elsewhere, tmp_path) as elsewhere:
        elsewhere.join()
    assert (tmp_path / "told").read_text() == digest(worker(tmp_path).generate(work))
