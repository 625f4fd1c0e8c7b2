"""Connection of this process to the Ray cluster in which the worker pools run. A process has at most one cluster.

Ray is imported only inside functions, because an embedded cluster needs its environment variables to be set before.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rheostat.infra.errors import ClusterFailed
from rheostat.infra.pools.embedded import EMBEDDED_ENVIRONMENT, QUIET, Preload, build_job_config, start_embedded
from rheostat.infra.pools.fleet import Fleet
from rheostat.infra.pools.gpu_layout import NO_GPUS, GpuLayout
from rheostat.infra.pools.host import disable_ray_colors, environment
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.machines import Machines
from rheostat.infra.pools.placement_group import RayLauncher, ReservedSlots
from rheostat.infra.pools.pool import Pool
from rheostat.infra.pools.rank_places import GpuRankPlaces
from rheostat.infra.pools.ranks import RankGroup
from rheostat.infra.pools.worker import PoolSpec
from rheostat.infra.processes.guard import CLUSTER, reap
from rheostat.infra.processes.watch import (
    CHECK_SECONDS,
    QUERY_SECONDS,
    Watch,
    WatchedPort,
    WatchedServer,
    exit_soon,
    run_apart,
)

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 15.0
FAILED_SECONDS = 2.0
"""Maximum time in seconds to wait for Ray to shut down a cluster after its servers have died."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """Connection of this process to a Ray cluster, and the worker pools that it uses there."""

    address: str
    """Address for other processes that use the same pools: `RayCluster.open(namespace, address=address)`."""
    namespace: str
    _machines: Machines
    _members: list[Pool | Fleet | RankGroup] = field(default_factory=list)

    @staticmethod
    @contextlib.asynccontextmanager
    async def open(
        namespace: str,
        *,
        address: str | None = None,
        preload: Preload | None = None,
        start_seconds: float = 180,
        log_to_driver: bool = False,
    ) -> "AsyncIterator[RayCluster]":
        """Start an embedded Ray cluster, or connect to the cluster at `address`, and run the block. The workers of this
        process are ended afterwards. Yields the connection.

        Workers of an embedded cluster are forked from a process that has imported their modules, if the system allows
        it. Raises ClusterFailed if the cluster does not start within `start_seconds` or if one of its servers fails.
        """
        disable_ray_colors()
        if address is None:
            what = "an embedded Ray cluster"
            directory = Path(tempfile.mkdtemp(prefix="rheostat-", dir="/tmp"))  # short: socket paths have 103 bytes
            connection = start_embedded(directory, namespace, preload=preload, log_to_driver=log_to_driver)
        else:
            what, directory = f"the Ray cluster at {address!r} (pools.ray_address)", None
            connection = _connected(address, namespace, log_to_driver=log_to_driver)
        async with (
            _ended_with(_servers(directory) if address is None else _elsewhere(address)) as watch,
            _in_thread(connection, what=what, start_seconds=start_seconds, watch=watch) as reached,
        ):
            machines = Machines(is_single=address is None, is_reachable=not reached.startswith("ray://"))
            cluster = RayCluster(reached, namespace, machines)
            try:
                yield cluster
            except BaseException:
                await run_apart(watch.check)  # before closing: the cause may be a failed server, not a worker
                raise
            finally:
                await cluster._close(watch, directory)

    async def _close(self, watch: Watch, directory: Path | None) -> None:
        """Close this process's pools and end their workers. If a server has failed, kill instead of waiting."""
        closing = asyncio.ensure_future(self._close_members())
        try:
            while not (await asyncio.wait({closing}, timeout=CHECK_SECONDS))[0]:
                if watch.problem is not None and directory is not None:
                    await run_apart(lambda: reap(directory, spared=os.getpid()))
                    await asyncio.wait({closing}, timeout=CHECK_SECONDS)
                    break
        finally:
            watch.stop()
            if not closing.done():
                closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing

    async def _close_members(self) -> None:
        """Close the pools. Ranks on GPUs come first, because releasing worker slots kills the ranks in the slots."""
        first = [member for member in self._members if isinstance(member, RankGroup) and member.has_reserved_places]
        await asyncio.gather(*(member.close() for member in first))
        await asyncio.gather(*(member.close() for member in self._members if member not in first))

    async def pool(self, spec: PoolSpec) -> Pool:
        """Return a pool of workers. Workers that another process started in the same namespace and role are reused."""
        pool = Pool(spec, RayLauncher(self._machines))
        await pool.open()
        self._members.append(pool)
        return pool

    async def fleet(self, specs: Sequence[PoolSpec], *, slots: SlotCount, gpus: GpuLayout = NO_GPUS) -> Fleet:
        """Return a fleet: worker slots (places for one worker each) that several roles share. Workers start when
        `Fleet.arrange` assigns slots. A process that never calls it uses workers of the process that does."""
        widest = max(spec.slots for spec in specs)
        fleet = Fleet(specs, ReservedSlots(slots, widest=widest, gpus=gpus, machines=self._machines), slots)
        self._members.append(fleet)
        return fleet

    async def ranks(
        self, spec: PoolSpec, *, gpus: GpuLayout = NO_GPUS, fleet: Fleet | None = None, wait_seconds: float = 180
    ) -> RankGroup:
        """Return the group of ranks for the update. Ranks that another process has started are reused.

        `gpus` decides whether the ranks use GPUs, and whether these are the GPUs of the worker slots. `fleet` has the
        slots, or is None if another process of the run reserves them. The ranks wait up to `wait_seconds` for GPUs.
        """
        places = None
        if gpus.per_rank:
            places = GpuRankPlaces(gpus, fleet=fleet, wait_seconds=wait_seconds, machines=self._machines)
        group = RankGroup(spec, RayLauncher(self._machines), places)
        await group.open()
        self._members.append(group)
        return group


