"""Cost of processes and contents of their memory, read from /proc while they run."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import numpy as np

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
POLL_SECONDS = 0.2
SEARCH_SECONDS = 1.0
PIECE_BYTES = 16 * 2**20
PROCESS_ENDED_ERRORS = (
    FileNotFoundError,
    ProcessLookupError,
    PermissionError,
)  # a process that is ending raises PermissionError


@dataclass(slots=True)
class ProcessUsage:
    """Latest measured memory and CPU time of one process, and how often a marker was found in its memory."""

    pid: int
    kind: str
    peak_bytes: int = 0
    """Peak resident memory (VmHWM) of the process in bytes, including pages of mapped files."""
    cpu_seconds: float = 0.0
    """User plus system CPU time of the process in seconds."""
    searches: int = 0
    hits: int = 0
    """Number of searches of the process's memory that found the marker."""

    def update(self) -> None:
        """Read the peak memory and CPU time of the process from /proc.

        The last values are kept while a process ends.
        """
        status = Path(f"/proc/{self.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        if peak is not None:  # not present while a process ends
            self.peak_bytes = 1024 * int(peak[1])
            self.cpu_seconds = cpu_seconds(self.pid)

    def search(self, marker: bytes) -> None:
        """Search the memory of the process for the marker and count the result.

        Workers in which the marker was found are not searched again.
        """
        if self.kind == "worker" and self.hits:
            return
        holds_marker = memory_contains(self.pid, marker)
        self.searches += 1
        self.hits += holds_marker


def cpu_seconds(pid: int) -> float:
    """Return the user plus system CPU time in seconds that the process `pid` has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_contains(pid: int, marker: bytes) -> bool:
    """Return whether the memory of a process contains the marker.

    Only pages in physical memory are read, so that the search loads no pages.
    """
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start, end in _resident(pid):
            rest = b""
            for begin in range(start, end, PIECE_BYTES):
                memory.seek(begin)
                try:
                    piece = memory.read(min(PIECE_BYTES, end - begin))
                except OSError:  # released since the page map was read
                    break
                if marker in rest + piece:
                    return True
                rest = piece[-len(marker) :]
    return False


def _resident(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end addresses of the ranges of a process's memory that are in physical memory."""
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, permissions, *_ = line.split()
            if "r" not in permissions or "[v" in line:
                continue
            first, last = (int(address, 16) for address in span.split("-"))
            pagemap.seek(8 * (first // PAGE))
            flags = np.frombuffer(pagemap.read(8 * ((last - first) // PAGE)), np.uint64)
            present = np.concatenate(([0], (flags >> np.uint64(63)).astype(np.int8), [0]))
            edges = np.flatnonzero(np.diff(present))
            for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                yield first + begin * PAGE, first + end * PAGE


@contextmanager
def measure_processes(find: Callable[[], dict[int, str]], *, marker: bytes = b"") -> Iterator[dict[int, ProcessUsage]]:
    """Measure the memory and CPU time of processes in the background while the block runs.

    `find` returns the kinds of the processes by process ID, and is called repeatedly. If `marker` is given, the memory
    of the processes is searched for it. Yields the measurements by process ID, which are updated until the block ends.
    """
    watched: dict[int, ProcessUsage] = {}
    ended = Event()

    def each(act: Callable[[ProcessUsage], None]) -> None:
        for process in list(watched.values()):
            try:
                act(process)
            except PROCESS_ENDED_ERRORS:
                continue

    def look() -> None:
        while not ended.wait(POLL_SECONDS):
            for pid, kind in find().items():
                watched.setdefault(pid, ProcessUsage(pid, kind))
            each(ProcessUsage.update)

    def search() -> None:
        while not ended.wait(SEARCH_SECONDS):
            each(lambda process: process.search(marker))

    threads = [Thread(target=body, daemon=True) for body in ((look, search) if marker else (look,))]
    for thread in threads:
        thread.start()
    try:
        yield watched
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def files_with(directory: Path, marker: bytes) -> list[Path]:
    """Return all files in a directory and its subdirectories that contain the marker."""
    return [path for path in sorted(directory.rglob("*")) if path.is_file() and marker in path.read_bytes()]


def wait_for(path: Path, process_ended: Callable[[], bool]) -> None:
    """Wait until the file at `path` exists. Raises RuntimeError if `process_ended` returns true first."""
    while not path.exists():
        if process_ended():
            raise RuntimeError(f"the job ended before it wrote {path}")
        time.sleep(0.02)
