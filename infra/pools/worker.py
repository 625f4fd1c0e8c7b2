"""Functions with which the driver starts, calls, watches and kills a Ray worker process. The pools handle retries."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import psutil

from rheostat.infra.errors import RheostatError, WorkerFailed, WorkerLost, WorkerStalled
from rheostat.infra.pools.host import (
    LIFE,
    WATCH,
    WORK,
    Host,
    ProcessPlace,
    Raised,
    Returned,
    find_process,
    store_variables,
    thread_variables,
)
from rheostat.infra.pools.machines import Machines
from rheostat.infra.pools.stalls import StallClock
from rheostat.infra.processes.watch import run_apart, start_apart

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

R = TypeVar("R")
T = TypeVar("T")
logger = logging.getLogger(__name__)

REASON_END = 150
"""Number of characters at each end of a long error message of Ray that are kept. The middle is cut out."""


MAX_POLL_SECONDS = 5.0
ANSWER_SECONDS = 1.0
"""Time in seconds to wait for a response from a worker, before its machine is checked."""
GONE_POLL_SECONDS = 0.01
STOP_SECONDS = 5.0
"""Maximum time in seconds for an idle worker to close its resources, before it is killed."""
EXIT_SECONDS = 60.0
"""Maximum time in seconds to wait for the end of a killed process. The kernel frees the memory of a large process
slowly."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Description of the workers of one role: their class, their number, and their resources and time limits."""

    role: str
    target: str
    """Import string of the worker class, `pkg.mod:Class`. It must be importable with the `sys.path` of this process."""
    options: dict[str, object] = field(default_factory=dict)
    """Keyword arguments with which the worker class is instantiated."""
    size: int = 1
    threads: int = 1
    gpus: float = 0
    """Number of GPUs reserved per worker. If 0, no GPU is visible to the worker."""
    shares_gpu: bool = False
    """Whether other workers use the same GPU in turn. A worker then releases unused GPU memory after each method."""
    start_seconds: float = 180
    stall_seconds: float = 300
    """Time in seconds after which a worker whose method `progress()` returns the same value is considered stalled."""
    max_restarts: int = 3
    """Maximum number of times that a work unit is run again after its worker died."""
    prefetches: bool = False
    """Whether the pool announces waiting work to busy workers, so that they can download its inputs in advance."""
    slots: int = 1
    """Number of reserved slots that one worker occupies. The worker's process runs in the first of these slots."""


@dataclass(frozen=True, slots=True)
class ReservedSlot:
    """Place of a worker that is reserved in a Ray cluster: a bundle (set of reserved resources) of a placement
    group."""

    group: "PlacementGroup"
    index: int
    devices: tuple[str, ...]
    """Ids of the GPUs that are visible to the worker."""


