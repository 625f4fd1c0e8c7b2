"""A file of lines beside a run's objects: the one thing in a store that changes, since it can be made again.

No digest, copy or verification knows it. It grows by whole lines, under a lock that its writers take in turns.
"""

import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from infra.errors import StoreFailed
from infra.store.storage import Store

TAIL_BYTES: Final = 1 << 16
"""Longer than any line."""


def replace_lines(store: Store, key: str, lines: Iterable[str]) -> None:
    """Write the file anew."""
    content = "".join(f"{line}\n" for line in lines).encode()
    if store.is_remote:
        store.delete(key)
        store.put(key, content)
        return
    _write(store, key, lambda _: (0, content))


def extend_lines(store: Store, key: str, more: Callable[[str], Iterable[str] | None]) -> bool:
    """Append what follows the last line, or an empty one where there is none; False, with nothing written, where that
    is none from which anything follows. For a store of files."""
    grown = True

    def added(tail: bytes) -> tuple[int | None, bytes]:
        nonlocal grown
        whole = tail.rsplit(b"\n", 2)
        is_torn = bool(tail) and not tail.endswith(b"\n")
        lines = None if is_torn else more(whole[-2].decode(errors="replace") if tail else "")
        grown = lines is not None
        return None, "".join(f"{line}\n" for line in lines or ()).encode()

    _write(store, key, added)
    return grown


def _write(store: Store, key: str, change: Callable[[bytes], tuple[int | None, bytes]]) -> None:
    """Cut the file to a size, or leave it, and append to it, as the end of it says."""
    path = Path(url2pathname(urlsplit(store.uri).path)) / key
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            begin = max(0, size - TAIL_BYTES)
            cut, content = change(os.pread(descriptor, size - begin, begin))
            if cut is not None:
                os.ftruncate(descriptor, cut)
            while content:
                content = content[os.write(descriptor, content) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreFailed(f"store {store.uri}: cannot write {key!r}: {error}") from error
