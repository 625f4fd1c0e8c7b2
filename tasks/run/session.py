"""A run that is open in this process: its store, its lease, its settings, its worker pools.

A flow is handed a `RunRef`, small and serialisable; `session_of` finds the open session behind it, which its tasks get.
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
    """Hosts the pools of one run, which end with its context: Ray's processes, or threads of this one."""

    @property
    def address(self) -> str | None:
        """Where other processes find the same pools; none where they cannot."""
        ...

    async def pool(self, spec: PoolSpec) -> Pool:
        """Return a pool whose workers have started."""
        ...

    async def fleet(self, specs: Sequence[PoolSpec], *, slots: SlotCount, gpus_per_slot: float) -> Fleet:
        """Return worker slots that these roles share; nothing starts before they are arranged."""
        ...

    async def ranks(self, spec: PoolSpec) -> RankGroup:
        """Return a group of ranks that have met."""
        ...


@dataclass(slots=True)
class Placing:
    """The placement of a run that is open in this process."""

    policy: Policy
    measurements: Measurements = field(default_factory=Measurements)
    current: Plan | None = None
    """How the slots were last dealt."""
    memory: Memory = field(default_factory=Memory)
    arranged: int = 0
    """How often workers were moved by this process: numbers the journal's entries."""
    began: float = 0.0
    """When the current stage was planned, on the monotonic clock."""


@dataclass(slots=True)
class Retention:
    """How far this process has looked for policies and iterations whose files retention gives up."""

    versions: int = 0
    """Those before were looked at."""
    kept: set[str] = field(default_factory=set)
    """Keys of the bundles of those among them that keep their files."""
    postponed: dict[str, BundleRef] = field(default_factory=dict)
    """Bundles by key that have a tombstone and keep their files while other processes read them."""
    iterations: int = 0
    """Those up to this one have given up their shards."""


class Commits:
    """Commits that this process has made or found: they wake who waits for them."""

    def __init__(self) -> None:
        self.newest = time.monotonic()
        """When the last one came, on the monotonic clock."""
        self._waiting: dict[str, asyncio.Event] = {}

    def announce(self, key: str) -> None:
        """Wake who waits for a key."""
        self.newest = time.monotonic()
        if (waiting := self._waiting.pop(key, None)) is not None:
            waiting.set()

    async def wait(self, key: str, *, seconds: float) -> None:
        """Return when a key is announced, or after so long: other processes announce nothing here."""
        waiting = self._waiting.setdefault(key, asyncio.Event())
        with suppress(TimeoutError):
            await asyncio.wait_for(waiting.wait(), seconds)


R = TypeVar("R")

ASKED_AT_A_TIME = 32
"""Questions to a store elsewhere that are on their way together."""


class RunRef(Settings):
    """Names a run that is held by a session of this process, or of the process that asks."""

    store: str
    """Where runs lie."""
    name: str
    """Name of the run."""
    epoch: int | None = None
    """Controller epoch of the holder; none makes the called flow take the run over itself."""
    cluster: str | None = None
    """Address of the Ray cluster that hosts the holder's pools; none has the run open pools of its own."""
    pools: PoolsConfig | None = None
    """The holder's worker processes, which who joins it shares; none takes those that the run was made with."""
    controllers: ControllersConfig | None = None
    """The holder's controllers; none takes those that the run was made with."""


