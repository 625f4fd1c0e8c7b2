"""Digests of users' files. They are computed in a child process, so that the files are not mapped into the memory of
this process.

`python -m rheostat.infra.store.file_digests` reads a JSON list of files (path, size, time) on stdin, and prints a JSON
list of digests. If it fails, it prints the problem in one line and exits with code 2.
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from blake3 import blake3

from rheostat.infra.errors import BadInput, WorkerFailed
from rheostat.infra.processes.watch import run_watched

COMMAND: Final = (sys.executable, "-P", "-m", __name__)
LABEL: Final = "the process that computes digests of data files"


@cache
def file_digests(files: tuple[tuple[Path, int, int], ...]) -> list[str]:
    """Return the BLAKE3 digest of each file. Files are given as (path, size in bytes, modification time in ns). Digests
    are cached until the size or time changes.

    Raises BadInput if a file cannot be read, and WorkerFailed if the child process fails.
    """
    if not files:
        return []
    code, answer, errors = run_watched(LABEL, COMMAND, json.dumps(files, default=str).encode())
    if code == 2:
        raise BadInput(errors.decode().strip())
    if code:
        raise WorkerFailed(f"{LABEL} failed with exit code {code}. Its last output is: {errors.decode()[-2000:]}")
    digests: list[str] = json.loads(answer)
    return digests


def _digest(path: str, size: int) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() if size else blake3().hexdigest()


def main(files: Sequence[tuple[str, int, int]]) -> int:
    try:
        sys.stdout.write(json.dumps([_digest(path, size) for path, size, _ in files]))
    except OSError as error:
        sys.stderr.write(f"{error.filename}: {error.strerror}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(json.load(sys.stdin)))
