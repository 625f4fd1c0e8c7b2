"""Rollouts of weights that are not durable yet: none is committed before them, and a kill in between changes no bit."""

import json
import os
import signal

import pytest

import models.workers.update
from tasks.verification.invariants import verify_run
from tests.support.chaos import Storm, Strike, attempt, problems_after, run_once, start_on_ray, writes_of
from tests.support.jobs import Fault, wait_for, works_of
from tests.support.processes import process

pytestmark = [pytest.mark.system, pytest.mark.timeout(2000)]

PPO = (
    "iterations=4",
    "algorithm.kind=ppo",
    "algorithm.critic.warmup_iterations=1",
    "update.state_every=2",
    "retention.keep_last=2",
)


BATCHES = 2
"""Shards that an iteration generates, in any order."""

SLOW_SECONDS = 8
"""How long a sync takes after which nothing is generated, as after the last update."""


def shards_written(home):
    return sum(name.startswith("shards/") for name in writes_of(home))


def attempt_on_slow_disk(home, api, strike, overrides):
    """Run the job where weights become durable when an iteration is generated with them, and never while it dies."""
    sync = models.workers.update.sync_bundle

    def generated_since(before):
        dying = strike is not None and strike.write in writes_of(home)  # a write is told before it is made
        return shards_written(home) >= before + BATCHES and not dying

    def slow(store, ref):
        before = shards_written(home)
        if ref.key.startswith("policies/"):
            wait_for(lambda: generated_since(before), seconds=SLOW_SECONDS)
        sync(store, ref)

    models.workers.update.sync_bundle = slow
    attempt(home, api, strike, overrides)


def on_slow_disk(home, api, strike, overrides=()):
    with process(attempt_on_slow_disk, home, api, strike, overrides) as child:
        child.join(600)
    return child.exitcode


def manifest(run, key):
    return json.loads((run / f"manifests/{key}.json").read_text())


def first_shard(run, number):
    return manifest(run, f"it-000{number}/rollout/0000")["shards"][0]["key"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, prefect_api):
    """The run of schedules of kills, never disturbed."""
    home = tmp_path_factory.mktemp("whole")
    assert run_once(home, prefect_api, None) == 0
    return home / "store/tiny"


@pytest.fixture(scope="module")
def ppo(tmp_path_factory, prefect_api):
    """A run with a critic that keeps every second state, never disturbed."""
    home = tmp_path_factory.mktemp("ppo")
    assert run_once(home, prefect_api, None, PPO) == 0
    return home / "store/tiny"


def test_rollouts_are_generated_before_their_weights_are_durable_and_committed_after_them(whole, tmp_path, prefect_api):
    assert problems_after([], tmp_path, prefect_api, whole, start=on_slow_disk) == []
    writes = writes_of(tmp_path)
    commits = [f"manifests/it-000{part}.json" for part in ("1/update", "2/plan", "2/rollout/0000")]
    order = [writes.index(name) for name in (first_shard(whole, 2), *commits)]
    assert order == sorted(order)


@pytest.mark.parametrize("torn", [False, True], ids=["whole", "torn"])
def test_a_kill_between_weights_taken_and_weights_durable_costs_no_update_and_changes_no_bit(
    whole, tmp_path, prefect_api, torn
):
    home, strike = tmp_path / "killed", Strike(first_shard(whole, 2), "after")
    home.mkdir()
    assert on_slow_disk(home, prefect_api, strike) == -signal.SIGKILL
    run = home / "store/tiny"
    weights = manifest(whole, "it-0001/update")["bundles"]["weights"]["key"]
    assert (run / weights / "bundle.json").exists(), "the weights were there, and a shard was made of them"
    assert not any((run / f"manifests/{key}.json").exists() for key in ("it-0001/update", "it-0002/plan"))
    assert verify_run(str(home / "store"), "tiny") == []
    if torn:
        os.truncate(run / weights / "model.safetensors", 1000)
    assert problems_after([], home, prefect_api, whole, start=run_once) == []
    assert not (run / "expected").exists()
    updates = sum(count for work, count in works_of(home).items() if work.startswith("update "))
    assert updates == 2 + torn, "what was made is not made again, unless a power cut tore it"


def test_a_rank_that_is_killed_before_its_weights_are_durable_is_replaced_by_one_that_proves_them(
    whole, tmp_path, prefect_api
):
    storm = Storm((Fault("update-0", "begin", "^sync"),))
    assert problems_after([storm], tmp_path / "killed", prefect_api, whole, start=start_on_ray) == []
    assert (tmp_path / "killed/struck").read_text() == "x"


@pytest.mark.parametrize("start", [run_once, on_slow_disk], ids=["soon durable", "late durable"])
def test_kills_around_every_update_of_a_policy_and_its_critic_with_few_states_change_no_bit(
    ppo, tmp_path, prefect_api, start
):
    stored = ["critic_state" in manifest(ppo, f"it-000{number}/update")["bundles"] for number in (1, 2, 3, 4)]
    assert stored == [False, True, False, True]
    weights = manifest(ppo, "it-0003/update")["bundles"]
    strikes = [
        Strike("manifests/it-0001/update.json", "after"),
        Strike("manifests/it-0002/update.json", "before"),
        Strike(f"{weights['weights']['key']}/bundle.json", "after"),
        Strike(f"{weights['critic']['key']}/bundle.json", "before"),
        Strike("manifests/it-0003/update.json", "after"),
        Strike(first_shard(ppo, 4), "after"),
        Strike("manifests/it-0004/update.json", "after"),
    ]
    assert problems_after(strikes, tmp_path / "killed", prefect_api, ppo, PPO, start=start) == []
