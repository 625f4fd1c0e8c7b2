"""Iterations, batches and open runs, which are arguments of tasks."""

import importlib
import pkgutil
from dataclasses import is_dataclass

import pytest
from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.utilities.collections import visit_collection
from pydantic import BaseModel

import rheostat.tasks
from rheostat.infra.errors import Damaged
from rheostat.infra.pools.threads import ThreadCluster
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.models.config.engines import SamplingConfig
from rheostat.tasks.config.run import override_config
from rheostat.tasks.placement.stage import get_placement
from rheostat.tasks.run.batch import Batch, BatchPlan
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.run.open_run import OpenRun, open_with_workers
from tests.support.demos import ARITHMETIC


def plan(run: Run, wave: int) -> BatchPlan:
    """Commit the plan of a batch of the third iteration, of five prompts in three shards."""
    planned = BatchPlan(
        key=iteration_key(3, wave), number=3, wave=wave, split="train", rows=(4, 0, 3, 1, 2), group_size=2,
        shard_prompts=2, sampling=SamplingConfig(), policy=StageKey.policy(2),
    )  # fmt: skip
    run.commit(Manifest(key=planned.plan_key, detail=planned.model_dump(mode="json")))
    return planned


def test_an_iteration_finds_batches_that_are_planned_later(run):
    iteration = Iteration(run, 3)
    assert iteration.batches == ()
    first = plan(run, 1)
    assert [batch.plan for batch in iteration.batches] == [first]
    second = plan(run, 2)
    assert [batch.plan for batch in iteration.batches] == [first, second]
    assert [(batch.key, shard) for batch, shard in iteration.shards()] == [
        (key, shard) for key in ("it-0003", "it-0003/wave-2") for shard in range(3)
    ]


def test_a_batch_is_found_by_its_key_in_another_process(run):
    planned = plan(run, 2)
    assert Batch.read(run, "it-0003/wave-2").plan == planned


@pytest.mark.parametrize(
    ("missing", "read"),
    [
        ("it-0004/plan", lambda iteration: Batch.read(iteration.run, "it-0004")),
        ("it-0002/update", lambda iteration: iteration.policy),
        ("it-0003/credit", lambda iteration: iteration.credit),
        ("it-0003/rollout/0000", lambda iteration: iteration.shard_manifests("rollout")),
        ("it-0003/scoring/0000", lambda iteration: iteration.batches[0].stage_manifests("scoring")),
    ],
)
def test_a_manifest_that_is_not_committed_yet_is_reported_as_missing(run, missing, read):
    plan(run, 1)
    with pytest.raises(Damaged, match=f"'{missing}' is missing"):
        read(Iteration(run, 3))


def test_a_rescoring_has_the_stored_rollouts_and_separate_scores(run):
    plan(run, 1)
    [batch] = Iteration(run, 3).batches
    for shard in range(3):
        run.commit(Manifest(key=f"it-0003/rollout/{shard:04d}"))
        run.commit(Manifest(key=f"rescore/strict/it-0003/scoring/{shard:04d}"))
    again = batch.as_rescoring("rescore/strict/")
    scores = [manifest.key for manifest in again.stage_manifests("scoring")]
    assert [manifest.key for manifest in again.rollout_manifests] == [
        f"it-0003/rollout/{shard:04d}" for shard in range(3)
    ]
    assert scores == [f"rescore/strict/it-0003/scoring/{shard:04d}" for shard in range(3)]


def test_prefect_does_not_traverse_the_arguments_of_tasks(run):
    plan(run, 1)
    iteration = Iteration(run, 3)
    for handed in (iteration, *iteration.batches):
        seen: list[object] = []
        visit_collection(handed, seen.append)
        assert seen == [handed]
    assert not is_dataclass(OpenRun)
    assert not issubclass(OpenRun, BaseModel)


def test_no_task_has_a_cache_in_prefect():
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(rheostat.tasks.__path__, "rheostat.tasks.")
    ]
    found = {task.name: task for module in modules for task in vars(module).values() if isinstance(task, Task)}
    assert len(found) > 20
    assert [name for name, task in found.items() if task.cache_policy != NO_CACHE] == []


async def test_there_is_no_current_placement_before_the_first_iteration(run, tmp_path):
    config = override_config({"data": ARITHMETIC}, ("pools.cluster=threads",), source="run.toml")
    async with open_with_workers(run, config, store=str(tmp_path)) as open_run:
        placement = get_placement(open_run, before=0)
        assert placement.current_plan is None
        assert placement is open_run.placement


async def test_a_finished_run_opens_no_cluster(run, tmp_path):
    config = override_config({"data": ARITHMETIC}, ("pools.cluster=ray", "pools.gpus_per_worker=1"), source="run.toml")
    async with open_with_workers(
        run, config, store=str(tmp_path), preloads_all_roles=True, is_finished=True
    ) as open_run:
        assert open_run.is_finished
        assert isinstance(open_run.cluster, ThreadCluster)
        assert open_run.ref.cluster is None
