"""Small real workers that share the slots of a fleet in tests, and write to disk what they do.

`awake/ROLE-PID` exists from the moment that a worker takes the memory of its slot until the worker has given it back or
is dead. The file contains the start time of the process, since the kernel uses the pid of a dead process again.
`reached-ROLE-MOMENT` exists while a worker waits at a moment.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Served:
    """Memory of a worker."""

    version: str


def holds_memory(memory: Path) -> bool:
    """Return whether the worker that wrote a file `awake/ROLE-PID` is alive and holds the memory of its slot."""
    try:
        process, started = psutil.Process(int(memory.name.rpartition("-")[2])), memory.read_text()
        is_same = started in ("", str(process.create_time()))  # empty while it is written
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False


class Turning:
    """Worker that sleeps, wakes and works, and that files make die or fail at a moment."""

    def __init__(self, role: str, home: Path) -> None:
        self.role = role
        self.home = home
        self.ticks = 0
        self.version = ""
        self.memory = home / "awake" / f"{role}-{os.getpid()}"
        if (home / f"unbuildable-{role}").exists():
            raise FileNotFoundError(f"no weights for {role}")

    def progress(self) -> int:
        return self.ticks

    def take(self, record: Served) -> str:
        self.memory.write_text(str(psutil.Process().create_time()))
        self._meet("take")
        self.version = record.version
        return record.version

    def sleep(self) -> None:
        self._meet("sleep")
        self.version = ""
        self.memory.unlink(missing_ok=True)

    def work(self, work: tuple[str, float]) -> tuple[int, str]:
        """Work for this number of seconds, and write that this piece is done."""
        name, seconds = work
        self._meet("work")
        (self.home / f"begun-{name}").touch()
        time.sleep(seconds)
        with (self.home / "done").open("a") as done:
            done.write(f"{self.role} {name} {os.getpid()}\n")
        return os.getpid(), self.version

    def _meet(self, moment: str) -> None:
        """Obey the file for a moment: `die` by SIGKILL or `fail` once, or `wait` until the file is deleted."""
        for trouble in ("die", "fail", "wait"):
            told = self.home / f"{trouble}-{self.role}-{moment}"
            while told.exists():
                if trouble == "wait":
                    reached = self.home / f"reached-{self.role}-{moment}"
                    reached.touch()
                    while told.exists():
                        time.sleep(0.01)
                    reached.unlink(missing_ok=True)
                    continue
                told.unlink()
                if trouble == "die":
                    os.kill(os.getpid(), 9)
                raise ValueError(f"{self.role} cannot {moment}")


class Doomed(Turning):
    """Worker that dies whenever it loads."""

    def take(self, record: Served) -> str:
        os.kill(os.getpid(), 9)
        return super().take(record)


class Untrue(Turning):
    """Worker that does not report which version it serves."""

    def take(self, record: Served) -> str:
        super().take(record)
        return None  # type: ignore[return-value]
