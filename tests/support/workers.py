"""Small real workers that pools host in tests."""

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from rheostat.infra.errors import Damaged
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.infra.store.storage import open_store
from tests.support.jobs import wait_for


class Reading:
    """Worker that reads shards of a run, and can wait until another file exists."""

    def __init__(self, store_uri: str, run: str) -> None:
        self._store = open_store(f"{store_uri}/{run}")

    def progress(self) -> int:
        return 0

    def read(self, work: tuple[ShardRef, Path | None]) -> bool:
        """Return whether the other file appeared while this shard was processed."""
        ref, other = work
        assert read_shard(self._store, ref).num_rows == ref.rows
        return other is not None and wait_for(other.exists, seconds=20)


class ReleasingMemory:
    """Worker that counts how often it was told to release unused memory."""

    def __init__(self) -> None:
        self.releases = 0

    def progress(self) -> int:
        return 0

    def release_unused_memory(self) -> None:
        self.releases += 1

    def count_releases(self, fails: bool) -> int:
        if fails:
            raise Damaged("shard 7 is torn")
        return self.releases


class Counting:
    """Worker that counts its pieces of work. Some of them never end."""

    def __init__(self, start: int = 0) -> None:
        self.done = start
        self.ticks = 0
        self.child: subprocess.Popen[bytes] | None = None

    def progress(self) -> int:
        return self.ticks

    def echo(self, work: object) -> object:
        self.done += 1
        return work

    def total(self, work: object) -> int:
        return self.done

    def pid(self, work: float) -> int:
        time.sleep(work)
        return os.getpid()

    def hold(self, work: tuple[Path, Path]) -> int:
        """Create the first file, wait until the second one exists, and return the id of this process."""
        began, released = work
        began.touch()
        while not released.exists():
            self.ticks += 1
            time.sleep(0.01)
        return os.getpid()

    def environment(self, work: tuple[str, ...]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in work}

    def draw(self, work: float) -> tuple[float, float, float]:
        import torch

        time.sleep(work)
        return random.random(), float(np.random.random()), torch.rand(()).item()

    def facts(self, work: object) -> dict[str, object]:
        """Return properties in which a fork could differ from a started process."""
        import torch

        values = torch.linspace(0, 1, 300 * 300).reshape(300, 300)
        return {
            "variables": dict(os.environ),
            "path": sys.path,
            "flags": list(sys.flags),
            "program": (sys.argv[0], len(sys.argv), sys.modules["__main__"].__file__),
            "directory": str(Path.cwd()),
            "niceness": os.nice(0),
            "badness": Path("/proc/self/oom_score_adj").read_text(),
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "handled": [str(signal.getsignal(number)) for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE)],
            "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
            "sums": (values @ values).sum().item().hex(),
            "arrow": pa.default_memory_pool().backend_name,
            "limits": [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_STACK)],
        }

    def where(self, work: object) -> tuple[str, list[str]]:
        return str(Path.cwd()), sys.path

    def raise_value_error(self, work: object) -> None:
        raise ValueError(f"cannot digest {work}")

    def raise_damaged(self, work: object) -> None:
        raise Damaged(f"shard {work} is torn")

    def die(self, work: object) -> None:
        os.kill(os.getpid(), 9)

    def die_once(self, marker: Path) -> int:
        """Die unless another worker has died before, as `marker` records."""
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), 9)
        return os.getpid()

    def hang_once(self, marker: Path) -> int:
        """Loop forever without progress unless another worker has before."""
        if not marker.exists():
            marker.write_text(str(os.getpid()))
            while True:
                time.sleep(0.01)
        return os.getpid()

    def slow_but_steady(self, seconds: float) -> int:
        """Count during the work, but hold the interpreter lock for long stretches."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.ticks += 1
            sum(range(5_000_000))  # one C call: nobody else in this process runs meanwhile
        return self.ticks

    def spawn(self, work: object) -> int:
        self.child = subprocess.Popen(["sleep", "600"])
        return self.child.pid

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()

    def child_ends(self, command):
        """Return the exit code of a child process, which is lost if SIGCHLD is ignored."""
        return subprocess.run(command, check=False).returncode


class Unbuildable:
    """Worker that cannot be constructed."""

    def __init__(self, path: str) -> None:
        raise FileNotFoundError(f"no weights at {path}")

    def progress(self) -> int:
        return 0


class Sleepy:
    """Worker whose construction takes too long."""

    def __init__(self) -> None:
        time.sleep(60)

    def progress(self) -> int:
        return 0


class Ring:
    """Rank of a ring: rank 0 waits on a socket for all others, as a collective would."""

    def __init__(self) -> None:
        self.rank = -1
        self.world = 0
        self.address = ("", 0)
        self.joins = 0
        self.steps = 0

    def progress(self) -> int:
        return self.steps

    def join(self, rank: int, world_size: int, master_address: str, master_port: int) -> None:
        self.rank, self.world, self.address = rank, world_size, (master_address, master_port)
        if rank == 0:
            self.server = socket.create_server(self.address)

    def meet(self, marker: Path) -> tuple[int, int]:
        """Gather one byte from every rank. Rank 1 dies first unless `marker` shows that it has died before."""
        if self.rank == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), 9)
        return self._gather()

    def fail_on_one(self, work: object) -> tuple[int, int]:
        if self.rank == 1:
            raise ValueError("loss is not finite")
        return self._gather()

    def hang_on_one(self, marker: Path) -> tuple[int, int]:
        if self.rank == 1 and not marker.exists():
            marker.touch()
            time.sleep(600)
        return self._gather()

    def wait_for_one(self, marker: Path) -> tuple[int, int]:
        """Let rank 0 make progress for four seconds, while the other ranks wait for it without progress."""
        while self.rank == 0 and self.steps < 40:
            self.steps += 1
            time.sleep(0.1)
        if self.rank == 0:
            marker.touch()
        while not marker.exists():
            time.sleep(0.05)
        return self._gather()

    def _gather(self) -> tuple[int, int]:
        if self.rank == 0:
            for _ in range(self.world - 1):
                connection, _ = self.server.accept()
                connection.recv(1)
                connection.close()
        else:
            with socket.create_connection(self.address) as connection:
                connection.send(b"x")
        return self.rank, self.address[1]
