"""A whole run on a mixture of experts, with the routers' loss and their replay, whose completions go on after a cut."""

import numpy as np
import pytest

from infra.store.runs import open_run
from infra.store.shards import read_shard
from models.records.model_input import rollout_inputs
from models.records.schemas import EXPERTS
from tasks.verification.invariants import verify_run
from tests.support import checker
from tests.support.chaos import Strike, problems_after, run_once
from tests.support.in_process import InProcessJob
from tests.support.policies import write_policy

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

PLAIN = (
    *(f"policy.{name}=" for name in ("heads", "kv_heads", "layers", "hidden_size", "intermediate_size")),
    "policy.kind=directory",
    "warmup=",
    "rollout.partial={tokens=8, max_staleness=1}",
    "rollout.sampling.max_new_tokens=24",
    "rollout.prompts=4",
    "rollout.shard_prompts=2",
    """scoring.rewards=[{kind="target", target="tests.support.rewards:length"}]""",
    "iterations=2",
    "evaluation.problems=2",
    "algorithm.kind=grpo",
    "update.router_loss=0.01",
    "update.kl={kind='k3', coefficient=0.1}",
)

REPLAYED = (*PLAIN, "update.router_replay=rollout")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mixture")
    write_policy(directory, "qwen3_moe", eos_share=0.15)
    return f"policy.path={directory}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prefect_api, policy):
    """The run, never disturbed."""
    job = InProcessJob(tmp_path_factory.mktemp("replayed"), prefect_api)
    job.train(*REPLAYED, policy)
    return job


def tables(run, number, stage):
    manifests = [each for each in run.manifests(f"it-{number:04d}") if f"/{stage}" in each.key]
    return [read_shard(run.store, shard) for each in manifests for shard in each.shards]


def test_every_digest_holds_and_what_is_learnt_has_the_experts_of_the_rollouts(whole):
    assert verify_run(str(whole.store), "tiny") == []
    assert checker.problems_of(whole.run) == []
    run, learnt, several = open_run(str(whole.store), "tiny"), 0, 0
    for number in (1, 2):
        rolled = {}
        for table in tables(run, number, "rollout"):
            if EXPERTS not in table.column_names:
                assert table.num_rows == 0
                continue
            several += sum(len(segments) > 1 for segments in table["segments"].to_pylist())
            assert [len(each.experts) for each in rollout_inputs(table)] == [
                len(each) - 1 for each in rollout_inputs(table)
            ]
            for row in table.to_pylist():
                rolled[row["prompt_row"], row["sample"]] = row[EXPERTS]
        [samples] = tables(run, number, "credit")
        learnt += samples.num_rows
        for row in samples.to_pylist():
            whole_row = rolled[row["prompt_row"], row["sample"]]
            assert row[EXPERTS] == whole_row[: len(row["tokens"]) - 1]
            assert np.array(row[EXPERTS]).shape == (len(row["tokens"]) - 1, 3 * 3)
    assert learnt > 0 and several > 0
    metrics = run.require("it-0002/update").metrics
    assert metrics["router_loss"] > 0 and metrics["steps"] > 0


def test_evaluations_note_no_experts(whole):
    run = open_run(str(whole.store), "tiny")
    [manifest, *_] = [each for each in run.manifests("eval-0000") if "/rollout" in each.key]
    assert EXPERTS not in read_shard(run.store, manifest.shards[0]).column_names


def test_a_run_that_is_killed_between_a_cut_and_what_follows_ends_with_the_same_bits(
    whole, tmp_path, prefect_api, policy
):
    strikes = [Strike("manifests/it-0002/rollout/0001.json", "before")]
    settings = (*REPLAYED, policy)
    assert problems_after(strikes, tmp_path / "killed", prefect_api, whole.run, settings, start=run_once) == []


def test_without_the_key_nothing_is_noted_and_the_identity_is_as_it_was_before_there_was_one(
    tmp_path, prefect_api, policy
):
    job = InProcessJob(tmp_path, prefect_api)
    job.train(*PLAIN, "iterations=1", policy)
    run = open_run(str(job.store), "tiny")
    assert all(EXPERTS not in table.column_names for stage in ("rollout", "credit") for table in tables(run, 1, stage))
