"""Host of a worker: the code in a worker's process that runs one work unit at a time and reports the worker's
progress."""

import importlib
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, cast

import psutil

from rheostat.infra.errors import RheostatError, WorkerAsleep
from rheostat.infra.plugins import TARGETS, add_target_folders
from rheostat.infra.pools.inputs import WorkInputs, open_inputs
from rheostat.infra.processes.heap import return_freed_memory

WORK = "work"
"""Name of the Ray concurrency group that creates the worker and runs its methods one after another, in one thread."""
WATCH = "watch"
"""Name of the Ray concurrency group that responds to status calls in a second thread, while the worker is busy."""
LIFE = "life"
"""Ray concurrency group for one call that never returns. When the process ends, this call fails, which tells the caller
that the process has ended."""

_CLOUDS = ("AWS_", "AZURE_")
_STORE_VARIABLES = re.compile(
    r"AWS_(?!CONTAINER_|WEB_IDENTITY_)|AZURE_(?!MSI_|IDENTITY_|FEDERATED_)|RHEOSTAT_(CACHE|S3_|AZURE_|LEASE_)"
)
"""Pattern of the names of environment variables that configure access to stores, such as AWS credentials. Variables
that are only valid on one machine or in one container do not match."""


class Hosted(Protocol):
    """Interface of a worker class that a pool can run. Each method that does work has one parameter: an immutable
    record that describes the work."""

    def progress(self) -> int:
        """Return a counter that changes while the worker makes progress. A worker whose counter stops changing is
        considered stalled."""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Location of a worker's process: its machine and process id. The start time `born`, in seconds since the machine
    was booted, distinguishes it from other processes that had the same id."""

    pid: int
    born: float
    node: str
    host: str
    address: str
    job: str
    """Ray's id of the job (the driver process) that started the worker. The worker ends when the job ends."""


def start_seconds(process: psutil.Process) -> float:
    """Return the time at which a process was started, in seconds since the machine was booted.

    Unlike `create_time`, which adds the time of the boot, this number does not change if the system's clock is set.
    """
    while True:
        booted = psutil.boot_time()
        seconds = psutil.Process(process.pid).create_time() - booted
        if psutil.boot_time() == booted:  # otherwise the clock was set in between
            return round(seconds, 2)  # the kernel counts hundredths


def find_process(pid: int, born: float) -> psutil.Process | None:
    """Return the process with this id and this start time (see `start_seconds`) if it is alive on this machine,
    otherwise None."""
    try:
        process = psutil.Process(pid)
        is_alive = start_seconds(process) == born and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return None
    return process if is_alive else None


@dataclass(frozen=True, slots=True)
class Returned:
    """Result of a successful call of a worker's method: the return value, and the duration in seconds."""

    result: object
    seconds: float


@dataclass(frozen=True, slots=True)
class Raised:
    """Result of a failed call of a worker's method. The exception is stored as its class name, message and traceback,
    because not every exception can be unpickled in another process. If it is one of Rheostat's own errors, `error`
    contains it."""

    kind: str
    message: str
    trace: str
    error: RheostatError | None


