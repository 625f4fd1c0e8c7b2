"""Update ranks and workers that share GPUs: turns, and memory compared with values computed by hand."""

import pytest

from infra.pools.fleet import Fleet
from infra.pools.threads import ThreadLauncher
from infra.pools.worker import PoolSpec
from tasks.config.gpus import find_default_float32, find_memory_conflicts, kept_rank_bytes
from tasks.placement.stage import reserve_shared_gpus
from tasks.run.open_run import OpenRun
from tests.support.configurations import accepted

FACTS = {
    "update_weights_bytes": 200.0,
    "update_gradient_bytes": 50.0,
    "update_optimizer_bytes": 100.0,
    "update_activations_bytes": 400.0,
    "update_head_bytes": 30.0,
    "update_writing_bytes": 70.0,
    "rollout_weights_bytes": 900.0,
}
"""A rank keeps 350 bytes while it is idle."""
SHARED = ("rollout.engine.kind=vllm", "pools.gpus_per_worker=1", "pools.gpus_per_update_rank=1")


def conflicts(*overrides, memory=1000.0):
    return [*find_memory_conflicts(accepted(*SHARED, *overrides), FACTS, memory)]


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (("pools.gpus_per_update_rank=1",), "Set update.dtype = 'bfloat16', or"),
        (("pools.gpus_per_worker=1",), "Set rollout.engine.dtype = 'bfloat16', or"),
        (SHARED, "Set update.dtype = 'bfloat16' and rollout.engine.dtype = 'bfloat16', or"),
        ((*SHARED, "update.dtype=bfloat16"), "Set rollout.engine.dtype = 'bfloat16', or"),
        ((*SHARED, "update.dtype=float32", "rollout.engine.dtype=float32"), None),
        ((*SHARED, "rollout.engine.base_urls=['http://127.0.0.1:8000']", "update.dtype=bfloat16"), None),
        ((), None),
    ],
)
def test_the_cost_of_float32_is_named_if_a_policy_uses_it_on_gpus_by_default(overrides, advice):
    note = find_default_float32(accepted(*overrides))
    assert note is None if advice is None else advice in note


def test_a_rank_keeps_its_state_but_no_activations():
    assert kept_rank_bytes(accepted(), FACTS) == 350
    offloaded = accepted("update.zero_stage=2", "update.offload=optimizer")
    assert kept_rank_bytes(offloaded, FACTS) == 250


def test_a_server_that_leaves_too_little_memory_for_the_rank_on_its_gpu_is_refused():
    [message] = conflicts()
    assert "rollout.engine.gpu_memory_share is 0.85, but the update rank on the same GPU keeps about" in message
    assert "Set rollout.engine.gpu_memory_share to at most 0.65" in message


def test_every_server_on_the_gpu_counts():
    two = ("pools.workers=2", "pools.gpus_per_worker=0.5")
    assert conflicts(*two, "rollout.engine.gpu_memory_share=0.32") == []
    [message] = conflicts(*two, "rollout.engine.gpu_memory_share=0.4")
    assert "2 servers on each GPU" in message and "at most 0.32" in message


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.engine.gpu_memory_share=0.65",),
        ("rollout.engine.cache_gib=1",),
        ("rollout.engine.base_urls=['http://127.0.0.1:8000']",),
        ("pools.dedicated_update_resources=true",),
        ("pools.gpus_per_update_rank=0",),
    ],
)
def test_a_server_that_shares_no_memory_with_a_rank_is_accepted(overrides):
    assert conflicts(*overrides) == []


def test_a_rank_that_fills_the_gpu_must_be_sharded():
    assert "pools.update_ranks, update.zero_stage" in conflicts(memory=351.0)[0]


class ThreadSlots:
    """Cluster whose worker slots are threads, which need no GPUs."""

    address = None

    async def fleet(self, specs, *, slots, gpus):
        return Fleet([PoolSpec("rollout", "tests.support.workers:Counting")], ThreadLauncher(slots.max_slots), slots)


@pytest.mark.parametrize(("apart", "awake"), [(False, 0), (True, 2)])
async def test_workers_sleep_while_ranks_train_on_their_gpus(run, tmp_path, apart, awake):
    settings = accepted(*SHARED, f"pools.dedicated_update_resources={str(apart).lower()}")
    open_run = OpenRun(run, settings, ThreadSlots(), store=str(tmp_path))
    fleet = await open_run.get_fleet()
    await fleet.arrange({"rollout": 2})
    async with reserve_shared_gpus(open_run):
        assert len(fleet.allocation()["rollout"]) == awake
    await fleet.close()
    await open_run.close()
