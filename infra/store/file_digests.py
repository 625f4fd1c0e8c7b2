"""Digests of users' files, computed in a child process so that the calling process maps no data into its memory.

`python -m infra.store.file_digests` reads paths as a JSON list on stdin and prints a JSON list of their digests. On
failure it prints one line about the problem and exits with code 2.
"""

import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from blake3 import blake3

from infra.errors import BadInput, WorkerFailed
from infra.processes.watch import run_watched

COMMAND: Final = (sys.executable, "-P", "-m", __name__)
LABEL: Final = "the process that computes digests of data files"


@cache
def file_digests(files: tuple[tuple[Path, int, int], ...]) -> list[str]:
    """Return the BLAKE3 digest of each file, given as (path, size in bytes, modification time in ns).

    Results are cached for the same list of files, sizes and times.

    Raises BadInput if a file cannot be read, and WorkerFailed if the child process fails.
    """
    if not files:
        return []
    code, answer, errors = run_watched(LABEL, COMMAND, json.dumps(files, default=str).encode())
    if code == 2:
        raise BadInput(errors.decode().strip())
    if code:
        raise WorkerFailed(f"{LABEL} ended with exit code {code}: {errors.decode()[-2000:]}")
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