class Host:
    """Object in a worker's process through which a pool uses the worker. It creates the worker, calls its methods, and
    reports its state."""

    def __init__(self, *, asleep: bool = False, shares_gpu: bool = False) -> None:
        """Create a host without a worker. With `asleep`, the host accepts no work until `wake` is called. With
        `shares_gpu`, the worker releases unused GPU memory after each method."""
        self._worker: Hosted | None = None
        self._inputs: WorkInputs | None = None
        self._asleep = asleep
        self._shares_gpu = shares_gpu
        add_target_folders()  # records passed to the worker may contain users' classes

    def place(self) -> ProcessPlace:
        """Return the location of the process in which this object runs."""
        import ray

        process, context = psutil.Process(), ray.get_runtime_context()
        return ProcessPlace(
            pid=process.pid,
            born=start_seconds(process),
            node=context.get_node_id(),
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            job=context.get_job_id(),
        )

    def construct(
        self, target: str, options: Mapping[str, object], variables: Mapping[str, str] = MappingProxyType({})
    ) -> Returned | Raised:
        """Create the worker by instantiating the class `target` with `options`, unless an earlier call has already
        created it. `variables` are environment variables with which the calling process accesses its stores."""

        def load() -> None:
            if self._worker is None:
                _take_over(variables)
                module, _, attribute = target.partition(":")
                self._worker = getattr(importlib.import_module(module), attribute)(**options)
                self._inputs = open_inputs(options)

        return _capture_result(load)

    def run(self, method: str, arguments: tuple[object, ...]) -> Returned | Raised:
        """Run one method of the worker. If the method raises an exception, it is returned as `Raised`. If the worker
        shares its GPU, its method `release_unused_memory` is called afterwards, also after an exception."""

        def work() -> object:
            if self._asleep:
                raise WorkerAsleep(
                    f"the worker with pid {os.getpid()} was put to sleep before {method} began, so another worker "
                    "must do the work"
                )
            if self._inputs is not None:
                self._inputs.download(arguments)
            try:
                return self._call(method, *arguments)
            finally:
                if self._shares_gpu:
                    self._call("release_unused_memory")

        return _capture_result(work)

    def wake(self, record: object) -> Returned | Raised:
        """Make the worker accept work. If the record is not None, the worker first processes it with its method `take`,
        for example to load a model."""

        def rouse() -> object:
            served = None if record is None else self._call("take", record)
            self._asleep = False
            return served

        return _capture_result(rouse)

    def sleep(self) -> Returned | Raised:
        """Make the worker refuse work from now on, and free its memory by calling its method `sleep` if it has one."""

        def doze() -> object:
            self._asleep = True
            slept = self._call("sleep") if hasattr(self._worker, "sleep") else None
            return_freed_memory()
            return slept

        return _capture_result(doze)

    def asleep(self) -> bool:
        """Return whether the worker is asleep. A sleeping worker refuses work."""
        return self._asleep

    def prefetch(self, record: object) -> None:
        """Start to download the stored data that the record refers to, while the worker runs other work."""
        if self._inputs is not None:
            self._inputs.prefetch(record)

    def live(self) -> None:
        """Wait forever. When this process ends, the call fails, and the caller knows that the process has ended."""
        threading.Event().wait()

    def _call(self, method: str, *arguments: object) -> object:
        assert self._worker is not None, "construct() was called"
        return cast(Callable[..., object], getattr(self._worker, method))(*arguments)

    def progress(self) -> int:
        """Return the worker's progress counter, or 0 before the worker is created."""
        return 0 if self._worker is None else self._worker.progress()

    def free_port(self) -> int:
        """Return a port that is not in use."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def stop(self) -> None:
        """Close the worker if it has a `close()` method."""
        if self._inputs is not None:
            self._inputs.close()
        close = getattr(self._worker, "close", None)
        if close is not None:
            close()


def _capture_result(body: Callable[[], object]) -> Returned | Raised:
    started = time.perf_counter()
    try:
        result = body()
    except Exception as error:  # sent to the caller's process as data and raised there again
        known_error = error if isinstance(error, RheostatError) else None
        return Raised(type(error).__name__, str(error), traceback.format_exc(), known_error)
    return Returned(result, time.perf_counter() - started)


def thread_variables(threads: int, *, gpus: float, devices: Sequence[str]) -> dict[str, str]:
    """Return environment variables that fix the number of threads of a worker, choose its visible GPUs, and set Hugging
    Face libraries to offline mode.

    The number of threads is fixed, because it affects the rounding of sums. If `gpus` is not 0, Ray assigns the GPUs.
    Otherwise the worker sees only `devices`, and Ray must not hide them.
    """
    limits = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
    accelerator = {} if gpus else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if devices:
        accelerator = {"CUDA_VISIBLE_DEVICES": ",".join(devices), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    offline = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
    targets = {TARGETS: os.environ[TARGETS]} if TARGETS in os.environ else {}
    return {"TOKENIZERS_PARALLELISM": "false", **limits, **accelerator, **offline, **targets}


def store_variables() -> dict[str, str]:
    """Return the environment variables with which this process accesses stores. Workers receive them as arguments of a
    call, so that credentials do not appear in logs."""
    return {name: value for name, value in os.environ.items() if _STORE_VARIABLES.match(name)}


def _take_over(variables: Mapping[str, str]) -> None:
    """Set the environment variables with which another process accesses its stores. The credentials
    of a cloud are replaced together. Other variables that are already set keep their values."""
    clouds = tuple(cloud for cloud in _CLOUDS if any(name.startswith(cloud) for name in variables))
    for name in [name for name in os.environ if name.startswith(clouds) and _STORE_VARIABLES.match(name)]:
        del os.environ[name]
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def disable_ray_colors() -> None:
    """Make Ray print messages of its servers without color codes if stdout is not a terminal. If the user has set Ray's
    variable for this, it is not changed."""
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Run the block with these environment variables set, so that processes started in the block inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
