"""The rollout worker: its shards, metrics and weights, and equal shards from another process."""

from dataclasses import replace
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.records.schemas import ROLLOUT_SCHEMA
from rheostat.models.records.seeds import sample_seed
from rheostat.models.records.versions import Outcome
from rheostat.models.records.work import RolloutWork
from tests.support.policies import small_tokenizer
from tests.support.processes import preload, process
from tests.support.rollout_workers import TEXTS, digest, example, publish, worker

preload(__name__)


@pytest.fixture(scope="module")
def other(store, work, home) -> RolloutWork:
    """The same work for another policy."""
    return replace(work, policy=publish(store, home / "other", seed=1))


@pytest.fixture(scope="module")
def outcome(work, home) -> Outcome:
    return worker(home).generate(work)


def test_a_shard_has_a_row_for_each_completion_in_the_order_of_prompts_and_samples(store, outcome):
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


def test_metrics_and_timings_count_the_rows_and_tokens_of_the_shard(store, work, outcome):
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
    # The prefill generates the first token of each sequence, and a decoding step each other token.
    assert outcome.timings["step_sequences"] == sum(lengths) - 20


def test_the_metadata_of_a_shard_name_its_policy_producer_and_seed(store, work, outcome):
    metadata = read_shard(store, outcome.shards[0]).schema.metadata
    assert {name: metadata[name] for name in (b"iteration", b"policy_version", b"producer", b"seed")} == {
        b"iteration": b"3",
        b"policy_version": b"0",
        b"producer": b"transformers",
        b"seed": b"5",
    }
    assert metadata[b"policy_digest"].decode() == work.policy.digest
    assert metadata[b"seed_prompt_rows"] == b"2..11"


def test_each_policy_generates_with_its_own_weights_whichever_was_loaded_before(work, other, outcome, home):
    busy = worker(home)
    before = busy.progress()
    first, second, third = (digest(busy.generate(each)) for each in (work, other, work))
    assert first == third == digest(outcome)
    assert second == digest(worker(home).generate(other)) != first
    assert busy.progress() > before


def test_the_bytes_of_each_load_are_reported_once_even_if_weights_were_loaded_before_the_work(work, other, home):
    awake = worker(home)
    awake.take(work.policy)
    timings = [awake.generate(each).timings for each in (work, work, other, work)]
    size = work.policy.weights.bytes
    assert size == other.policy.weights.bytes > 0
    assert [each["weights_bytes"] for each in timings] == [size, 0, size, size]
    assert timings[0]["weights_seconds"] > timings[0]["load"]
    assert timings[1]["weights_seconds"] == 0


def test_a_policy_can_be_loaded_before_there_is_work_and_is_loaded_again_after_sleep(work, other, home):
    awake = worker(home)
    assert awake.take(work.policy) == work.policy.weights.digest
    assert awake.take(other.policy) == other.policy.weights.digest
    loaded = awake.progress()
    awake.take(other.policy)
    assert awake.progress() == loaded
    awake.sleep()
    assert digest(awake.generate(other)) == digest(worker(home).generate(other))
    assert awake.progress() > loaded + 1


def test_damaged_weights_generate_nothing_and_the_worker_stays_usable(tmp_path):
    store = open_store(f"{tmp_path}/run")
    work = example(store, tmp_path / "made")
    good = worker(tmp_path)
    before = digest(good.generate(work))
    other = publish(store, tmp_path / "other", seed=1)
    path = store.local_path(f"{other.weights.key}/model.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        good.generate(replace(work, policy=other))
    assert digest(good.generate(work)) == before


@pytest.mark.parametrize("rows", [(), (1, 1), (12,), (-1, 3)])
def test_rows_that_repeat_or_are_not_in_the_shard_are_refused(work, rows, home):
    with pytest.raises(BadInput, match="rollout work"):
        worker(home).generate(replace(work, rows=rows))


def generate_elsewhere(root: Path) -> None:
    work = example(open_store(f"{root}/run"), root / "made-elsewhere")
    busy = worker(root)
    for iteration in (0, 1):
        busy.generate(replace(work, iteration=iteration, rows=(0, 5)))
    (root / "digest").write_text(digest(busy.generate(work)))


@pytest.mark.smoke
@pytest.mark.system
def test_another_process_that_generated_other_work_before_writes_the_same_shard(outcome, home):
    with process(generate_elsewhere, home) as elsewhere:
        elsewhere.join()
    assert (home / "digest").read_text() == digest(outcome)
