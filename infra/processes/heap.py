"""Memory allocator of workers: jemalloc, which is part of Ray, instead of glibc's malloc.

torch requests memory blocks that are aligned to 64 bytes. glibc cuts such a block from a longer block, so the gap that
a freed tensor leaves is too short for another tensor of the same size. As a result, a process uses a third more memory
than its tensors need.
"""

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_PURGE_ALL: Final = b"arena.4096.purge"
"""jemalloc command that purges all arenas. 4096 is `MALLCTL_ARENAS_ALL`."""


def heap_variables() -> dict[str, str]:
    """Return the environment variables that make a process use jemalloc. Empty without Ray or if LD_PRELOAD is set."""
    ray = find_spec("ray")
    if ray is None or ray.origin is None or os.environ.get("LD_PRELOAD"):
        return {}
    library = Path(ray.origin).parent / "core" / "libjemalloc.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


def return_freed_memory() -> None:
    """Return freed memory to the system immediately if this process uses jemalloc."""
    if mallctl := getattr(ctypes.CDLL(None), "mallctl", None):
        mallctl(_PURGE_ALL, None, None, None, ctypes.c_size_t(0))
