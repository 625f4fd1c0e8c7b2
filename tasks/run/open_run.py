"""Run that is open in this process: its store, lease, settings and worker pools.

Flows receive a `RunRef`, which is small and serializable. `get_open_run` returns the open run for it, which the tasks
of the flow receive.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from rheostat.infra.config import PoolsConfig, Settings
from rheostat.infra.costs import Account
from rheostat.infra.errors import RheostatError
from rheostat.infra.pools.fleet import Fleet
from rheostat.infra.pools.pool import Pool
from rheostat.infra.pools.ranks import RankGroup
from rheostat.infra.pools.worker import Done
from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.chain import Chain
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.models.records.versions import Outcome
from rheostat.placement.measurements import Measurements
from rheostat.placement.records import Memory, Plan, Policy
from rheostat.tasks.config.gpus import gpu_layout
from rheostat.tasks.config.run import ControllersConfig, RunConfig
from rheostat.tasks.run.keys import StageKey, reward_model_role
from rheostat.tasks.run.prefect_pages import PrefectPages
from rheostat.tasks.run.solve_rates import SolveRateHistory
from rheostat.tasks.run.worker_pools import Cluster, open_cluster, open_worker_slots, start_pool


@dataclass(slots=True)
class PlacementState:
    """Data for placement decisions of a run: the policy that decides, what it measured, and the last decision."""

    policy: Policy
    measurements: Measurements = field(default_factory=Measurements)
    current_plan: Plan | None = None
    """Latest assignment of worker slots to roles, or None before the first one."""
    memory: Memory = field(default_factory=Memory)
    num_moves: int = 0
    """Number of times that this process has moved workers between roles. Numbers the journal entries."""
    stage_start_time: float = 0.0
    """Start time of the current stage in seconds of the monotonic clock."""


@dataclass(slots=True)
class RetentionProgress:
    """Position of this process in deleting old policies and rollouts, so that each one is examined only once."""

    first_unexamined_version: int = 0
    """First policy version that is not examined yet."""
    kept_bundles: set[str] = field(default_factory=set)
    """Keys of stored model files that must be kept, from the versions that are examined."""
    postponed_bundles: dict[str, BundleRef] = field(default_factory=dict)
    """Model files to delete later, by key, because another process still reads them. Their deletion is already
    recorded."""
    last_deleted_iteration: int = 0
    """Last iteration whose shards are deleted."""


class CommitNotifier:
    """Notifier that wakes tasks when a result that they wait for is stored. It covers results that this process has
    stored or seen."""

    def __init__(self) -> None:
        self.last_commit_time = time.monotonic()
        """Time of the newest stored result in seconds of the monotonic clock."""
        self._waiting: dict[str, asyncio.Event] = {}

    def announce(self, key: str) -> None:
        """Wake the tasks that wait for the result with this key."""
        self.last_commit_time = time.monotonic()
        if (waiting := self._waiting.pop(key, None)) is not None:
            waiting.set()

    async def wait(self, key: str, *, seconds: float) -> None:
        """Wait until the result with this key is announced, or for at most `seconds`. Results of other processes are
        not announced, so the caller checks the store afterwards."""
        waiting = self._waiting.setdefault(key, asyncio.Event())
        with suppress(TimeoutError):
            await asyncio.wait_for(waiting.wait(), seconds)


R = TypeVar("R")

MAX_STORE_REQUESTS = 32
"""Maximum number of concurrent requests to a remote store."""


class RunRef(Settings):
    """Small, serializable reference to a run that flows receive as a parameter. This process, or the process that calls
    the flow, has locked the run."""

    store: str
    """Directory or address of the store that contains the run."""
    name: str
    """Name of the run."""
    epoch: int | None = None
    """Number of the lock (epoch) that the locking process has acquired. None makes the called flow lock the run itself.
    """
    cluster: str | None = None
    """Address of the Ray cluster with the pools of the locking process. None makes the called flow open separate
    pools."""
    pools: PoolsConfig | None = None
    """Worker settings of the locking process, for a process that joins it. None selects the recorded settings of the
    run."""
    controllers: ControllersConfig | None = None
    """Controller settings of the locking process. None selects the recorded settings of the run."""


class OpenRun:
    """Run that is open in this process, with its settings and workers. Tasks use it to send work to workers. Workers
    start in the background when they are first needed and stay alive between stages.

    This is a plain class, because Prefect would traverse a dataclass or model that a task receives.
    """

    def __init__(
        self,
        run: Run,
        settings: RunConfig,
        cluster: Cluster,
        *,
        store: str,
        is_finished: bool = False,
        joins: bool = False,
    ) -> None:
        self.run, self.settings, self.cluster = run, settings, cluster
        self.joins = joins
        """Whether this process uses the worker slots of the process that has locked the run."""
        self.is_finished = is_finished
        """Whether the run is finished, so that only reporting is left."""
        self.ref = RunRef(
            store=store,
            name=run.name,
            epoch=run.epoch,
            cluster=cluster.address,
            pools=settings.pools,
            controllers=settings.controllers,
        )
        """Reference to this run that flows receive."""
        self.chain = Chain(run)
        """Verifiable list of finished iterations and evaluations, to which each one is appended."""
        self.commits = CommitNotifier()
        """Notifier that wakes stages which wait for results of other controllers."""
        self.slots_lock = asyncio.Lock()
        """Lock for using the worker slots: while a batch is generated and scored, or during an update on the same
        machines."""
        self.placement: PlacementState | None = None
        """Data for placement decisions, or None before the first decision."""
        self.prefect_pages = PrefectPages()
        self.account = Account()
        self.retention = RetentionProgress()
        """Progress of deleting old policies and rollouts."""
        self.solve_rates = SolveRateHistory(run)
        """Last known solve rates of the training prompts, which a curriculum needs."""
        self._pools: dict[str, asyncio.Task[Pool | RankGroup]] = {}
        self._fleet: asyncio.Task[Fleet] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._background_commit: asyncio.Task[None] | None = None
        self._last_requests: Mapping[str, int] = {}
        self._store_threads = ThreadPoolExecutor(MAX_STORE_REQUESTS, thread_name_prefix="store")

    async def query_store(self, query: Callable[[], R]) -> R:
        """Call a function that queries the run's store. If the store sends requests, other tasks run
        meanwhile."""
        if not self.run.store.traits.sends_requests:
            return query()
        return await asyncio.get_running_loop().run_in_executor(self._store_threads, query)

    def reward_model(self, term: str, *, prefix: str = "") -> Manifest:
        """Return the stored record of the model that computes a reward. `prefix` selects the models of a rescoring."""
        return self.run.require(StageKey.reward_model(term).with_prefix(prefix))

    def prefetch(self, role: str, record: object) -> None:
        """Let workers in slots download data that `role` will need soon, such as the weights that `record` names. Does
        nothing if the store is local."""
        opened = self._fleet
        is_open = opened is not None and opened.done() and not opened.cancelled() and opened.exception() is None
        if opened is not None and is_open and self.run.store.traits.downloads:
            opened.result().role(role).prefetch(record)

    def count_new_requests(self) -> dict[str, int]:
        """Return the number of requests to the store since the last call, by HTTP verb. Used for the statistics of an
        iteration."""
        now, before = self.run.store.requests(), self._last_requests
        self._last_requests = now
        return {verb: new for verb, count in sorted(now.items()) if (new := count - before.get(verb, 0))}

    def start_pools(self, *roles: str) -> None:
        """Start the workers of these roles in the background, so that later calls of `get_pool` return sooner."""
        for role in roles:
            if role not in self._pools:
                self._pools[role] = asyncio.create_task(self._start_pool(role), name=f"start {role}")

    async def _start_pool(self, role: str) -> Pool | RankGroup:
        """Start the workers of a role. Worker slots with GPUs are opened before update ranks, which may use the same
        GPUs."""
        has_gpus = gpu_layout(self.settings).per_slot > 0
        fleet = await self.get_fleet() if role == "update" and has_gpus and not self.joins else None
        return await start_pool(self.cluster, self.run, self.settings, role, fleet=fleet)

    def start_slots(self) -> None:
        """Start the rollout workers in the background, because they are needed first."""

        async def start() -> None:
            await (await self.get_fleet()).arrange({"rollout": self.settings.pools.workers.max})

        if self._starting is None:
            self._starting = asyncio.create_task(start(), name="start the slots")

    async def get_pool(self, role: str) -> Pool | RankGroup:
        """Wait until the workers of a role have started, and return their pool. Processes that join the run share these
        workers."""
        self.start_pools(role)
        starting = self._pools[role]
        try:
            return await asyncio.shield(starting)
        except RheostatError:
            if self._pools.get(role) is starting:  # a later call, for example by a retried task, starts the pool again
                del self._pools[role]
            raise

    async def get_fleet(self) -> Fleet:
        """Return the worker slots, which rollout and the models of rewards share."""
        if self._fleet is None:
            self._fleet = asyncio.create_task(
                open_worker_slots(self.cluster, self.run, self.settings), name="open the fleet"
            )
        opening = self._fleet
        try:
            return await asyncio.shield(opening)
        except RheostatError:
            if self._fleet is opening:
                self._fleet = None
            raise

    async def perform(self, role: str, method: str, work: object) -> Done[Outcome]:
        """Send work to a worker of the role (or to all update ranks), and return the outcome. The caller stores it."""
        return await self.request(role, method, work, returns=Outcome)

    async def request(self, role: str, method: str, work: object, *, returns: type[R]) -> Done[R]:
        """Call a method of a worker of the role, and return its result of type `returns`. Nothing is stored by this
        call."""
        if role in self.slot_roles:
            pool: Pool | RankGroup = (await self.get_fleet()).role(role)
        else:
            pool = await self.get_pool(role)
        return await pool.run(method, work, returns=returns)

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all workers of the run are certainly on this machine."""
        return not self.joins and self.settings.pools.ray_address is None

    @property
    def slot_roles(self) -> dict[str, int]:
        """Roles that share the worker slots, with the number of slots that one worker of the role needs."""
        local = self.settings.scoring.hosted_rewards
        return {"rollout": 1} | {reward_model_role(term): reward.slots for term, reward in local.items()}

    def get_controller_pools(self, controller: str) -> tuple[str, ...]:
        """Return the roles whose workers a controller needs, in addition to the worker slots."""
        served = self.settings.scoring.model_rewards
        elsewhere = tuple(reward_model_role(term) for term in served if reward_model_role(term) not in self.slot_roles)
        return {"rollout": (), "scoring": ("scoring", *elsewhere)}.get(controller, (controller,))

    def commit_in_background(self, commits: Coroutine[object, object, None]) -> None:
        """Run a coroutine in the background that stores results which this process already uses. `wait_for_commits`
        waits until they are stored."""
        self._background_commit = asyncio.create_task(commits, name="settle")

    async def wait_for_commits(self) -> None:
        """Wait until all results that are being stored in the background are stored. Raises the error if storing
        failed."""
        if self._background_commit is not None:
            await asyncio.shield(self._background_commit)

    async def close_pool(self, role: str) -> None:
        """Stop the workers of a role that no later stage needs."""
        if role in self._pools:
            await (await self._pools.pop(role)).close()

    async def close(self) -> None:
        """Cancel everything that runs in the background. Started workers end together with the cluster. Work that is
        not stored yet is repeated when the run is resumed."""
        started = (
            *self._pools.values(),
            self._fleet,
            self._starting,
            self._background_commit,
            self.prefect_pages.renewal_task,
        )
        tasks = [task for task in started if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Commits in progress still need the lock on the run.
        await asyncio.to_thread(self._store_threads.shutdown, cancel_futures=True)


_OPEN: dict[tuple[str, str], OpenRun] = {}


def get_open_run(ref: RunRef) -> OpenRun:
    """Return the open run that a reference names. The run must be open in this process."""
    return _OPEN[ref.store, ref.name]


def is_open(ref: RunRef) -> bool:
    """Return whether this process has the run open."""
    return (ref.store, ref.name) in _OPEN


@asynccontextmanager
async def open_with_workers(
    run: Run,
    settings: RunConfig,
    *,
    store: str,
    cluster_address: str | None = None,
    preloads_all_roles: bool = False,
    is_finished: bool = False,
) -> AsyncIterator[OpenRun]:
    """Open a run with its workers, and let `get_open_run` return it until the end of the block.

    `cluster_address` is the address of another process's Ray cluster whose pools are shared. With
    `preloads_all_roles`, an embedded cluster imports the modules of all roles only once. Set it if the run has work for
    all roles. With `is_finished`, workers are needed only for reporting, so they are threads.
    """
    pools = settings.pools.model_copy(update={"cluster": "threads"}) if is_finished else settings.pools
    async with open_cluster(
        run, pools, cluster_address=cluster_address, preloads_all_roles=preloads_all_roles
    ) as cluster:
        open_run = _OPEN[store, run.name] = OpenRun(
            run, settings, cluster, store=store, is_finished=is_finished, joins=cluster_address is not None
        )
        try:
            yield open_run
            await open_run.wait_for_commits()
        finally:
            del _OPEN[store, run.name]
            await open_run.close()
