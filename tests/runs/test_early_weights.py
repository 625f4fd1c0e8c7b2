"""Rollouts with weights that are not durable yet: they are committed after the weights, and a kill changes no bit."""

import os
import signal

import pytest

from rheostat.models.workers.update import UpdateWorker
from rheostat.tasks.verification.invariants import verify_run
from tests.support.chaos import Strike, attempt, problems_after, run_once, writes_of
from tests.support.jobs import bundles_of, manifest_of, wait_for, works_of
from tests.support.processes import process
from tests.support.whole_runs import read_families

pytestmark = [pytest.mark.system, pytest.mark.timeout(2000)]

BATCHES = 2
"""Shards that an iteration generates, in any order."""


def shards_written(home):
    return sum(name.startswith("shards/") for name in writes_of(home))


def attempt_on_slow_disk(home, api, strike, overrides):
    """Run the job so that weights become durable while an iteration uses them, and never if the process dies.

    After the last update of a run no iteration uses the weights, so they become durable at once.
    """
    update, sync, awaited = UpdateWorker.update, UpdateWorker.sync, 0

    def remember(worker, work):
        nonlocal awaited
        outcome = update(worker, work)
        awaited = 0 if work.is_last else shards_written(home) + BATCHES
        return outcome

    def is_used():
        dying = strike is not None and strike.write in writes_of(home)  # a write is logged before it happens
        return shards_written(home) >= awaited and not dying

    def slow(worker, bundles):
        assert wait_for(is_used)
        return sync(worker, bundles)

    UpdateWorker.update, UpdateWorker.sync = remember, slow
    attempt(home, api, strike, overrides)


def on_slow_disk(home, api, strike, overrides=()):
    with process(attempt_on_slow_disk, home, api, strike, overrides) as child:
        child.join(600)
    return child.exitcode


def first_shard(run, number):
    return manifest_of(run, f"it-000{number}/rollout/0000")["shards"][0]["key"]


@pytest.fixture
def whole(undisturbed):
    return undisturbed("small text").run


def test_rollouts_are_generated_before_their_weights_are_durable_and_committed_after_them(whole, tmp_path, prefect_api):
    assert problems_after([], tmp_path, prefect_api, whole, start=on_slow_disk) == []
    writes = writes_of(tmp_path)
    commits = [f"manifests/it-000{part}.json" for part in ("1/update", "2/plan", "2/rollout/0000")]
    order = [writes.index(name) for name in (first_shard(whole, 2), *commits)]
    assert order == sorted(order)


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_a_kill_before_weights_are_durable_repeats_no_update_and_changes_no_bit(whole, tmp_path, prefect_api, torn):
    home, strike = tmp_path / "killed", Strike(first_shard(whole, 2), "after")
    home.mkdir()
    assert on_slow_disk(home, prefect_api, strike) == -signal.SIGKILL
    run = home / "store/tiny"
    weights = manifest_of(whole, "it-0001/update")["bundles"]["weights"]["key"]
    assert (run / weights / "bundle.json").exists(), "the weights were there, and a shard was made of them"
    assert not any((run / f"manifests/{key}.json").exists() for key in ("it-0001/update", "it-0002/plan"))
    assert verify_run(str(home / "store"), "tiny") == []
    if torn:
        os.truncate(run / weights / "model.safetensors", 1000)
    assert problems_after([], home, prefect_api, whole, start=run_once) == []
    assert not (run / "expected").exists()
    updates = sum(count for work, count in works_of(home).items() if work.startswith("update "))
    assert updates == 2 + torn, "what was made is not made again, unless a power cut tore it"


def test_kills_around_updates_change_no_bit_if_weights_become_durable_late(
    undisturbed, tmp_path, together, prefect_api
):
    run, settings = undisturbed("ppo with few states").run, read_families()["ppo with few states"].settings(together)
    updates = [f"it-000{number}/update" for number in (1, 2, 3, 4)]
    assert ["critic_state" in bundles_of(run, key) for key in updates] == [False, True, False, True]
    weights = {name: path.relative_to(run).as_posix() for name, path in bundles_of(run, "it-0003/update").items()}
    strikes = [
        Strike("manifests/it-0001/update.json", "after"),
        Strike("manifests/it-0002/update.json", "before"),
        Strike(f"{weights['weights']}/bundle.json", "after"),
        Strike(f"{weights['critic']}/bundle.json", "before"),
        Strike("manifests/it-0003/update.json", "after"),
        Strike(first_shard(run, 4), "after"),
        Strike("manifests/it-0004/update.json", "after"),
    ]
    assert problems_after(strikes, tmp_path / "killed", prefect_api, run, settings, start=on_slow_disk) == []