class Session:
    """An open run. Pools start when they are first asked for, in the background, and stay hot between stages.

    It is no record: Prefect walks through those that tasks are handed.
    """

    def __init__(self, run: Run, settings: RunConfig, cluster: Cluster, *, store: str, over: bool = False) -> None:
        self.run, self.settings, self.cluster = run, settings, cluster
        self.is_over = over
        """Whether nothing is left to make, but to tell of it."""
        self.ref = RunRef(
            store=store,
            name=run.name,
            epoch=run.epoch,
            cluster=cluster.address,
            pools=settings.pools,
            controllers=settings.controllers,
        )
        """What flows are handed."""
        self.chain = Chain(run)
        """Where finished parts are recorded."""
        self.commits = Commits()
        """What wakes stages that wait for other controllers."""
        self.slots_taken = asyncio.Lock()
        """Held by a batch that is generated and scored, and by the update where it needs the machines of the slots."""
        self.placing: Placing | None = None
        """What the placement knows, once it has been asked."""
        self.pages = Pages()
        self.account = Account()
        self.retention = Retention()
        """What retention has looked at."""
        self._pools: dict[str, asyncio.Task[Pool | RankGroup]] = {}
        self._fleet: asyncio.Task[Fleet] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._counted: Mapping[str, int] = {}
        self._asking = ThreadPoolExecutor(ASKED_AT_A_TIME, thread_name_prefix="store")

    async def ask_store(self, question: Callable[[], R]) -> R:
        """Ask the run's store something; where its answers come from afar nobody else waits for them."""
        if not self.run.store.is_remote:
            return question()
        return await asyncio.get_running_loop().run_in_executor(self._asking, question)

    def reward_model(self, term: str, *, prefix: str = "") -> Manifest:
        """What committed the model behind a reward; `prefix` is that of a re-scoring's manifests."""
        return self.run.require(StageKey.reward_model(term).below(prefix))

    def foresee(self, role: str, record: object) -> None:
        """Tell the workers in the slots of what a role will need, where it has to be fetched from elsewhere."""
        opened = self._fleet
        is_open = opened is not None and opened.done() and not opened.cancelled() and opened.exception() is None
        if opened is not None and is_open and self.run.store.is_remote:
            opened.result().role(role).foresee(record)

    def requests(self) -> dict[str, int]:
        """Count what this process has asked the run's store since this was asked last, by verb."""
        now, before = self.run.store.requests(), self._counted
        self._counted = now
        return {verb: new for verb, count in sorted(now.items()) if (new := count - before.get(verb, 0))}

    def warm(self, *roles: str) -> None:
        """Begin to start the pools of these roles without waiting for them."""
        for role in roles:
            if role not in self._pools:
                self._pools[role] = asyncio.create_task(_start(self, role), name=f"start {role}")

    def warm_slots(self) -> None:
        """Begin to start the rollout workers, which are asked for first."""

        async def start() -> None:
            await (await self.fleet()).arrange({"rollout": self.settings.pools.workers.max})

        if self._starting is None:
            self._starting = asyncio.create_task(start(), name="start the slots")

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

    async def fleet(self) -> Fleet:
        """The worker slots, which the placement deals to the roles that models serve."""
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
        """Have a worker of the role, or all its ranks, do the work."""
        return await self.ask(role, method, work, returns=Outcome)

    async def ask(self, role: str, method: str, work: object, *, returns: type[R]) -> Done[R]:
        """Have a worker do work whose result is not for the store, or is yet to be committed."""
        if role in self.slot_roles:
            pool: Pool | RankGroup = (await self.fleet()).role(role)
        else:
            pool = await self.ready(role)
        return await pool.run(method, work, returns=returns)

    @property
    def slot_roles(self) -> dict[str, int]:
        """Roles that share the worker slots, and the slots that one worker of each takes."""
        local = self.settings.scoring.hosted_rewards
        return {"rollout": 1} | {reward_model_role(term): reward.slots for term, reward in local.items()}

    def pools_of(self, controller: str) -> tuple[str, ...]:
        """Pools beside the slots that a controller of a role has work for."""
        served = self.settings.scoring.model_rewards
        elsewhere = tuple(reward_model_role(term) for term in served if reward_model_role(term) not in self.slot_roles)
        return {"rollout": (), "scoring": ("scoring", *elsewhere)}.get(controller, (controller,))

    def settle(self, committing: Coroutine[object, object, None]) -> None:
        """Begin to commit what is expected, beside what goes on."""
        self._settling = asyncio.create_task(committing, name="settle")

    async def settled(self) -> None:
        """Wait until all that was expected is committed; raise what kept it from that."""
        if self._settling is not None:
            await asyncio.shield(self._settling)

    async def release(self, role: str) -> None:
        """Close the pool of a role that no later stage needs."""
        if role in self._pools:
            await (await self._pools.pop(role)).close()

    async def close(self) -> None:
        """Stop starting pools; those that are open end with the cluster. What is not committed now is made again."""
        begun = (*self._pools.values(), self._fleet, self._starting, self._settling, self.pages.renewing)
        tasks = [task for task in begun if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What is being committed still holds the run.
        await asyncio.to_thread(self._asking.shutdown, cancel_futures=True)


PRELOADED = (
    "deepspeed",
    "deepspeed.ops",
    *(f"models.workers.{role}" for role in ("preparation", "rollout", "scoring", "update")),
)
"""What the workers of every run import, sooner or later."""

_OPEN: dict[tuple[str, str], Session] = {}


def session_of(ref: RunRef) -> Session:
    """The session that this process has open for a run; a flow inside another is only called while there is one."""
    return _OPEN[ref.store, ref.name]


def is_open(ref: RunRef) -> bool:
    """Whether this process already has the run open."""
    return (ref.store, ref.name) in _OPEN


@asynccontextmanager
async def open_session(
    run: Run, settings: RunConfig, *, store: str, join: str | None = None, whole: bool = False, over: bool = False
) -> AsyncIterator[Session]:
    """Open the run's cluster, or at `join` the one where another process has its pools, and register the run.

    For a `whole` run, which has work for all roles, an embedded cluster imports what they need once. A run that is
    `over` has little to ask of workers: they are threads.
    """
    pools = settings.pools.model_copy(update={"cluster": "threads"}) if over else settings.pools
    async with _cluster(run, pools, join=join, whole=whole) as cluster:
        session = _OPEN[store, run.name] = Session(run, settings, cluster, store=store, over=over)
        try:
            yield session
            await session.settled()
        finally:
            del _OPEN[store, run.name]
            await session.close()


def _cluster(run: Run, pools: PoolsConfig, *, join: str | None, whole: bool) -> AbstractAsyncContextManager[Cluster]:
    """Open what hosts the run's workers."""
    if pools.cluster == "threads":
        return ThreadCluster.open(threads=pools.threads)
    preload = Preload(PRELOADED, threads=pools.threads) if whole else None
    address = join or pools.ray_address
    return RayCluster.open(f"rheostat-{run.name}", address=address, preload=preload, start_seconds=pools.start_seconds)


async def _start(session: Session, role: str) -> Pool | RankGroup:
    """The one place that knows which class serves which role."""
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
    """Name the workers that share the slots; none is started before the placement asks for it."""
    pools, lora, rollout = session.settings.pools, session.settings.update.lora, session.settings.rollout
    options: dict[str, object] = {"engine": rollout.engine, "environment": rollout.environment}
    options |= {"threads": pools.threads, "adapter_rank": 0 if lora is None else lora.rank}
    options["notes_experts"] = session.settings.update.router_replay == "rollout"
    slots = SlotCount(
        most=pools.workers.max,
        first=pools.workers.fewest,
        least=session.settings.least_slots,
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
