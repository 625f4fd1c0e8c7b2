"""Run that is open in this process: its store, lease, settings and worker pools.

Flows receive a `RunRef`, which is small and serializable. `session_of` returns the open session for it, which the tasks
of the flow receive.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from infra.config import PoolsConfig, Settings
from infra.costs import Account
from infra.errors import RheostatError
from infra.pools.cluster import Preload, RayCluster
from infra.pools.fleet import Fleet
from infra.pools.launcher import SlotCount
from infra.pools.pool import Pool
from infra.pools.ranks import RankGroup
from infra.pools.threads import ThreadCluster
from infra.pools.worker import Done, PoolSpec
from infra.store.bundles import BundleRef
from infra.store.chain import Chain
from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.config.judges import ServedReward
from models.records.versions import Outcome
from placement.measurements import Measurements
from placement.records import Memory, Plan, Policy
from tasks.config.run import ControllersConfig, RunConfig
from tasks.run.keys import StageKey, reward_model_role
from tasks.run.pages import Pages


class Cluster(Protocol):
    """Host of a run's worker pools, which end with its context: Ray processes, or threads of this process."""

    @property
    def address(self) -> str | None:
        """Address under which other processes find the same pools, or None if they cannot."""
        ...

    async def pool(self, spec: PoolSpec) -> Pool:
        """Return a pool whose workers have started."""
        ...

    async def fleet(self, specs: Sequence[PoolSpec], *, slots: SlotCount, gpus_per_slot: float) -> Fleet:
        """Return worker slots that these roles share. No worker starts before the slots are arranged."""
        ...

    async def ranks(self, spec: PoolSpec) -> RankGroup:
        """Return a group of ranks that have connected to each other."""
        ...


@dataclass(slots=True)
class Placing:
    """Placement state of a run that is open in this process."""

    policy: Policy
    measurements: Measurements = field(default_factory=Measurements)
    current: Plan | None = None
    """Latest assignment of roles to slots, or None before the first."""
    memory: Memory = field(default_factory=Memory)
    arranged: int = 0
    """Number of times that this process has moved workers. Numbers the entries of the journal."""
    began: float = 0.0
    """Start time of the current stage, on the monotonic clock."""


@dataclass(slots=True)
class Retention:
    """Progress of retention in this process: the policies and iterations that it has examined."""

    versions: int = 0
    """Number of the first version that is not examined yet."""
    kept: set[str] = field(default_factory=set)
    """Keys of the bundles that keep their files, among the examined versions."""
    postponed: dict[str, BundleRef] = field(default_factory=dict)
    """Bundles by key that have a tombstone but keep their files while other processes read them."""
    iterations: int = 0
    """Number of the last iteration whose shards are deleted."""


class Commits:
    """Commits that this process has made or seen. An announced commit wakes the tasks that wait for it."""

    def __init__(self) -> None:
        self.newest = time.monotonic()
        """Time of the newest commit, on the monotonic clock."""
        self._waiting: dict[str, asyncio.Event] = {}

    def announce(self, key: str) -> None:
        """Wake the tasks that wait for a key."""
        self.newest = time.monotonic()
        if (waiting := self._waiting.pop(key, None)) is not None:
            waiting.set()

    async def wait(self, key: str, *, seconds: float) -> None:
        """Wait until a key is announced or the time has passed. Commits of other processes are not announced."""
        waiting = self._waiting.setdefault(key, asyncio.Event())
        with suppress(TimeoutError):
            await asyncio.wait_for(waiting.wait(), seconds)


R = TypeVar("R")

MAX_STORE_REQUESTS = 32
"""Maximum number of concurrent requests to a remote store."""


