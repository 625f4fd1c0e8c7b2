"""The process that outlives a driver to end its embedded cluster.

Ray's own agents stay for more than a minute after their driver was killed, and children of a worker longer. The driver
holds this process's stdin open; when it closes, by `close()` or by SIGKILL, every process of the cluster is killed.
Run as a file, so it imports nothing of the house.
"""

import contextlib
import shutil
import sys
import time
from pathlib import Path

import psutil

MARK = "RHEOSTAT_CLUSTER"
"""Environment variable that the processes of an embedded cluster inherit; its value is the cluster's directory."""


def processes_of(directory: Path) -> list[psutil.Process]:
    """List the processes of a cluster: those that inherited its mark.

    Ray's agents overwrite their environment when they rename themselves; they are known by their logs. Drivers, which
    log there too, are not of the cluster.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            variables = process.environ()
            if variables.get(MARK) == str(directory) or (not variables and _writes_under(directory, process)):
                found.append(process)
    return found


def _writes_under(directory: Path, process: psutil.Process) -> bool:
    return any(Path(opened.path).is_relative_to(directory) for opened in process.open_files())


def reap(directory: Path, *, give_up_seconds: float = 30) -> None:
    """Kill the cluster's processes until none is left, then remove its directory."""
    deadline = time.monotonic() + give_up_seconds
    while (alive := processes_of(directory)) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(Path(sys.argv[1]))
