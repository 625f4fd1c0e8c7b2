"""Update ranks and workers that share GPUs: turns, and memory compared with values computed by hand."""

import pytest

from rheostat.infra.pools.fleet import Fleet
from rheostat.infra.pools.threads import ThreadLauncher
from rheostat.infra.pools.worker import PoolSpec
from rheostat.tasks.config.gpus import (
    BUCKET_NUMBERS,
    CUDA_BYTES,
    GATHERED_NUMBERS,
    NCCL_BYTES,
    find_default_float32,
    find_memory_conflicts,
    kept_rank_bytes,
    library_bytes,
)
from rheostat.tasks.placement.stage import reserve_shared_gpus
from rheostat.tasks.run.open_run import OpenRun
from tests.support.configurations import accepted

FACTS = {
    "update_weights_bytes": 200.0,
    "update_gradient_bytes": 50.0,
    "update_optimizer_bytes": 100.0,
    "update_activations_bytes": 400.0,
    "update_head_bytes": 30.0,
    "update_writing_bytes": 70.0,
    "parameters": 50.0,
    "rollout_weights_bytes": 900.0,
}
"""A rank keeps 350 bytes and the memory of CUDA while it is idle."""
SHARED = ("rollout.engine.kind=vllm", "pools.gpus_per_worker=1", "pools.gpus_per_update_rank=1")


def conflicts(*overrides, memory=1000.0):
    """Return the conflicts on a GPU of 1,000 GiB, of which a rank needs 351."""
    facts = {name: value * 2**30 for name, value in FACTS.items()}
    return [*find_memory_conflicts(accepted(*SHARED, *overrides), facts, memory * 2**30)]


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
    assert kept_rank_bytes(accepted(), FACTS) == 350 + CUDA_BYTES
    offloaded = accepted("update.zero_stage=2", "update.offload=optimizer")
    assert kept_rank_bytes(offloaded, FACTS) == 250 + CUDA_BYTES
    sharded = accepted("update.zero_stage=3", "pools.update_ranks=2")
    assert kept_rank_bytes(sharded, FACTS) == 350 + CUDA_BYTES + NCCL_BYTES + 4 * BUCKET_NUMBERS


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"cuda": 2**30}),
        (("pools.update_ranks=2",), {"cuda": 2**31}),
        (("update.zero_stage=1",), {"cuda": 2**30, "buckets": 2e9}),
        (("update.dtype=bfloat16",), {"cuda": 2**30, "buckets": 1e9}),  # runs at ZeRO-2
        (("update.zero_stage=3",), {"cuda": 2**30, "buckets": 2e9, "gathered": 4e6}),
        (("update.zero_stage=3", "update.dtype=bfloat16"), {"cuda": 2**30, "buckets": 1e9, "gathered": 2e6}),
    ],
)
def test_libraries_of_a_rank_need_memory_for_cuda_nccl_and_the_buffers_of_deepspeed(overrides, expected):
    config = accepted(*overrides)
    sizes = library_bytes(config.update, {"parameters": 1e6}, ranks=config.pools.update_ranks, on_gpu=True)
    assert sizes == {f"update_{name}_bytes": size for name, size in expected.items()}


def test_a_rank_on_a_cpu_touches_only_the_part_of_a_bucket_that_holds_gradients():
    update, facts = accepted("update.zero_stage=3").update, {"parameters": 1e6, "trained_parameters": 4e5}
    sizes = library_bytes(update, facts, ranks=2, on_gpu=False)
    assert sizes == {"update_buckets_bytes": 1.6e6, "update_gathered_bytes": 4e6}
    assert library_bytes(accepted().update, facts, ranks=2, on_gpu=False) == {}


def test_the_sizes_of_the_buffers_are_the_defaults_of_deepspeed():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert DeepSpeedZeroConfig().reduce_bucket_size == BUCKET_NUMBERS
    assert DeepSpeedZeroConfig().max_live_parameters == GATHERED_NUMBERS


def test_a_server_that_leaves_too_little_memory_for_the_rank_on_its_gpu_is_refused():
    [message] = conflicts()
    assert "rollout.engine.gpu_memory_share is 0.85, but the update rank on the same GPU keeps about" in message
    assert "Set rollout.engine.gpu_memory_share to at most 0.64" in message


def test_every_server_on_the_gpu_counts():
    two = ("pools.workers=2", "pools.gpus_per_worker=0.5")
    assert conflicts(*two, "rollout.engine.gpu_memory_share=0.32") == []
    [message] = conflicts(*two, "rollout.engine.gpu_memory_share=0.4")
    assert "2 servers on each GPU" in message and "at most 0.32" in message


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.engine.gpu_memory_share=0.64",),
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
