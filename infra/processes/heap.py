"""Memory allocator of workers: jemalloc, which is distributed with Ray, instead of malloc of the C library glibc.

torch requests memory blocks that are aligned to 64 bytes. glibc cuts such a block from a longer block. When the tensor
is freed, the gap is too short for another tensor of the same size. As a result, a process uses a third more memory than
its tensors need.
"""

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_PURGE_ALL: Final = b"arena.4096.purge"
"""Command that makes the memory allocator jemalloc return unused memory of all arenas to the system. 4096 is
`MALLCTL_ARENAS_ALL`."""


def heap_variables() -> dict[str, str]:
    """Return the environment variables that make a process use the memory allocator jemalloc. Return an empty dict if
    Ray, which contains jemalloc, is not installed, or if LD_PRELOAD is already set."""
    ray = find_spec("ray")
    if ray is None or ray.origin is None or os.environ.get("LD_PRELOAD"):
        return {}
    library = Path(ray.origin).parent / "core" / "libjemalloc.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


def return_freed_memory() -> None:
    """Return freed memory to the operating system immediately. Does nothing unless this process uses the memory
    allocator jemalloc."""
    if mallctl := getattr(ctypes.CDLL(None), "mallctl", None):
        mallctl(_PURGE_ALL, None, None, None, ctypes.c_size_t(0))
