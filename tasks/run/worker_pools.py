"""Workers of a run: the cluster that hosts them, and the worker class, number and options for each role."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

from rheostat.infra.config import PoolsConfig
from rheostat.infra.pools.cluster import RayCluster
from rheostat.infra.pools.embedded import Preload
from rheostat.infra.pools.fleet import Fleet
from rheostat.infra.pools.gpu_layout import NO_GPUS, GpuLayout
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.pool import Pool
from rheostat.infra.pools.ranks import RankGroup
from rheostat.infra.pools.threads import ThreadCluster
from rheostat.infra.pools.worker import PoolSpec
from rheostat.infra.store.runs import Run
from rheostat.models.config.judges import ServedReward
from rheostat.tasks.config.gpus import gpu_layout
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.run.keys import reward_model_role

PRELOADED_MODULES = (
    "deepspeed",
    "deepspeed.ops",
    *(f"rheostat.models.workers.{role}" for role in ("preparation", "rollout", "scoring", "update")),
)
"""Modules that the workers of every run import. An embedded cluster imports them once for all workers."""


class Cluster(Protocol):
    """Host of a run's workers, either as Ray processes or as threads of this process. All workers end when it is
    closed."""

    @property
    def address(self) -> str | None:
        """Address at which other processes can use the same workers, or None if they cannot."""
        ...

    async def pool(self, spec: PoolSpec) -> Pool:
        """Start the workers of a role and return them as a pool."""
        ...

    async def fleet(self, specs: Sequence[PoolSpec], *, slots: SlotCount, gpus: GpuLayout = NO_GPUS) -> Fleet:
        """Return worker slots that the roles in `specs` share. Workers start only when slots are assigned to their
        role."""
        ...

    async def ranks(
        self, spec: PoolSpec, *, gpus: GpuLayout = NO_GPUS, fleet: Fleet | None = None, wait_seconds: float = 180
    ) -> RankGroup:
        """Start the ranks of distributed training, wait until they have connected to each other, and return them. The
        ranks may use GPUs of the worker slots in `fleet`."""
        ...


def open_cluster(
    run: Run, pools: PoolsConfig, *, cluster_address: str | None, preloads_all_roles: bool
) -> AbstractAsyncContextManager[Cluster]:
    """Open the cluster for a run's workers, as `pools.cluster` selects: threads of this process, or Ray."""
    if pools.cluster == "threads":
        return ThreadCluster.open(threads=pools.threads)
    preload = Preload(PRELOADED_MODULES, threads=pools.threads) if preloads_all_roles else None
    address = cluster_address or pools.ray_address
    return RayCluster.open(f"rheostat-{run.name}", address=address, preload=preload, start_seconds=pools.start_seconds)


async def start_pool(
    cluster: Cluster, run: Run, settings: RunConfig, role: str, *, fleet: Fleet | None
) -> Pool | RankGroup:
    """Start the workers of a role. This function is the only place that maps roles to worker classes. `fleet` has the
    worker slots of this process, or is None if another process reserves them."""
    pools = settings.pools
    threads: dict[str, object] = {"threads": pools.threads}
    match role:
        case "preparation":
            return await cluster.pool(
                _build_spec(
                    run, settings, role, "rheostat.models.workers.preparation:PreparationWorker", 1, options=threads
                )
            )
        case "scoring":
            options: dict[str, object] = {"scoring": settings.scoring, "algorithm": settings.algorithm}
            spec = _build_spec(
                run,
                settings,
                role,
                "rheostat.models.workers.scoring:ScoringWorker",
                pools.scoring_workers,
                options=options,
            )
            return await cluster.pool(spec)
        case "update":
            learning: dict[str, object] = {"update": settings.update, "algorithm": settings.algorithm}
            options = {**threads, **learning, "temperature": settings.rollout.sampling.temperature}
            options["denoising"] = settings.rollout.denoising
            spec = _build_spec(
                run, settings, role, "rheostat.models.workers.update:UpdateWorker", pools.update_ranks, options=options
            )
            gpus = gpu_layout(settings)
            spec = replace(spec, shares_gpu=gpus.may_share_gpus(pools.workers.max))
            return await cluster.ranks(spec, gpus=gpus, fleet=fleet, wait_seconds=pools.wait_seconds)
    for term, reward in settings.scoring.model_rewards.items():
        if role == reward_model_role(term):
            return await cluster.pool(_reward_model_spec(run, settings, term, reward, size=pools.scoring_workers))
    raise AssertionError(f"there is no worker class for the role {role!r}")


async def open_worker_slots(cluster: Cluster, run: Run, settings: RunConfig) -> Fleet:
    """Open the worker slots that rollout and the models of rewards share. Workers start only when placement assigns
    slots to a role."""
    pools, lora, rollout = settings.pools, settings.update.lora, settings.rollout
    options: dict[str, object] = {"engine": rollout.engine, "environment": rollout.environment}
    options |= {"threads": pools.threads, "adapter_rank": 0 if lora is None else lora.rank}
    options["records_experts"] = settings.update.router_replay == "rollout"
    slots = SlotCount(
        max_slots=pools.workers.max,
        initial_slots=pools.workers.min_slots,
        min_slots=settings.min_slots,
        wait_seconds=pools.wait_seconds,
    )
    specs = [
        _build_spec(
            run, settings, "rollout", "rheostat.models.workers.rollout:RolloutWorker", slots.max_slots, options=options
        )
    ]
    for term, reward in settings.scoring.hosted_rewards.items():
        specs.append(_reward_model_spec(run, settings, term, reward, size=slots.max_slots // reward.slots))
    return await cluster.fleet(specs, slots=slots, gpus=gpu_layout(settings))


def _reward_model_spec(run: Run, settings: RunConfig, term: str, reward: ServedReward, *, size: int) -> PoolSpec:
    threads = settings.pools.threads * reward.slots
    options: dict[str, object] = {"term": term, "reward": reward, "threads": threads}
    spec = _build_spec(run, settings, reward_model_role(term), reward.implementation, size, options=options)
    return replace(spec, threads=threads, slots=reward.slots)


def _build_spec(
    run: Run, settings: RunConfig, role: str, target: str, size: int, *, options: dict[str, object]
) -> PoolSpec:
    pools = settings.pools
    gpus = {"update": pools.gpus_per_update_rank}
    home, _, name = run.store.uri.rstrip("/").rpartition("/")
    return PoolSpec(
        role=role,
        target=target,
        options={"store_uri": home, "run": name, **options},
        size=size,
        threads=pools.threads,
        gpus=gpus.get(role, 0),
        start_seconds=pools.start_seconds,
        stall_seconds=pools.stall_seconds,
        max_restarts=pools.max_restarts,
        prefetches=run.store.traits.downloads,
    )
