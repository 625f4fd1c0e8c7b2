"""Whole runs that learn from a teacher's copy: no reward counts, and a killed one stays the undisturbed run."""

import numpy as np
import pytest

from infra.store.manifests import Manifest
from infra.store.runs import open_run
from infra.store.shards import read_shard
from infra.store.storage import open_store
from models.config.data import ArithmeticData
from models.config.policy import ScratchPolicy
from models.data.problems import load_problems
from models.modeling.policy import build_scratch, save_policy
from models.text.tokenizer import scratch_tokenizer
from tests.support.chat_server import Reply
from tests.support.in_process import InProcessJob
from tests.support.jobs import Fault, Job, manifests_of, shards_of
from tests.support.teachers import teacher_server

pytestmark = [pytest.mark.timeout(1200), pytest.mark.system]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A larger policy over the tokens of the tiny job's."""
    directory = tmp_path_factory.mktemp("teacher")
    problems = load_problems(ArithmeticData(train_problems=64, heldout_problems=8), "train", 0)
    tokenizer = scratch_tokenizer(ScratchPolicy(), problems)
    save_policy(build_scratch(ScratchPolicy(layers=3), tokenizer, seed=9), tokenizer, directory)
    return directory


def distilling(teacher) -> tuple[str, ...]:
    return (
        "iterations=2",
        "algorithm.kind=distillation",
        "algorithm.distillation.teacher.kind=directory",
        f"algorithm.distillation.teacher.path={teacher}",
        "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:even', weight = 0}]",
    )


@pytest.fixture(scope="module")
def distilled(tmp_path_factory, prefect_api, teacher):
    job = InProcessJob(tmp_path_factory.mktemp("distilled"), prefect_api)
    job.train(*distilling(teacher))
    return job


def manifest(job: InProcessJob, key: str) -> Manifest:
    found = open_run(str(job.store), "tiny").find(key)
    assert found is not None, key
    return found


def rows(job: InProcessJob, key: str) -> dict[tuple[int, int], dict]:
    """What a stage says of each completion, by prompt and sample."""
    tables = [read_shard(open_store(str(job.run)), shard) for shard in manifest(job, key).shards]
    return {(row["prompt_row"], row["sample"]): row for table in tables for row in table.to_pylist()}


def test_a_run_without_a_reward_that_counts_learns_from_its_teacher(distilled):
    for iteration in ("it-0001", "it-0002"):
        estimates, samples = (rows(distilled, f"{iteration}/{stage}") for stage in ("estimates", "credit"))
        assert len(samples) == 6 * 4  # every completion teaches
        for name, sample in samples.items():
            teacher, policy = (np.array(estimates[name][column]) for column in ("teacher", "policy"))
            np.testing.assert_array_equal(np.float32(sample["advantages"]), np.float32(teacher - policy))
    assert (
        manifest(distilled, "it-0002/update").bundles["weights"]
        != manifest(distilled, "policy/initial").bundles["weights"]
    )


def test_a_run_keeps_its_teacher_and_keeps_every_promise(distilled, teacher):
    kept = manifest(distilled, "teacher/model")
    assert kept.digest in manifest(distilled, "it-0001/estimates").parents
    copied = distilled.run / kept.bundles["weights"].key
    assert (copied / "model.safetensors").read_bytes() == (teacher / "model.safetensors").read_bytes()
    verified = distilled.command("verify")
    assert verified.code == 0, verified.output


@pytest.mark.slow
def test_a_rank_killed_while_it_asks_changes_nothing(distilled, teacher, tmp_path, prefect_api):
    job = Job(tmp_path, prefect_api)
    killed = job.train(*distilling(teacher), faults=[Fault("update-0", "progress", "estimate", count=3)])
    assert (killed.code, job.struck()) == (0, 1), killed.output
    assert manifests_of(job.run) == manifests_of(distilled.run)
    assert shards_of(job.run) == shards_of(distilled.run)


@pytest.mark.slow
def test_a_run_whose_teacher_is_down_ends_and_continues_when_it_is_back(teacher, tmp_path, prefect_api):
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
        assert "/v1/completions is down: it answers 503" in ended.output
        before = manifests_of(job.run)
        state["up"] = True
        resumed = job.train(*asking)
    assert resumed.code == 0, resumed.output
    assert manifests_of(job.run).items() > before.items()
    assert job.command("verify").code == 0
