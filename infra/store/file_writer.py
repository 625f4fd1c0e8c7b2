"""Files that are hashed while they are written. Producing, writing and hashing the content run at the same time, and
several files are written at once.

The caller's thread produces the pieces of a file, for example by copying tensors from a GPU. Two threads per file write
and hash the pieces in order. BLAKE3 additionally divides large pieces among a few threads. The digest is computed from
the pieces, so the file is never read.
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final

from blake3 import blake3

from rheostat.infra.store.bundles import BundledFile

Piece = bytes | memoryview
"""Part of a file's content. Its bytes must not change until the file is complete."""

FILES_AT_ONCE: Final = 4
"""Maximum number of files that are written at the same time. One thread fills the page cache with about 2 GB/s, which
is slower than hashing or copying from a GPU."""
PIECES_IN_FLIGHT: Final = 4
"""Maximum number of pieces per file that are produced but not yet written and hashed."""
HASH_THREADS: Final = 8
"""Maximum number of threads among which BLAKE3 divides a piece. Each thread hashes several GB/s."""


def write_files(
    files: Mapping[Path, Iterable[Piece]],
    *,
    skipped: Collection[Path] = (),
    at_once: int = FILES_AT_ONCE,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[Path, BundledFile]:
    """Write files with these contents, and return the digest and size of each file, by path. Up to `at_once` files are
    written at the same time. `on_progress` is called after each piece.

    The pieces of the files `skipped` are produced but not written, because another process writes these files. All
    pieces are produced in the calling thread, in an order that depends only on the numbers of pieces. At most
    `PIECES_IN_FLIGHT` pieces of a file are kept in memory.
    """
    waiting, active = deque(files.items()), deque[tuple[Path, _HashedContent | _SkippedContent]]()
    written: dict[Path, BundledFile] = {}
    with ExitStack() as open_files:
        while waiting or active:
            if waiting and len(active) < at_once:
                path, pieces = waiting.popleft()
                if path in skipped:
                    active.append((path, _SkippedContent(pieces)))
                else:
                    active.append((path, open_files.enter_context(_HashedContent(pieces, path=path))))
                continue
            path, file = active.popleft()
            if file.advance():
                active.append((path, file))
                on_progress()
            elif (described := file.finish()) is not None:
                written[path] = described
    return {path: written[path] for path in files if path in written}


def write_hashed(path: Path, pieces: Iterable[Piece]) -> BundledFile:
    """Write the pieces to a file, and return its digest and size, which are computed while writing."""
    return write_files({path: pieces})[path]


def write_pieces(path: Path, pieces: Iterable[Piece]) -> None:
    """Write the pieces to a file whose digest is already known."""
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            _write(file, piece)


def describe_pieces(pieces: Iterable[Piece]) -> BundledFile:
    """Return the digest and size of the file whose content is these pieces, in order. Each piece is hashed while the
    next one is produced."""
    with _HashedContent(pieces) as content:
        while content.advance():
            pass
        return content.finish()


class _SkippedContent:
    """Content of a file that another process writes. The pieces are only produced."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = iter(pieces)

    def advance(self) -> bool:
        """Produce the next piece. Return False if there is no further piece."""
        return next(self._pieces, None) is not None

    def finish(self) -> None:
        """Return None, because no file was written."""


class _HashedContent:
    """Content of a file that is hashed and, if `path` is not None, written. Each of the two has its own thread."""

    def __init__(self, pieces: Iterable[Piece], *, path: Path | None = None) -> None:
        self._pieces = iter(pieces)
        # With blake3.AUTO, the threads would belong to the process, and a process forked later would wait for them.
        self._hasher = blake3(max_threads=min(HASH_THREADS, len(os.sched_getaffinity(0))))
        self._size = 0
        self._in_flight: deque[Sequence[Future[object]]] = deque()
        self._resources = ExitStack()
        self._steps = [self._run_in_thread(self._hasher.update, "hash")]
        if path is not None:
            file = self._resources.enter_context(path.open("wb", buffering=0))
            self._steps.append(self._run_in_thread(partial(_write, file), "write"))

    def __enter__(self) -> "_HashedContent":
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def advance(self) -> bool:
        """Produce the next piece and pass it to the threads. Return False if there is no further piece. Waits for the
        oldest piece if `PIECES_IN_FLIGHT` pieces are in memory. Raises the errors of the threads."""
        if len(self._in_flight) == PIECES_IN_FLIGHT:
            self._finish_oldest()
        piece = next(self._pieces, None)
        if piece is None:
            return False
        self._size += len(piece)
        self._in_flight.append([step(piece) for step in self._steps])
        return True

    def finish(self) -> BundledFile:
        """Wait until all pieces are processed, and return the digest and size of the content."""
        while self._in_flight:
            self._finish_oldest()
        self._resources.close()
        return BundledFile(digest=self._hasher.hexdigest(), bytes=self._size)

    def _run_in_thread(self, step: Callable[[Piece], object], name: str) -> Callable[[Piece], Future[object]]:
        """Return a function that runs `step` for a piece in a separate thread, after the pieces before it."""
        thread = self._resources.enter_context(ThreadPoolExecutor(1, thread_name_prefix=name))
        return lambda piece: thread.submit(step, piece)

    def _finish_oldest(self) -> None:
        for step in self._in_flight.popleft():
            step.result()


def _write(file: FileIO, piece: Piece) -> None:
    remaining = memoryview(piece)
    while remaining:
        remaining = remaining[file.write(remaining) :]
