"""Text file in the directory of a run, to which lines are appended.

This is the only file of a run that changes. It is not covered by digests, copies and verification, because its content
can be computed again. Writers lock the file and append only complete lines.
"""

import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from rheostat.infra.errors import StoreFailed
from rheostat.infra.store.contracts import Store

TAIL_BYTES: Final = 1 << 16
"""Number of bytes that are read from the end of a file to find its last line. Every line is shorter than this."""


def replace_lines(store: Store, key: str, lines: Iterable[str]) -> None:
    """Replace the whole content of the file `key` by these lines."""
    content = "".join(f"{line}\n" for line in lines).encode()
    if not store.traits.can_append:
        store.delete(key)
        store.put(key, content)
        return
    _write(store, key, lambda _: (0, content))


def extend_lines(store: Store, key: str, more: Callable[[str], Iterable[str] | None]) -> bool:
    """Append lines to the file `key` of a local store. `more` is called with the last line of the file (or "" if it is
    empty), and returns the lines to append. Return False and write nothing if `more` returns None or the last line is
    incomplete."""
    grown = True

    def added(tail: bytes) -> tuple[int | None, bytes]:
        nonlocal grown
        parts = tail.rsplit(b"\n", 2)
        is_torn = bool(tail) and not tail.endswith(b"\n")
        lines = None if is_torn else more(parts[-2].decode(errors="replace") if tail else "")
        grown = lines is not None
        return None, "".join(f"{line}\n" for line in lines or ()).encode()

    _write(store, key, added)
    return grown


def _write(store: Store, key: str, change: Callable[[bytes], tuple[int | None, bytes]]) -> None:
    """Lock the file `key` and change its end. `change` is called with the last bytes of the file, and returns (size to
    which the file is cut or None, bytes to append).

    Raises StoreFailed if the file cannot be written.
    """
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
