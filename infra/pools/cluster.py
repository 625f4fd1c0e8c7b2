"""Start or join the Ray cluster that the pools live in.

Ray is imported only here and in the functions that talk to it: an embedded cluster on the loopback interface needs its
environment set before that. One cluster per process.
"""

import asyncio
import contextlib
import logging
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import ClusterFailed
from infra.pools import forks
from infra.pools.fleet import Fleet
from infra.pools.host import environment, thread_variables
from infra.pools.placement_group import SLOT, RayLauncher, ReservedSlots
from infra.pools.pool import Pool
from infra.pools.ranks import RankGroup
from infra.pools.worker import PoolSpec
from infra.processes.guard import CLUSTER, start_guard

if TYPE_CHECKING:
    from ray.job_config import JobConfig

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 * 2**20  # calls carry references, so Ray's minimum of 75 MB would do
EMBEDDED_SLOTS = 2**20
SHUTDOWN_SECONDS = 15.0
QUIET = logging.ERROR

EMBEDDED_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nodes of a cluster on Windows and macOS use the loopback address; elsewhere Ray replaces 127.0.0.1 by another
    # (github.com/ray-project/ray/issues/18730).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray protects clusters that it starts by the token in ~/.ray, but does not look for it when it joins by address.
    "RAY_AUTH_MODE": "token",
    # Ray's handler of SIGTERM prints a stack and ends the driver on the spot.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
}


@dataclass(frozen=True, slots=True)
class Preload:
    """What most workers of a cluster import: modules that the driver's `sys.path` finds, with so many threads."""

    modules: tuple[str, ...]
    threads: int = 1


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A connection to a Ray cluster, and the pools that this process works with."""

    address: str
    """Where other processes find the same pools: `RayCluster.open(namespace, address=address)`."""
    namespace: str
    _embedded: bool
    _members: list[Pool | Fleet | RankGroup] = field(default_factory=list)

    @staticmethod
    @contextlib.asynccontextmanager
    async def open(
        namespace: str,
        *,
        address: str | None = None,
        preload: Preload | None = None,
        start_seconds: float = 60,
        log_to_driver: bool = False,
    ) -> "AsyncIterator[RayCluster]":
        """Start an embedded cluster, or connect to the one at `address`.

        Workers end with the process that started them, and at the latest with its context. Those of an embedded
        cluster are forks of a process that preloads what they import, where the system allows it.
        """
        if address is None:
            what = "an embedded Ray cluster"
            connection = _embedded(namespace, preload=preload, log_to_driver=log_to_driver)
        else:
            what = f"the Ray cluster at {address!r}"
            connection = _connected(address, namespace, log_to_driver=log_to_driver)
        async with _in_thread(connection, what=what, start_seconds=start_seconds) as reached:
            cluster = RayCluster(reached, namespace, address is None)
            try:
                yield cluster
            finally:
                await asyncio.gather(*(member.close() for member in cluster._members))

    async def pool(self, spec: PoolSpec) -> Pool:
        """Return a pool: workers that another process has started under this namespace and role, and new ones."""
        pool = Pool(spec, RayLauncher())
        await pool.open()
        self._members.append(pool)
        return pool

    async def fleet(self, specs: Sequence[PoolSpec], *, slots: int, gpus_per_slot: float) -> Fleet:
        """Return worker slots that these roles share; nothing starts before they are arranged.

        In a process that does not arrange them, it finds the workers that are awake in the one that does.
        """
        patience = max(spec.start_seconds for spec in specs)
        berths = ReservedSlots(slots, gpus=gpus_per_slot, embedded=self._embedded, start_seconds=patience)
        fleet = Fleet(specs, berths)
        self._members.append(fleet)
        return fleet

    async def ranks(self, spec: PoolSpec) -> RankGroup:
        """Return a group of ranks: the one that another process has started, else a new one."""
        group = RankGroup(spec, RayLauncher())
        await group.open()
        self._members.append(group)
        return group


@contextlib.contextmanager
def _embedded(namespace: str, *, preload: Preload | None, log_to_driver: bool) -> Iterator[str]:
    """Start Ray on this machine; its processes and files are gone at the end, however that comes."""
    directory = Path(tempfile.mkdtemp(prefix="rheostat-", dir="/tmp"))  # sockets below it: paths of 103 bytes at most
    guard = start_guard(directory)
    nursery = None
    try:
        with environment({**EMBEDDED_ENVIRONMENT, CLUSTER: str(directory)}):
            if preload is not None and sys.platform == "linux":
                variables = thread_variables(preload.threads, gpus=0, devices=())
                nursery = forks.start_nursery(directory, preload.modules, variables=variables)
            import ray

            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=0,
                resources={SLOT: EMBEDDED_SLOTS},
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=log_to_driver,
                logging_level=QUIET,
                runtime_env={} if nursery is None else {"py_executable": forks.worker_command(directory)},
                job_config=_job_config(),
                _temp_dir=str(directory / "ray"),  # Ray opens it to everybody; what is above it is ours alone
            )
        yield str(ray.get_runtime_context().gcs_address)
        ray.shutdown()
    finally:
        guard.communicate()
        if nursery is not None:
            nursery.wait()


@contextlib.contextmanager
def _connected(address: str, namespace: str, *, log_to_driver: bool) -> Iterator[str]:
    """Connect to a cluster that others keep."""
    with environment(EMBEDDED_ENVIRONMENT if address.startswith("127.") else {}):
        import ray

        ours = {} if address.startswith("ray://") else {"job_config": _job_config()}  # else the server has its own
        ray.init(address=address, namespace=namespace, log_to_driver=log_to_driver, logging_level=QUIET, **ours)
    yield address if address.startswith("ray://") else str(ray.get_runtime_context().gcs_address)
    ray.shutdown()


class _Unextended(list[str]):
    def extend(self, more: Iterable[str]) -> None:
        """Stay as it is."""


def _job_config() -> "JobConfig":
    """Keep Ray from putting the working directory before everything else on its workers' path: it is a user's."""
    from ray.job_config import JobConfig

    config = JobConfig()
    config._py_driver_sys_path = _Unextended()
    return config


@contextlib.asynccontextmanager
async def _in_thread(
    connection: contextlib.AbstractContextManager[str], *, what: str, start_seconds: float
) -> AsyncIterator[str]:
    """Hold a connection from a thread of its own, which lives as long as it does.

    The kernel kills Ray's processes when the thread that started them ends, so no executor's thread will do. A start
    that takes too long is left to its thread, which ends what it has started.
    """
    started: Future[str] = Future()
    leave = threading.Event()

    def hold() -> None:
        try:
            with connection as address:
                started.set_result(address)
                leave.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=hold, name="ray", daemon=True)
    thread.start()
    try:
        try:
            reached = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(started)), start_seconds)
        except TimeoutError:
            raise ClusterFailed(f"{what} did not start within {start_seconds:g} s") from None
        except Exception as error:
            raise ClusterFailed(f"{what} did not start: {error}") from error
        yield reached
    finally:
        leave.set()
        if started.done():
            await asyncio.to_thread(thread.join, SHUTDOWN_SECONDS)
