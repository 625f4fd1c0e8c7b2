"""Whole runs of distillation, in which the log-probs of a teacher replace the reward."""

from typing import Any

import numpy as np
import pytest

from tests.support.chat_server import Reply
from tests.support.in_process import InProcessJob
from tests.support.jobs import Job, bundles_of, digest_of, manifest_of, manifests_of
from tests.support.run_inputs import write_teacher
from tests.support.stored_runs import open_tiny, tables_of
from tests.support.teachers import teacher_server

pytestmark = [pytest.mark.timeout(1200), pytest.mark.system]


@pytest.fixture
def distilled(undisturbed):
    return undisturbed("distillation")


def rows_by_sample(job: InProcessJob, iteration: str, stage: str) -> dict[tuple[int, int], dict[str, Any]]:
    rows = (row for table in tables_of(open_tiny(job), iteration, stage) for row in table.to_pylist())
    return {(row["prompt_row"], row["sample"]): row for row in rows}


def test_advantages_are_the_log_prob_differences_to_the_teacher(distilled):
    for iteration in ("it-0001", "it-0002"):
        estimates, samples = (rows_by_sample(distilled, iteration, stage) for stage in ("estimates", "credit"))
        assert len(samples) == 6 * 4
        for name, sample in samples.items():
            teacher, policy = (np.array(estimates[name][column]) for column in ("teacher", "policy"))
            np.testing.assert_array_equal(np.float32(sample["advantages"]), np.float32(teacher - policy))
    assert digest_of(distilled.run, "it-0002/update") != digest_of(distilled.run, "policy/initial")


def test_the_store_has_a_copy_of_the_teacher(distilled, tmp_path):
    kept = manifest_of(distilled.run, "teacher/model")
    assert kept["digest"] in manifest_of(distilled.run, "it-0001/estimates")["parents"]
    copy = bundles_of(distilled.run, "teacher/model")["weights"] / "model.safetensors"
    write_teacher(tmp_path)
    assert copy.read_bytes() == (tmp_path / "teacher/model.safetensors").read_bytes()
    verified = distilled.command("verify")
    assert verified.code == 0, verified.output


def test_a_policy_that_reads_the_answer_teaches_itself(tmp_path, prefect_api):
    job = InProcessJob(tmp_path, prefect_api)
    job.train(
        "iterations=1",
        "algorithm.kind=distillation",
        "algorithm.distillation.teacher.kind=policy",
        "algorithm.distillation.teacher.template=The answer is {answer}. {prompt}",
        "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:even', weight = 0}]",
    )
    assert manifest_of(job.run, "it-0001/estimates")["metrics"]["privileged"] == 6 * 4
    estimates, samples = (rows_by_sample(job, "it-0001", stage) for stage in ("estimates", "credit"))
    for name, sample in samples.items():
        teacher, policy = (np.array(estimates[name][column]) for column in ("teacher", "policy"))
        np.testing.assert_array_equal(np.float32(sample["advantages"]), np.float32(teacher - policy))
        assert (teacher != policy).any()
    assert digest_of(job.run, "it-0001/update") != digest_of(job.run, "policy/initial")
    assert job.command("verify").code == 0


@pytest.mark.slow
def test_a_run_ends_while_its_teacher_is_down_and_continues_afterwards(tmp_path, prefect_api):
    write_teacher(tmp_path)
    teacher = tmp_path / "teacher"
    state = {"up": False}
    job = Job(tmp_path, prefect_api)
    with teacher_server(teacher, faults=lambda asked, before: None if state["up"] else Reply(status=503)) as server:
        asking = (
            "iterations=1",
            "algorithm.kind=grpo",
            "algorithm.distillation.teacher.kind=endpoint",
            f"algorithm.distillation.teacher.base_url={server.url}",
            'algorithm.distillation.teacher.allowed_hosts=["127.0.0.1"]',
            "algorithm.distillation.teacher.allow_private=true",
            "algorithm.distillation.teacher.model=teacher",
            "algorithm.distillation.teacher.retries=1",
        )
        ended = job.train(*asking)
        assert ended.code not in (0, 2), ended.output
        assert "/v1/completions did not answer" in ended.output and "503 Service Unavailable" in ended.output
        before = manifests_of(job.run)
        state["up"] = True
        resumed = job.train(*asking)
    assert resumed.code == 0, resumed.output
    assert manifests_of(job.run).items() > before.items()
    assert job.command("verify").code == 0
