"""The process that hosts one worker: one piece of work at a time, and a counter that can be read meanwhile."""

import importlib
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, cast

import psutil

from infra.errors import RheostatError, WorkerAsleep
from infra.plugins import TARGETS, add_target_folders
from infra.pools.inputs import WorkInputs, inputs_of
from infra.processes.heap import return_freed_memory

WORK = "work"
"""Concurrency group of one thread: constructs the worker and runs its methods, one after another."""
WATCH = "watch"
"""Concurrency group of one thread that answers while the other is busy."""
LIFE = "life"
"""Concurrency group of one thread that never answers: the call fails when the process ends."""

_AWS = "AWS_"
_OF_STORES = re.compile(r"AWS_(?!CONTAINER_|WEB_IDENTITY_)|RHEOSTAT_(CACHE|S3_|LEASE_)")
"""Variables of stores; those left out are of one machine, or of one container."""


class Hosted(Protocol):
    """What a pool can host: any class whose methods take one record, and which counts its progress."""

    def progress(self) -> int:
        """Return a counter that moves while work advances."""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a worker's process runs; `born` tells it from a later process of the same id."""

    pid: int
    born: float
    node: str
    host: str
    address: str
    job: str
    """The process that started the worker, as Ray numbers them; the worker ends with it."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A result, and how long its making took in the worker."""

    result: object
    seconds: float


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as data: it may not unpickle where it is read, unless it is one of ours."""

    kind: str
    message: str
    trace: str
    error: RheostatError | None


class Host:
    """Host one worker, named by import string (`pkg.mod:Class`), in this process."""

    def __init__(self, *, asleep: bool = False) -> None:
        """Make a process without a worker; `asleep` it takes no work until `wake`."""
        self._worker: Hosted | None = None
        self._inputs: WorkInputs | None = None
        self._asleep = asleep
        add_target_folders()  # what is handed to it may be of users' classes

    def place(self) -> ProcessPlace:
        """Say where this process runs."""
        import ray

        process, context = psutil.Process(), ray.get_runtime_context()
        return ProcessPlace(
            pid=process.pid,
            born=process.create_time(),
            node=context.get_node_id(),
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            job=context.get_job_id(),
        )

    def construct(
        self, target: str, options: Mapping[str, object], variables: Mapping[str, str] = MappingProxyType({})
    ) -> Returned | Raised:
        """Construct the worker in the thread that will run its methods, unless another controller already has.

        The variables are what its controller finds stores by, which this process has from now on.
        """

        def load() -> None:
            if self._worker is None:
                _take_over(variables)
                module, _, attribute = target.partition(":")
                self._worker = getattr(importlib.import_module(module), attribute)(**options)
                self._inputs = inputs_of(options)

        return _answer(load)

    def run(self, method: str, arguments: tuple[object, ...]) -> Returned | Raised:
        """Run one method of the worker; what it raises is an answer too."""

        def work() -> object:
            if self._asleep:
                raise WorkerAsleep(f"the worker of pid {os.getpid()} fell asleep before {method} began")
            if self._inputs is not None:
                self._inputs.bring(arguments)
            return self._call(method, *arguments)

        return _answer(work)

    def wake(self, record: object) -> Returned | Raised:
        """Let the worker `take` a record, if there is one, and take work from now on."""

        def rouse() -> object:
            served = None if record is None else self._call("take", record)
            self._asleep = False
            return served

        return _answer(rouse)

    def sleep(self) -> Returned | Raised:
        """Take no more work, and let the worker give its memory back, if it has a `sleep()`."""

        def doze() -> object:
            self._asleep = True
            slept = self._call("sleep") if hasattr(self._worker, "sleep") else None
            return_freed_memory()
            return slept

        return _answer(doze)

    def asleep(self) -> bool:
        """Say whether it takes work."""
        return self._asleep

    def foresee(self, record: object) -> None:
        """Begin to bring what the record names, beside the work under way."""
        if self._inputs is not None:
            self._inputs.foresee(record)

    def live(self) -> None:
        """Wait for the end of the process."""
        threading.Event().wait()

    def _call(self, method: str, *arguments: object) -> object:
        assert self._worker is not None, "construct() comes first"
        return cast(Callable[..., object], getattr(self._worker, method))(*arguments)

    def progress(self) -> int:
        """Read the worker's counter."""
        return 0 if self._worker is None else self._worker.progress()

    def free_port(self) -> int:
        """Find a port that nobody listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def stop(self) -> None:
        """Let the worker close what it holds, if it has a `close()`."""
        if self._inputs is not None:
            self._inputs.close()
        close = getattr(self._worker, "close", None)
        if close is not None:
            close()


def _answer(body: Callable[[], object]) -> Returned | Raised:
    started = time.perf_counter()
    try:
        result = body()
    except Exception as error:  # it crosses a process boundary as data and is raised again on the other side
        ours = error if isinstance(error, RheostatError) else None
        return Raised(type(error).__name__, str(error), traceback.format_exc(), ours)
    return Returned(result, time.perf_counter() - started)


def thread_variables(threads: int, *, gpus: float, devices: Sequence[str]) -> dict[str, str]:
    """Return the environment of a worker: sums depend on the number of threads, and workers never go to the network.

    It sees the GPUs that Ray gives it, of which there are `gpus`, or else these `devices`, which Ray must not hide.
    """
    limits = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
    accelerator = {} if gpus else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if devices:
        accelerator = {"CUDA_VISIBLE_DEVICES": ",".join(devices), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    offline = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
    targets = {TARGETS: os.environ[TARGETS]} if TARGETS in os.environ else {}
    return {"TOKENIZERS_PARALLELISM": "false", **limits, **accelerator, **offline, **targets}


def store_variables() -> dict[str, str]:
    """What this process finds stores by, for workers on other machines: they are told in a call, which no log shows."""
    return {name: value for name, value in os.environ.items() if _OF_STORES.match(name)}


def _take_over(variables: Mapping[str, str]) -> None:
    """Find stores as a controller does, whose keys do not mix with others'; what is said of this machine stays."""
    if any(name.startswith(_AWS) for name in variables):
        for name in [name for name in os.environ if name.startswith(_AWS) and _OF_STORES.match(name)]:
            del os.environ[name]
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started meanwhile."""
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
