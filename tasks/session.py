"""A run that is open in this process: its store, its lease, its settings, its worker pools.

Flows and tasks hand each other a `RunRef`, small and serialisable; `session_of` finds the open session behind it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from infra.cluster import Cluster
from infra.config import PoolsConfig, Settings
from infra.errors import RheostatError
from infra.pools import Pool
from infra.ranks import RankGroup
from infra.runs import Run
from infra.workers import Done, PoolSpec
from models.config import (
    AlgorithmConfig,
    DataConfig,
    EvaluationConfig,
    PolicyConfig,
    RetentionConfig,
    RolloutConfig,
    UpdateConfig,
    WarmupConfig,
)
from models.records import Outcome
from models.rewards.config import ScoringConfig


class RunRef(Settings):
    """Names a run that is held by a session of this process, or of the process that asks."""

    store: str
    """Where runs lie."""
    name: str
    """Name of the run."""
    epoch: int | None = None
    """Controller epoch of the holder; none makes the called flow take the run over itself."""
    cluster: str | None = None
    """Address of the Ray cluster that hosts the holder's pools; none starts an embedded one."""
    pools: PoolsConfig | None = None
    """The holder's worker processes, which who joins it shares; none takes those that the run was made with."""


class RunSettings(Protocol):
    """What tasks need to know of a run's configuration."""

    @property
    def seed(self) -> int: ...
    @property
    def iterations(self) -> int: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def policy(self) -> PolicyConfig: ...
    @property
    def warmup(self) -> WarmupConfig | None: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def scoring(self) -> ScoringConfig: ...
    @property
    def algorithm(self) -> AlgorithmConfig: ...
    @property
    def update(self) -> UpdateConfig: ...
    @property
    def pools(self) -> PoolsConfig: ...
    @property
    def evaluation(self) -> EvaluationConfig: ...
    @property
    def retention(self) -> RetentionConfig: ...


@dataclass(slots=True)
class Session:
    """An open run. Pools start when they are first asked for, in the background, and stay hot between stages."""

    run: Run
    settings: RunSettings
    cluster: Cluster
    _pools: dict[str, asyncio.Task[Pool | RankGroup]] = field(default_factory=dict)

    def warm(self, *roles: str) -> None:
        """Begin to start the pools of these roles without waiting for them."""
        for role in roles:
            if role not in self._pools:
                self._pools[role] = asyncio.create_task(_start(self, role), name=f"start {role}")

    async def ready(self, role: str) -> Pool | RankGroup:
        """Wait until the pool of a role has started: processes that join then share its workers."""
        self.warm(role)
        starting = self._pools[role]
        try:
            return await asyncio.shield(starting)
        except RheostatError:
            if self._pools.get(role) is starting:  # who asks again, such as a retried task, starts it afresh
                del self._pools[role]
            raise

    async def perform(self, role: str, method: str, work: object) -> Done[Outcome]:
        """Have a worker of the role, or all its ranks, do the work."""
        pool = await self.ready(role)
        return await pool.run(method, work, returns=Outcome)

    async def release(self, role: str) -> None:
        """Close the pool of a role that no later stage needs."""
        if role in self._pools:
            await (await self._pools.pop(role)).close()

    async def close(self) -> None:
        """Stop starting pools; those that are open end with the cluster."""
        for starting in self._pools.values():
            starting.cancel()
        await asyncio.gather(*self._pools.values(), return_exceptions=True)


_OPEN: dict[tuple[str, str], Session] = {}


def session_of(ref: RunRef) -> Session:
    """The session that this process has open for a run; a task is only called inside one."""
    return _OPEN[ref.store, ref.name]


def is_open(ref: RunRef) -> bool:
    """Whether this process already has the run open."""
    return (ref.store, ref.name) in _OPEN


@asynccontextmanager
async def open_session(
    run: Run, settings: RunSettings, *, store: str, join: str | None = None
) -> AsyncIterator[RunRef]:
    """Open the run's cluster, or at `join` the one where another process has its pools, and register the run."""
    address = join or settings.pools.ray_address
    async with Cluster.open(f"rheostat-{run.name}", address=address) as cluster:
        session = _OPEN[store, run.name] = Session(run=run, settings=settings, cluster=cluster)
        try:
            yield RunRef(store=store, name=run.name, epoch=run.epoch, cluster=cluster.address, pools=settings.pools)
        finally:
            del _OPEN[store, run.name]
            await session.close()


async def _start(session: Session, role: str) -> Pool | RankGroup:
    """The one place that knows which class serves which role."""
    settings, pools = session.settings, session.settings.pools
    threads: dict[str, object] = {"threads": pools.threads}
    match role:
        case "preparation":
            return await session.cluster.pool(
                _spec(session, role, "models.workers.preparation:PreparationWorker", 1, options=threads)
            )
        case "rollout":
            options = {**threads, "engine": settings.rollout.engine}
            spec = _spec(session, role, "models.workers.rollout:RolloutWorker", pools.workers, options=options)
            return await session.cluster.pool(spec)
        case "scoring":
            options = {"scoring": settings.scoring, "algorithm": settings.algorithm}
            spec = _spec(session, role, "models.workers.scoring:ScoringWorker", pools.scoring_workers, options=options)
            return await session.cluster.pool(spec)
        case "update":
            options = {**threads, "update": settings.update, "temperature": settings.rollout.sampling.temperature}
            spec = _spec(session, role, "models.workers.update:UpdateWorker", pools.update_ranks, options=options)
            return await session.cluster.ranks(spec)
    raise AssertionError(f"no worker class serves the role {role!r}")


def _spec(session: Session, role: str, target: str, size: int, *, options: dict[str, object]) -> PoolSpec:
    pools = session.settings.pools
    gpus = {"rollout": pools.gpus_per_worker, "update": pools.gpus_per_update_rank}
    home, _, name = session.run.store.uri.rstrip("/").rpartition("/")
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
    )
