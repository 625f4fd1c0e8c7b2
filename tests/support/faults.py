"""The job with planted faults: `python -m tests.support.faults train CONFIG …`, in the directory RHEOSTAT_FAULTS.

`faults.json` there lists the `Fault`s of tests/support/jobs.py. The process that a fault names sends itself the signal
at the moment of the fault. The file `struck-N` then records that fault N happened, and the fault does not happen again.
`log` gets a line for every piece of work that a worker begins and for every file that the driver writes.
"""

import dataclasses
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

import rheostat.infra.store.local
from rheostat.infra.pools.worker import PoolSpec
from rheostat.infra.store.disk import open_temporary, publish_file
from tests.support.jobs import GO_ON, KILL_DRIVER, KILL_SERVER, LOSE_MACHINE, PAUSE, RAISE, Fault, servers_of
from tests.support.machines import lose_machine

POLL_SECONDS = 0.0005
PAUSE_SECONDS = 3600
WORKS = (
    "make_policy",
    "make_prompts",
    "make_reward_model",
    "make_critic",
    "warmup",
    "warm_judge",
    "warm_user",
    "generate",
    "judge",
    "score",
    "estimate",
    "credit",
    "update",
)


class Planted:
    """Faults of one process, and the log of the moments that it reaches."""

    driver: ClassVar["Planted | None"] = None
    """Driver process. Its writes include those of workers that are its threads."""

    def __init__(self, role: str) -> None:
        self.role = role
        if role == "driver":
            Planted.driver = self
        self._home = Path(os.environ["RHEOSTAT_FAULTS"])
        if role == "driver":
            (self._home / "driver").write_text(str(os.getpid()))
        self._faults = [Fault(**fault) for fault in json.loads((self._home / "faults.json").read_text())]
        self._seen: Counter[int] = Counter()
        if self._faults or role == "driver":
            rheostat.infra.store.local.publish_file = self._publish

    def log(self, line: str) -> None:
        with (self._home / "log").open("a") as log:
            log.write(f"{line}\n")

    def plans(self, moment: str, what: str) -> bool:
        """Return whether a fault is planted at this kind of moment."""
        return any(self._is_at(fault, moment, what) for fault in self._faults)

    def reach(self, moment: str, what: str, *, first: Callable[[], None] = lambda: None) -> None:
        """Record that the process is at a moment. A fault at this moment calls `first` before it happens."""
        for index, fault in enumerate(self._faults):
            if self._is_at(fault, moment, what):
                self._seen[index] += 1
                if self._seen[index] == fault.count and self._claim(index):
                    first()
                    if fault.signal == RAISE:
                        raise RuntimeError(f"planted fault at {what.partition('(')[0]}")
                    if fault.signal in (GO_ON, PAUSE):
                        time.sleep(PAUSE_SECONDS if fault.signal == PAUSE else 0)
                        return
                    if fault.signal == KILL_SERVER:
                        for process in servers_of(self._home):
                            process.kill()
                        return
                    if fault.signal == KILL_DRIVER:
                        os.kill(int((self._home / "driver").read_text()), signal.SIGKILL)
                        time.sleep(PAUSE_SECONDS)  # the guard of the cluster ends this process
                    if fault.signal == LOSE_MACHINE:
                        lose_machine(os.getppid())
                    os.kill(os.getpid(), fault.signal)
                    time.sleep(0.05)  # a stop takes hold of a thread that is running a little later

    def _is_at(self, fault: Fault, moment: str, what: str) -> bool:
        return fault.role == self.role and fault.moment == moment and re.search(fault.at, what) is not None

    def _publish(self, path: Path, data: bytes | Path, *, root: Path, durable: bool = True) -> bool:
        what = path.as_posix()
        self.reach("before", what)
        self.reach("during", what, first=lambda: _write_half(root, data))
        publish = publish_file if self.driver in (None, self) else self.driver._publish
        won = publish(path, data, root=root, durable=durable)
        if self.role == "driver" and won:
            self.log(f"put {what}")
        self.reach("after", what)
        return won

    def _claim(self, index: int) -> bool:
        """Claim this fault. Only the first process that claims it succeeds."""
        try:
            (self._home / f"struck-{index}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _write_half(directory: Path, data: bytes | Path) -> None:
    whole = data if isinstance(data, bytes) else data.read_bytes()
    descriptor, _ = open_temporary(directory)
    os.write(descriptor, whole[: len(whole) // 2])


class Faulty:
    """Worker of the product with faults planted in its process."""

    def __init__(self, role: str, target: str, options: dict[str, object]) -> None:
        self._planted = Planted(role)
        self._planted.reach("start", role)
        module, _, name = target.partition(":")
        self._worker = getattr(importlib.import_module(module), name)(**options)

    def progress(self) -> int:
        return self._worker.progress()

    def join(self, rank: int, world_size: int, master_address: str, master_port: int) -> None:
        self._planted.role = f"update-{rank}"
        self._worker.join(rank, world_size, master_address, master_port)

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._worker, name)
        if name not in WORKS and not self._planted.plans("begin", name):
            return method

        def perform(work: object) -> object:
            what = f"{name} {work}"
            if name in WORKS:
                self._planted.log(what)
            self._planted.reach("begin", what)
            with self._watched(what):
                return method(work)

        return perform

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Reach `progress` for every step that the worker's counter takes during the work.

        Steps that the watching thread has not seen when the work ends are reached before the result is returned.
        """
        if not self._planted.plans("progress", what):
            yield
            return
        ended, before = threading.Event(), self.progress()

        def look() -> None:
            nonlocal before
            for _ in range(before, before := self.progress()):
                self._planted.reach("progress", what)

        def watch() -> None:
            while not ended.wait(POLL_SECONDS):
                look()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
            ended.set()
            watcher.join()
            look()
        finally:
            ended.set()
            watcher.join()


def plant(spec: PoolSpec) -> PoolSpec:
    """Make a pool host the worker with its faults."""
    options = {"role": spec.role, "target": spec.target, "options": spec.options}
    return dataclasses.replace(spec, target="tests.support.faults:Faulty", options=options)


@contextmanager
def planted(home: Path) -> Iterator[None]:
    """Make every pool that this process opens host its workers with the faults of a directory."""
    from rheostat.tasks.run import worker_pools

    make_spec = worker_pools._build_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RHEOSTAT_FAULTS", str(home))
        now = rheostat.infra.store.local.publish_file
        patch.setattr(rheostat.infra.store.local, "publish_file", now)  # workers that are threads replace it here
        patch.setattr(worker_pools, "_build_spec", lambda *args, **options: plant(make_spec(*args, **options)))
        yield


if __name__ == "__main__":
    from rheostat.flows.cli.app import main

    # Not the one of `__main__`: workers import this module by its name.
    faults = importlib.import_module("tests.support.faults")
    with faults.planted(Path(os.environ["RHEOSTAT_FAULTS"])):
        faults.Planted("driver")
        sys.exit(main(sys.argv[1:]))
