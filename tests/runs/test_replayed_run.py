"""A whole run of a mixture-of-experts policy with router loss, router replay and partial rollouts."""

import numpy as np
import pytest

from rheostat.infra.store.shards import read_shard
from rheostat.models.records.model_input import rollout_inputs
from rheostat.models.records.schemas import EXPERTS
from rheostat.tasks.verification.invariants import verify_run
from tests.support import checker
from tests.support.in_process import InProcessJob
from tests.support.stored_runs import open_tiny, tables_of
from tests.support.whole_runs import read_families

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]
FAMILY = "expert replay"


def test_training_samples_have_the_experts_that_the_rollouts_recorded(whole):
    assert verify_run(str(whole.store), "tiny") == []
    assert checker.problems_of(whole.run) == []
    run, learnt, several = open_tiny(whole), 0, 0
    for number in (1, 2):
        rolled = {}
        for table in tables_of(run, f"it-{number:04d}", "rollout"):
            if EXPERTS not in table.column_names:
                assert table.num_rows == 0
                continue
            several += sum(len(segments) > 1 for segments in table["segments"].to_pylist())
            assert [len(each.experts) for each in rollout_inputs(table)] == [
                len(each) - 1 for each in rollout_inputs(table)
            ]
            for row in table.to_pylist():
                rolled[row["prompt_row"], row["sample"]] = row[EXPERTS]
        [samples] = tables_of(run, f"it-{number:04d}", "credit")
        learnt += samples.num_rows
        for row in samples.to_pylist():
            whole_row = rolled[row["prompt_row"], row["sample"]]
            assert row[EXPERTS] == whole_row[: len(row["tokens"]) - 1]
            assert np.array(row[EXPERTS]).shape == (len(row["tokens"]) - 1, 3 * 3)
    assert learnt > 0 and several > 0
    metrics = run.require("it-0002/update").metrics
    assert metrics["router_loss"] > 0 and metrics["steps"] > 0


def test_evaluations_do_not_record_experts(whole):
    run = open_tiny(whole)
    [manifest, *_] = [each for each in run.manifests("eval-0000") if "/rollout" in each.key]
    assert EXPERTS not in read_shard(run.store, manifest.shards[0]).column_names


def test_experts_are_not_recorded_without_router_replay(whole, tmp_path, prefect_api, together):
    replayed = read_families()["expert replay"].settings(together)
    job = InProcessJob(tmp_path, prefect_api)
    job.train(*(each for each in replayed if "router_replay" not in each), "iterations=1")
    stages = [tables_of(open_tiny(job), "it-0001", stage) for stage in ("rollout", "credit")]
    assert all(EXPERTS not in table.column_names for tables in stages for table in tables)