@contextlib.contextmanager
def _connected(address: str, namespace: str, *, log_to_driver: bool) -> Iterator[str]:
    """Connect to a running Ray cluster for the duration of the block, and yield the cluster's address."""
    with environment(EMBEDDED_ENVIRONMENT if address.startswith("127.") else {}):
        import ray

        ours = (
            {} if address.startswith("ray://") else {"job_config": build_job_config()}
        )  # a client's server has its own
        ray.init(address=address, namespace=namespace, log_to_driver=log_to_driver, logging_level=QUIET, **ours)
    yield address if address.startswith("ray://") else str(ray.get_runtime_context().gcs_address)
    ray.shutdown()


@contextlib.asynccontextmanager
async def _ended_with(servers: "Callable[[], Sequence[WatchedServer | WatchedPort]]") -> AsyncIterator[Watch]:
    """Run the block and watch the servers of the cluster. If one fails, cancel the block and raise ClusterFailed."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "the caller runs in an asyncio task"
    cancelled = inside = False

    def cancel() -> None:
        nonlocal cancelled
        if inside and not cancelled:
            cancelled = task.cancel()

    def failed(_: str) -> None:
        loop.call_soon_threadsafe(cancel)

    watch = Watch(servers, failed)
    inside = True
    try:
        yield watch
    except BaseException as error:
        if watch.problem is None:
            raise
        if cancelled:
            task.uncancel()
        exit_soon(1)  # at exit, Ray waits for its servers for more than a minute
        raise ClusterFailed(f"{watch.problem}. Run the same command again to continue.") from error
    finally:
        inside = False
        watch.stop()


def _elsewhere(address: str) -> Callable[[], Sequence[WatchedPort]]:
    """Return a function that lists the control server of another process's embedded cluster on this machine."""
    host, _, port = address.rpartition(":")
    servers = [WatchedPort(f"the Ray cluster at {address!r}", (host, int(port)))] if host.startswith("127.") else []
    return lambda: servers


def _servers(directory: Path | None) -> Callable[[], Sequence[WatchedServer]]:
    """Return a function that lists the servers of the embedded cluster in this directory that have started so far."""
    found: dict[str, WatchedServer] = {}

    def servers() -> Sequence[WatchedServer]:
        if len(found) < len(SERVERS) and directory is not None:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    name = child.name()
                    if name in SERVERS and name not in found and child.environ().get(CLUSTER) == str(directory):
                        what, answers = SERVERS[name]
                        found[name] = WatchedServer(f"{what} of the embedded Ray cluster", child, answers)
        return list(found.values())

    return servers


def _gcs_answers() -> bool:
    return _node_seen() is not None


def _raylet_answers() -> bool:
    return _node_seen() is not False


def _node_seen() -> bool | None:
    """Return whether Ray's control server (GCS) receives heartbeats of this machine, or None if it does not respond."""
    import ray

    worker = ray._private.worker.global_worker
    if not worker.connected:
        return True
    try:
        node = worker.core_worker.get_current_node_id()
        return bool(all(worker.gcs_client.check_alive([node], timeout=QUERY_SECONDS)))
    except (ray.exceptions.RayError, RuntimeError, AttributeError):  # Ray may be shutting down
        return None


SERVERS = {"gcs_server": ("the control server (GCS)", _gcs_answers), "raylet": ("the raylet", _raylet_answers)}
"""Name in error messages and health check function of each Ray server. Keys are names of the server processes."""


@contextlib.asynccontextmanager
async def _in_thread(
    connection: contextlib.AbstractContextManager[str], *, what: str, start_seconds: float, watch: Watch
) -> AsyncIterator[str]:
    """Open a connection to Ray in a separate thread that lives as long as the block, and yield the address.

    The kernel kills Ray's processes when the thread that started them ends. Threads of an executor may end earlier, so
    they cannot be used. If a start takes too long, the thread itself ends the processes that it started.
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
            raise ClusterFailed(f"{what} did not start within {start_seconds:g} s. Raise pools.start_seconds") from None
        except Exception as error:
            raise ClusterFailed(f"{what} did not start: {error}") from error
        yield reached
    finally:
        leave.set()
        if started.done():
            patience = SHUTDOWN_SECONDS if watch.problem is None else FAILED_SECONDS
            await run_apart(lambda: thread.join(patience))