@dataclass(frozen=True, slots=True)
class Done(Generic[R]):
    """Result of a work unit that a worker has run, with its duration and the worker."""

    result: R
    seconds: float
    """Duration of the work unit in the worker, in seconds."""
    waited_seconds: float
    """Time in seconds that the work unit waited before its last attempt started, including failed attempts."""
    attempts: int
    worker: str
    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """Live worker that runs in its own Ray process (an actor)."""

    role: str
    name: str
    actor: "ActorHandle"
    place: ProcessPlace
    machines: Machines

    async def perform(self, method: str, *arguments: object, clock: StallClock) -> Returned:
        """Run a method of the worker, and return its result. Raises the method's error, or WorkerLost if the worker
        died or the clock has run out."""
        call = self.actor.run.options(concurrency_group=WORK).remote(method, arguments)
        return await self._answer(call, method, clock)

    async def wake(self, record: object, *, stall_seconds: float) -> None:
        """Make the worker accept work again. If the record is not None, the worker first processes it with its method
        `take`, for example to load a model."""
        outcome = await self._answer(
            self.actor.wake.options(concurrency_group=WORK).remote(record), "take", StallClock(stall_seconds)
        )
        if record is not None:
            check_result(outcome, str, what=f"{self.role}.take")

    async def sleep(self, *, stall_seconds: float) -> float:
        """Wait until the worker has finished its current work, and make it free its memory. Return the seconds that
        freeing the memory took."""
        call = self.actor.sleep.options(concurrency_group=WORK).remote()
        return (await self._answer(call, "sleep", StallClock(stall_seconds))).seconds

    async def asleep(self) -> bool:
        """Return whether the worker is asleep. A sleeping worker refuses work until it is woken."""
        return bool(
            await _await_reference(self.actor.asleep.options(concurrency_group=WATCH).remote(), f"worker {self.name}")
        )

    def prefetch(self, record: object) -> None:
        """Send the worker a record of work that it may do next, so that it can download the inputs in advance. Nothing
        happens if the worker has died."""
        self.actor.prefetch.options(concurrency_group=WATCH).remote(record)

    async def wait_ended(self) -> None:
        """Return when the worker's process has ended."""
        with contextlib.suppress(WorkerLost):
            await _await_reference(self.actor.live.options(concurrency_group=LIFE).remote(), f"worker {self.name}")

    async def _answer(self, call: "Awaitable[Returned | Raised]", method: str, clock: StallClock) -> Returned:
        what = f"{self.role}.{method} (pid {self.place.pid} on {self.place.host})"
        answer = asyncio.ensure_future(_await_reference(call, what))
        watch = asyncio.ensure_future(self._watch(what, clock))
        try:
            await asyncio.wait({answer, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await watch
            outcome = await answer
        finally:
            for task in (answer, watch):
                task.cancel()
            await asyncio.gather(answer, watch, return_exceptions=True)
        return unwrap_result(outcome, f"{self.role}.{method}", self.place.pid)

    async def _watch(self, what: str, clock: StallClock) -> None:
        """Report the worker's progress counter to the clock until the call is cancelled. Raises WorkerStalled if the
        clock has run out. `what` names the current call in messages."""
        limit = f"{clock.seconds:g} s (pools.stall_seconds)"
        pause = min(MAX_POLL_SECONDS, clock.seconds / 4)
        while True:
            await asyncio.sleep(pause)
            try:
                count = await asyncio.wait_for(self._progress(what), max(pause, clock.remaining))
            except TimeoutError:
                problem = f"{what} reported no progress for {limit}"
            else:
                clock.report(self.name, count)
                problem = f"{what} made no progress for {limit}, progress counter: {count}"
            if clock.remaining <= 0:
                raise WorkerStalled(problem)

    async def _progress(self, what: str) -> object:
        """Return the worker's progress counter. Raises WorkerLost if the worker's machine is unreachable. `what` names
        the current call in messages."""
        query = asyncio.ensure_future(
            _await_reference(self.actor.progress.options(concurrency_group=WATCH).remote(), what)
        )
        try:
            while not (await asyncio.wait({query}, timeout=ANSWER_SECONDS))[0]:
                if not (await self.machines.check_nodes(self.place.node)).get(self.place.node):
                    raise WorkerLost(f"{what} failed, because the machine of this worker has left the cluster")
            return query.result()
        finally:
            query.cancel()
            await asyncio.gather(query, return_exceptions=True)

    @property
    def is_owned(self) -> bool:
        """Whether this process started the worker and must end it."""
        import ray

        return bool(self.place.job == ray.get_runtime_context().get_job_id())

    async def free_port(self) -> int:
        """Return an unused network port on the worker's machine."""
        query = self.actor.free_port.options(concurrency_group=WATCH).remote()
        return int(await _await_reference(query, f"worker {self.name}"))

    def kill(self) -> None:
        """Kill the worker process, even if it is suspended. The result of its current work is lost."""
        process = self._process()
        if process is not None:  # Ray needs 5 s to give up a suspended process
            with contextlib.suppress(psutil.Error):
                process.kill()
        _kill(self.actor)

    async def await_exit(self) -> None:
        """Wait until a killed process on this machine has ended, because the process occupies the memory of its slots
        until then. Give up with a warning after `EXIT_SECONDS`."""
        deadline = time.monotonic() + EXIT_SECONDS
        while self._process() is not None:
            if time.monotonic() > deadline:
                logger.warning("worker %s (pid %d) has not ended since it was killed", self.name, self.place.pid)
                return
            await asyncio.sleep(GONE_POLL_SECONDS)

    def _process(self) -> psutil.Process | None:
        """Return the worker's process if it is alive on this machine, otherwise None."""
        import ray

        is_here = self.place.node == ray.get_runtime_context().get_node_id()
        return find_process(self.place.pid, self.place.born) if is_here else None

    async def stop(self) -> None:
        """Let an idle worker close its resources, then kill it."""
        stopping = self.actor.stop.options(concurrency_group=WORK).remote()
        try:
            await asyncio.wait_for(_await_reference(stopping, f"worker {self.name}"), STOP_SECONDS)
        except (TimeoutError, WorkerLost, WorkerFailed) as error:
            logger.warning("worker %s raised an error when it was closed: %s", self.name, error)
            self.kill()
        finally:
            _kill(self.actor)


async def start_worker(
    spec: PoolSpec, name: str, *, machines: Machines, reservation: ReservedSlot | None = None, asleep: bool = False
) -> WorkerProcess:
    """Start a worker with this name, or return the existing worker. It runs in the reserved bundle if there is one.
    Raises WorkerLost and kills the process if the worker is not ready within `start_seconds`."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    what = f"{spec.role} worker {name}"
    devices = () if reservation is None else reservation.devices
    available = await machines.check_nodes() if reservation is None else {}
    lost_nodes = [node for node, is_available in available.items() if not is_available]
    host = ray.remote(concurrency_groups={WORK: 1, WATCH: 1, LIFE: 1})(Host).options(
        name=name,
        get_if_exists=True,
        num_cpus=0,
        num_gpus=spec.gpus if reservation is None else 0,
        runtime_env={"env_vars": thread_variables(spec.threads, gpus=spec.gpus, devices=devices)},
        # Ray places an actor without requirements through any raylet, even a dead one. With a requirement it uses the
        # driver's raylet.
        memory=1 if lost_nodes else None,
        label_selector={"ray.io/node-id": f"!in({','.join(lost_nodes)})"} if lost_nodes else None,
        scheduling_strategy="DEFAULT"
        if reservation is None
        else PlacementGroupSchedulingStrategy(reservation.group, placement_group_bundle_index=reservation.index),
    )
    making = asyncio.ensure_future(run_apart(lambda: host.remote(asleep=asleep, shares_gpu=spec.shares_gpu)))
    try:
        async with asyncio.timeout(spec.start_seconds):
            actor = await asyncio.shield(making)
            place: ProcessPlace = await _await_reference(actor.place.options(concurrency_group=WATCH).remote(), what)
            constructing = actor.construct.options(concurrency_group=WORK).remote(
                spec.target, spec.options, store_variables()
            )
            outcome = await _await_reference(constructing, what)
            unwrap_result(outcome, f"{spec.role}: {spec.target}(...)", place.pid)
    except TimeoutError:
        making.add_done_callback(_kill_when_started)
        seconds = f"{spec.start_seconds:g} s. Raise pools.start_seconds if it only needs more time"
        raise WorkerLost(f"{what} ({spec.target}) did not start within {seconds}") from None
    except BaseException:
        making.add_done_callback(_kill_when_started)
        raise
    return WorkerProcess(spec.role, name, actor, place, machines)


async def find_worker(spec: PoolSpec, name: str, *, machines: Machines) -> WorkerProcess:
    """Return the worker with this name, which another process has started. Raises WorkerLost if it no longer exists or
    does not respond."""
    import ray

    what = f"{spec.role} worker {name}"
    try:
        actor = await run_apart(lambda: ray.get_actor(name))
        query = actor.place.options(concurrency_group=WATCH).remote()
        place: ProcessPlace = await asyncio.wait_for(_await_reference(query, what), spec.start_seconds)
    except (ValueError, TimeoutError) as error:
        raise WorkerLost(
            f"{what} has ended, or did not respond within {spec.start_seconds:g} s (pools.start_seconds)"
        ) from error
    return WorkerProcess(spec.role, name, actor, place, machines)


async def list_workers(role: str) -> dict[int, int]:
    """Return the latest generation of each worker of a role, by index of the worker. The generation counts the
    processes that have replaced the worker."""
    import ray

    generations: dict[int, int] = {}
    for name in await run_apart(ray.util.list_named_actors):
        match = re.fullmatch(rf"{re.escape(role)}-(\d+)-(\d+)", name)
        if match is not None:
            index, generation = int(match[1]), int(match[2])
            generations[index] = max(generation, generations.get(index, 0))
    return generations


async def gather_errors(starts: Sequence[Awaitable[None]]) -> list[BaseException]:
    """Await all of these starts, and return the exceptions of those that failed."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    return [result for result in results if isinstance(result, BaseException)]


def check_result(outcome: Returned, returns: type[R], *, what: str) -> R:
    """Return the result of a call of a worker's method. Raises WorkerFailed if the result does not have the type
    `returns`. `what` names the call in the message."""
    if not isinstance(outcome.result, returns):
        found = type(outcome.result).__name__
        raise WorkerFailed(f"{what} must return an object of type {returns.__name__}, but it returned {found}")
    return outcome.result


async def _await_reference(answer: "Awaitable[T]", what: str) -> T:
    """Await the result of a Ray call. Errors of Ray are converted to WorkerFailed or WorkerLost. `what` names the call
    in messages."""
    from ray.exceptions import RayError, RayTaskError

    try:
        return await answer
    except RayTaskError as error:
        raise WorkerFailed(f"{what}: the result could not be sent back: {error}") from error
    except RayError as error:
        raise WorkerLost(f"{what} died: {_first_cause(error)}") from error


def unwrap_result(outcome: Returned | Raised, what: str, pid: int) -> Returned:
    """Return the result of a call if it succeeded. Otherwise raise the worker's error, with the traceback from the
    worker as a note. `what` and `pid` name the call and the process in messages."""
    if isinstance(outcome, Returned):
        return outcome
    error: RheostatError = outcome.error or WorkerFailed(f"{what} raised {outcome.kind}: {outcome.message}")
    error.add_note(f"in worker pid {pid}:\n{outcome.trace}")
    raise error


def _first_cause(error: Exception) -> str:
    """Extract the cause of a worker's death from an error of Ray: the part `Worker exit detail`, or the whole message.
    The middle of a long text is cut out, because Ray writes the cause first and its advice last."""
    text = " ".join(str(error).split())
    _, _, detail = text.rpartition("Worker exit detail: ")
    return detail if len(detail) <= 2 * REASON_END else f"{detail[:REASON_END]} … {detail[-REASON_END:]}"


def _kill_when_started(starting: "asyncio.Future[ActorHandle]") -> None:
    if not starting.cancelled() and starting.exception() is None:
        _kill(starting.result())


def _kill(actor: "ActorHandle") -> None:
    """Kill a worker process through Ray, without waiting for its end."""
    import ray

    start_apart(lambda: ray.kill(actor, no_restart=True))
