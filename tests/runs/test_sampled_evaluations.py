"""Evaluations with several samples per held-out problem, and with one."""

import json

import pytest

from rheostat.infra.statistics import mean_interval
from rheostat.infra.store.shards import read_shard
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.keys import StageKey, evaluation_key
from rheostat.tasks.verification.invariants import verify_run
from rheostat.tasks.views.metrics import evaluations_of
from tests.support.stored_runs import open_tiny

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def sampled(undisturbed):
    """Run whose evaluations have three samples of each of eight problems."""
    return undisturbed("sampled evaluations")


def rewards_of(batch):
    """Return the scores of each problem by its row, from the shards."""
    found = {}
    for manifest in batch.stage_manifests("scoring"):
        for row in read_shard(batch.run.store, manifest.shards[0]).to_pylist():
            found.setdefault(row["prompt_row"], []).append((row["sample"], row["reward"]))
    return found


@pytest.mark.system
def test_the_accuracy_of_a_problem_is_the_mean_of_its_samples(sampled):
    run = open_tiny(sampled)
    for number in (0, 1):
        batch = Batch.read(run, evaluation_key(number))
        rewards = rewards_of(batch)
        assert sorted(rewards) == list(range(8))
        assert all([sample for sample, _ in pairs] == [0, 1, 2] for pairs in rewards.values())
        means = [sum(value for _, value in pairs) / 3 for pairs in rewards.values()]
        assert any(0 < mean < 1 for mean in means), "samples that agree would show nothing"
        metrics = run.require(StageKey.of(batch.key, "summary")).metrics
        assert metrics["accuracy"] == metrics["pass_at_1"] == pytest.approx(sum(means) / 8)
        # Of three samples, two are chosen in three ways: one right is among two of these, two right among all.
        assert metrics["pass_at_2"] == pytest.approx(sum(min(1, 2 * mean) for mean in means) / 8)
        assert (metrics["problems"], metrics["samples"]) == (8, 3)
        accuracy = evaluations_of(run)[number]
        assert accuracy.mean == metrics["accuracy"]
        assert (accuracy.low, accuracy.high) == pytest.approx(mean_interval(sum(means), sum(m * m for m in means), 8))
    assert list(verify_run(str(sampled.store), "tiny")) == []


@pytest.mark.system
def test_evaluation_shards_have_about_as_many_completions_as_training_shards(sampled):
    run = open_tiny(sampled)
    plan = Batch.read(run, evaluation_key(0)).plan
    assert (plan.group_size, plan.shard_prompts) == (3, 2)  # in training 2 prompts of 4


@pytest.mark.system
def test_show_prints_pass_at_k_next_to_the_accuracy(sampled):
    told = json.loads(sampled.command("show", "--json").output)["evaluations"][1]
    shares = told["pass_at"]
    assert told["samples"] == 3
    assert [*shares] == ["1", "2"]
    line = f"8 problems with 3 completions each, sampled), pass@1 {shares['1']:.3f}, pass@2 {shares['2']:.3f}"
    assert line in sampled.command("show").output


def test_an_evaluation_of_one_sample_reports_no_pass_at_k(reference):
    run = open_tiny(reference)
    assert Batch.read(run, evaluation_key(0)).plan.group_size == 1
    assert {*run.require(StageKey.of(evaluation_key(0), "summary")).metrics} == {"accuracy", "squares", "problems"}
    told = json.loads(reference.command("show", "--json").output)["evaluations"][0]
    assert [*told] == ["number", "problems", "mean", "low", "high", "temperature"]
