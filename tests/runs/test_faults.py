"""Faults inside whole runs: each process of the job is killed at named moments, and the result does not change."""

import random
import shutil
import signal
from pathlib import Path

import pytest

from rheostat.infra.store.progress import GOALS
from tests.support.jobs import (
    Fault,
    Job,
    bundles_of,
    digest_of,
    files_of,
    list_running,
    manifest_of,
    process_tree,
    wait_for,
)
from tests.support.whole_runs import check_same_run

pytestmark = pytest.mark.timeout(2000)  # on an idle machine a job takes 20 s, and the chain of kills 10 minutes

WORKER_FAULTS = (
    Fault("preparation", "after", "/policies/.*/bundle.json"),
    Fault("rollout", "progress", "generate", count=5),
    Fault("rollout", "before", "/shards/", count=2),
    Fault("rollout", "during", "/shards/", count=2),
    Fault("rollout", "after", "/shards/"),
    Fault("scoring", "before", "/shards/"),
    Fault("scoring", "during", "/shards/", count=3),
    Fault("scoring", "after", "/shards/", count=2),
)
UPDATE_FAULTS = (
    Fault("update-0", "after", "/policies/.*/bundle.json"),
    Fault("update-0", "progress", "update"),
    Fault("update-0", "during", "/states/"),
    Fault("update-0", "before", "/policies/.*/model.safetensors", count=2),
)


def copy_unfinished(reference, home, *, without):
    """Copy a run as it was before some stages of its last iteration: without their manifests and chain records."""
    job = Job(home, reference.api)
    shutil.copytree(reference.store, job.store)
    for pattern in (*without, "retention/*", "eval-0003/**/*"):
        for path in job.run.glob(f"manifests/{pattern}.json"):
            path.unlink()
    for path in (*job.run.glob("chain/*-it-0003.json"), *job.run.glob("chain/*-eval-0003.json")):
        path.unlink()
    return job


@pytest.mark.slow
def test_a_damaged_shard_of_an_unsealed_iteration_stops_the_run_and_is_named(reference, tmp_path):
    stages = ("scoring/0001", "credit", "update", "seal")
    job = copy_unfinished(reference, tmp_path, without=[f"it-0003/{stage}" for stage in stages])
    shard = job.run / manifest_of(job.run, "it-0003/rollout/0001")["shards"][0]["key"]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:400] + bytes([whole[400] ^ 4]) + whole[401:])
    before = files_of(job.run)
    ended = job.train()
    assert ended.code == 1
    assert shard.stem in ended.output.splitlines()[-1]
    assert "Traceback" not in ended.output
    after = files_of(job.run)
    assert {name: after[name] for name in before} == before
    assert {name.split("/")[0] for name in after.keys() - before.keys()} <= {"lease", "journal", "report"}


@pytest.mark.slow
def test_a_missing_policy_file_stops_the_run_and_is_named(reference, tmp_path):
    stages = ("rollout/*", "scoring/*", "credit", "update", "seal")
    job = copy_unfinished(reference, tmp_path, without=[f"it-0003/{stage}" for stage in stages])
    policy = bundles_of(job.run, "it-0002/update")["weights"]
    (policy / "model.safetensors").unlink()
    ended = job.train()
    assert ended.code == 1
    assert policy.name in ended.output.splitlines()[-1]
    assert "model.safetensors" in ended.output.splitlines()[-1]


@pytest.mark.slow
def test_one_damaged_bit_in_the_weights_stops_the_run_and_is_named(reference, tmp_path):
    stages = ("rollout/*", "scoring/*", "credit", "update", "seal")
    job = copy_unfinished(reference, tmp_path, without=[f"it-0003/{stage}" for stage in stages])
    policy = bundles_of(job.run, "it-0002/update")["weights"]
    weights = policy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    ended = job.train()
    assert ended.code == 1
    assert policy.name in ended.output.splitlines()[-1]
    assert "model.safetensors" in ended.output.splitlines()[-1]
    assert not list(job.run.glob("manifests/it-0003/rollout/*"))
    weights.write_bytes(whole)
    assert job.train().code == 0
    check_same_run(job.run, reference.run)