class RunRef(Settings):
    """Reference to a run that is locked by a session of this process, or of the process that calls a flow."""

    store: str
    """Directory or address of the store that contains the run."""
    name: str
    """Name of the run."""
    epoch: int | None = None
    """Epoch of the process that has locked the run. None makes the called flow lock the run itself."""
    cluster: str | None = None
    """Address of the Ray cluster with the pools of the locking process. None makes the called flow open separate
    pools."""
    pools: PoolsConfig | None = None
    """Worker pools of the locking process, which a joining process shares. None selects the recorded pools of the
    run."""
    controllers: ControllersConfig | None = None
    """Controller settings of the locking process. None selects the recorded settings of the run."""


class Session:
    """Open run. Pools start in the background when they are first needed and stay alive between stages.

    This is a plain class, because Prefect would traverse a dataclass or model that a task receives.
    """

    def __init__(self, run: Run, settings: RunConfig, cluster: Cluster, *, store: str, over: bool = False) -> None:
        self.run, self.settings, self.cluster = run, settings, cluster
        self.is_over = over
        """Whether the run is finished, so that only reporting is left."""
        self.ref = RunRef(
            store=store,
            name=run.name,
            epoch=run.epoch,
            cluster=cluster.address,
            pools=settings.pools,
            controllers=settings.controllers,
        )
        """Reference to this session that flows receive."""
        self.chain = Chain(run)
        """Chain of records of finished iterations and evaluations."""
        self.commits = Commits()
        """Announcements that wake stages that wait for the commits of other controllers."""
        self.slots_taken = asyncio.Lock()
        """Lock on the worker slots, for generation and scoring of a batch or an update on the slots' machines."""
        self.placing: Placing | None = None
        """State of the placement, or None before its first decision."""
        self.pages = Pages()
        self.account = Account()
        self.retention = Retention()
        """Progress of retention."""
        self._pools: dict[str, asyncio.Task[Pool | RankGroup]] = {}
        self._fleet: asyncio.Task[Fleet] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._background_commit: asyncio.Task[None] | None = None
        self._last_requests: Mapping[str, int] = {}
        self._store_threads = ThreadPoolExecutor(MAX_STORE_REQUESTS, thread_name_prefix="store")

    async def query_store(self, question: Callable[[], R]) -> R:
        """Call a function that queries the run's store. If the store is remote, other tasks run meanwhile."""
        if not self.run.store.is_remote:
            return question()
        return await asyncio.get_running_loop().run_in_executor(self._store_threads, question)

    def reward_model(self, term: str, *, prefix: str = "") -> Manifest:
        """Return the manifest of the model that serves a reward. `prefix` selects the models of a re-scoring."""
        return self.run.require(StageKey.reward_model(term).below(prefix))

    def foresee(self, role: str, record: object) -> None:
        """Tell the workers in the slots to prefetch a record that a role will need, if the store is remote."""
        opened = self._fleet
        is_open = opened is not None and opened.done() and not opened.cancelled() and opened.exception() is None
        if opened is not None and is_open and self.run.store.is_remote:
            opened.result().role(role).foresee(record)

    def requests(self) -> dict[str, int]:
        """Return the number of store requests of this process since the last call, by verb."""
        now, before = self.run.store.requests(), self._last_requests
        self._last_requests = now
        return {verb: new for verb, count in sorted(now.items()) if (new := count - before.get(verb, 0))}

    def warm(self, *roles: str) -> None:
        """Start the pools of these roles in the background."""
        for role in roles:
            if role not in self._pools:
                self._pools[role] = asyncio.create_task(_start_pool(self, role), name=f"start {role}")

    def warm_slots(self) -> None:
        """Start the rollout workers in the background, because they are needed first."""

        async def start() -> None:
            await (await self.fleet()).arrange({"rollout": self.settings.pools.workers.max})

        if self._starting is None:
            self._starting = asyncio.create_task(start(), name="start the slots")

    async def ready(self, role: str) -> Pool | RankGroup:
        """Return the pool of a role after it has started. Other processes that join then share its workers."""
        self.warm(role)
        starting = self._pools[role]
        try:
            return await asyncio.shield(starting)
        except RheostatError:
            if self._pools.get(role) is starting:  # a later call, for example by a retried task, starts the pool again
                del self._pools[role]
            raise

    async def fleet(self) -> Fleet:
        """Return the worker slots, which placement assigns to the roles that serve models."""
        if self._fleet is None:
            self._fleet = asyncio.create_task(_open_fleet(self), name="open the fleet")
        opening = self._fleet
        try:
            return await asyncio.shield(opening)
        except RheostatError:
            if self._fleet is opening:
                self._fleet = None
            raise

    async def perform(self, role: str, method: str, work: object) -> Done[Outcome]:
        """Let a worker of the role, or all ranks of the role, do the work, and return the outcome."""
        return await self.ask(role, method, work, returns=Outcome)

    async def ask(self, role: str, method: str, work: object, *, returns: type[R]) -> Done[R]:
        """Let a worker do work whose result is not stored or not committed yet, and return the result."""
        if role in self.slot_roles:
            pool: Pool | RankGroup = (await self.fleet()).role(role)
        else:
            pool = await self.ready(role)
        return await pool.run(method, work, returns=returns)

    @property
    def slot_roles(self) -> dict[str, int]:
        """Number of slots that one worker needs, by role. Lists the roles that share the worker slots."""
        local = self.settings.scoring.hosted_rewards
        return {"rollout": 1} | {reward_model_role(term): reward.slots for term, reward in local.items()}

    def pools_of(self, controller: str) -> tuple[str, ...]:
        """Return the pools that a controller of a role needs in addition to the worker slots."""
        served = self.settings.scoring.model_rewards
        elsewhere = tuple(reward_model_role(term) for term in served if reward_model_role(term) not in self.slot_roles)
        return {"rollout": (), "scoring": ("scoring", *elsewhere)}.get(controller, (controller,))

    def settle(self, committing: Coroutine[object, object, None]) -> None:
        """Start to commit, in the background, results that this process already uses (expected manifests)."""
        self._background_commit = asyncio.create_task(committing, name="settle")

    async def settled(self) -> None:
        """Wait until all expected manifests are committed. Raises the error of the commits if they failed."""
        if self._background_commit is not None:
            await asyncio.shield(self._background_commit)

    async def release(self, role: str) -> None:
        """Close the pool of a role that no later stage needs."""
        if role in self._pools:
            await (await self._pools.pop(role)).close()

    async def close(self) -> None:
        """Cancel the start of pools. Running pools end with the cluster, and uncommitted work is repeated later."""
        started = (*self._pools.values(), self._fleet, self._starting, self._background_commit, self.pages.renewing)
        tasks = [task for task in started if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Commits in progress still need the lock on the run.
        await asyncio.to_thread(self._store_threads.shutdown, cancel_futures=True)


PRELOADED = (
    "deepspeed",
    "deepspeed.ops",
    *(f"models.workers.{role}" for role in ("preparation", "rollout", "scoring", "update")),
)
"""Modules that the workers of every run import."""

_OPEN: dict[tuple[str, str], Session] = {}


def session_of(ref: RunRef) -> Session:
    """Return the open session of a run. A flow inside another is called only while the session is open."""
    return _OPEN[ref.store, ref.name]


def is_open(ref: RunRef) -> bool:
    """Return whether this process has the run open."""
    return (ref.store, ref.name) in _OPEN


@asynccontextmanager
async def open_session(
    run: Run, settings: RunConfig, *, store: str, join: str | None = None, whole: bool = False, over: bool = False
) -> AsyncIterator[Session]:
    """Open the cluster of a run and register the session for `session_of` until the end of the block.

    `join` is the address of another process's Ray cluster whose pools are shared. A `whole` run has work for all roles,
    so an embedded cluster imports their modules only once. A run that is `over` needs workers only for reporting, so
    its workers are threads.
    """
    pools = settings.pools.model_copy(update={"cluster": "threads"}) if over else settings.pools
    async with _open_cluster(run, pools, join=join, whole=whole) as cluster:
        session = _OPEN[store, run.name] = Session(run, settings, cluster, store=store, over=over)
        try:
            yield session
            await session.settled()
        finally:
            del _OPEN[store, run.name]
            await session.close()


def _open_cluster(
    run: Run, pools: PoolsConfig, *, join: str | None, whole: bool
) -> AbstractAsyncContextManager[Cluster]:
    """Open the cluster that hosts the run's workers."""
    if pools.cluster == "threads":
        return ThreadCluster.open(threads=pools.threads)
    preload = Preload(PRELOADED, threads=pools.threads) if whole else None
    address = join or pools.ray_address
    return RayCluster.open(f"rheostat-{run.name}", address=address, preload=preload, start_seconds=pools.start_seconds)


async def _start_pool(session: Session, role: str) -> Pool | RankGroup:
    """Start the pool of a role. This is the only place that maps roles to worker classes."""
    settings, pools = session.settings, session.settings.pools
    threads: dict[str, object] = {"threads": pools.threads}
    match role:
        case "preparation":
            return await session.cluster.pool(
                _spec(session, role, "models.workers.preparation:PreparationWorker", 1, options=threads)
            )
        case "scoring":
            options: dict[str, object] = {"scoring": settings.scoring, "algorithm": settings.algorithm}
            spec = _spec(session, role, "models.workers.scoring:ScoringWorker", pools.scoring_workers, options=options)
            return await session.cluster.pool(spec)
        case "update":
            learning: dict[str, object] = {"update": settings.update, "algorithm": settings.algorithm}
            options = {**threads, **learning, "temperature": settings.rollout.sampling.temperature}
            options["denoising"] = settings.rollout.denoising
            spec = _spec(session, role, "models.workers.update:UpdateWorker", pools.update_ranks, options=options)
            return await session.cluster.ranks(spec)
    for term, reward in settings.scoring.model_rewards.items():
        if role == reward_model_role(term):
            return await session.cluster.pool(_reward_model_spec(session, term, reward, size=pools.scoring_workers))
    raise AssertionError(f"no worker class serves the role {role!r}")


async def _open_fleet(session: Session) -> Fleet:
    """Open the worker slots for rollout and for hosted reward models. No worker starts before placement requests it."""
    pools, lora, rollout = session.settings.pools, session.settings.update.lora, session.settings.rollout
    options: dict[str, object] = {"engine": rollout.engine, "environment": rollout.environment}
    options |= {"threads": pools.threads, "adapter_rank": 0 if lora is None else lora.rank}
    options["records_experts"] = session.settings.update.router_replay == "rollout"
    slots = SlotCount(
        most=pools.workers.max,
        first=pools.workers.fewest,
        least=session.settings.min_slots,
        wait_seconds=pools.wait_seconds,
    )
    specs = [_spec(session, "rollout", "models.workers.rollout:RolloutWorker", slots.most, options=options)]
    for term, reward in session.settings.scoring.hosted_rewards.items():
        specs.append(_reward_model_spec(session, term, reward, size=slots.most // reward.slots))
    return await session.cluster.fleet(specs, slots=slots, gpus_per_slot=pools.gpus_per_worker)


def _reward_model_spec(session: Session, term: str, reward: ServedReward, *, size: int) -> PoolSpec:
    threads = session.settings.pools.threads * reward.slots
    options: dict[str, object] = {"term": term, "reward": reward, "threads": threads}
    spec = _spec(session, reward_model_role(term), reward.implementation, size, options=options)
    return replace(spec, threads=threads, slots=reward.slots)


def _spec(session: Session, role: str, target: str, size: int, *, options: dict[str, object]) -> PoolSpec:
    pools = session.settings.pools
    gpus = {"update": pools.gpus_per_update_rank}
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
        looks_ahead=session.run.store.is_remote,
    )