@pytest.mark.slow
def test_workers_that_die_at_every_start_end_the_job_with_a_named_error_and_leave_nothing(reference, tmp_path):
    job = Job(tmp_path, reference.api)
    ended = job.train(faults=[Fault("rollout", "start", "")] * 40)
    assert ended.code == 1
    assert "rollout" in ended.output.splitlines()[-1]
    assert "Traceback" not in ended.output
    assert not list(job.run.glob("manifests/*/rollout/*"))
    assert job.train().code == 0
    check_same_run(job.run, reference.run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ignored"),
    [(signal.SIGINT, ()), (signal.SIGTERM, ()), (signal.SIGTERM, (signal.SIGINT,))],
    ids=["SIGINT", "SIGTERM", "SIGTERM if SIGINT is ignored, as in a background job of a script"],
)
def test_a_signal_ends_the_job_in_order_and_the_command_continues_it(number, ignored, reference, tmp_path):
    job = Job(tmp_path, ignores=ignored)
    with job.started() as process:
        assert wait_for(lambda: (job.run / "manifests/it-0001/plan.json").exists())
        family = process_tree(process.pid)
        process.send_signal(number)
        ended = job.ended(process)
    assert ended.code == 128 + number
    assert ended.output.splitlines()[-1] == "rheostat: interrupted; run the same command again to continue"
    assert "Traceback" not in ended.output
    assert wait_for(lambda: not list_running(family), seconds=10), list_running(family)
    resumed = Job(tmp_path, reference.api).train()
    assert resumed.code == 0, resumed.output
    check_same_run(job.run, reference.run)


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_a_driver_killed_at_every_manifest_ends_with_the_same_run(reference, tmp_path):
    """Kill each resumed job at the next moment. The last one ends."""
    whole = Job(tmp_path / "whole", reference.api, counts_works=True)
    ended = whole.train()
    assert ended.code == 0, ended.output
    job = Job(tmp_path / "killed", reference.api, counts_works=True)
    kills = 0
    for moment, name in driver_moments(whole):
        if (job.run / name).exists():
            continue  # a peer of a shard was as quick
        ended = job.train(faults=[Fault("driver", moment, f"/{name}$")])
        assert ended.code == -signal.SIGKILL, (moment, name, ended.output)
        kills += 1
    ended = job.train()
    assert ended.code == 0, ended.output
    check_same_run(job.run, reference.run)
    assert kills >= 25
    assert job.repeats() <= 2 * kills  # two rollout workers have a shard each when their driver dies


LATE = ("update.json", "seal.json", "summary.json", ".png")
"""Files of iteration 3 and of the last evaluation at which the driver is killed. Iteration 1 covers all others."""


def driver_moments(whole):
    """Return the moments after every write of the driver, and before writes that commit results of workers.

    Iterations 2 and 3 are covered in part.
    """
    for name in (Path(put).relative_to(whole.run).as_posix() for put in whole.puts()):
        if name.startswith("manifests/it-0002") or ("-0003" in name and not name.endswith(LATE)):
            continue
        if name.startswith(GOALS):  # a note whose name counts the starts of the job
            continue
        if name.endswith(("base.json", "0000.json", "credit.json", "update.json")) and "eval" not in name:
            yield "before", name
        yield "after", name


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_random_schedule_of_kills_ends_with_the_same_run(seed, reference, tmp_path):
    choose = random.Random(seed)
    job = Job(tmp_path, reference.api, counts_works=True)
    struck = 0
    for _ in range(4):
        driver = Fault("driver", choose.choice(["before", "after"]), "/manifests/", count=choose.randrange(2, 16))
        workers = choose.sample(WORKER_FAULTS[1:] + UPDATE_FAULTS, 2)
        ended = job.train(faults=[driver, *workers])
        assert ended.code in (-signal.SIGKILL, 0), (seed, ended.output)
        struck += job.struck()
    ended = job.train()
    assert ended.code == 0, (seed, ended.output)
    check_same_run(job.run, reference.run)
    assert job.repeats() <= 3 * struck, seed  # an update that is not durable, and two shards made with it


@pytest.mark.slow
def test_with_a_learning_rate_of_zero_the_policy_stays_the_initial_policy(reference, tmp_path):
    job = Job(tmp_path, reference.api)
    ended = job.train("update.learning_rate=0", "iterations=1")
    assert ended.code == 0, ended.output
    assert digest_of(job.run, "it-0001/update") == digest_of(job.run, "policy/initial")
