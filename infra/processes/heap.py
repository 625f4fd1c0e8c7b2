"""What workers' memory is taken from: jemalloc, which comes with Ray, in place of glibc's malloc.

torch asks for blocks at multiples of 64 bytes. glibc looks for a longer one to cut such a block from, so the gap that a
tensor leaves is too short for the next one of its size, and a process holds a third more than its tensors.
"""

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

_PURGE_ALL: Final = b"arena.4096.purge"
"""4096 stands for all arenas (`MALLCTL_ARENAS_ALL`)."""


def heap_variables() -> dict[str, str]:
    """Return the variables with which a process starts on jemalloc; none without Ray's, or where one is chosen."""
    ray = find_spec("ray")
    if ray is None or ray.origin is None or os.environ.get("LD_PRELOAD"):
        return {}
    library = Path(ray.origin).parent / "core" / "libjemalloc.so"
    return {"LD_PRELOAD": str(library)} if library.exists() else {}


def return_freed_memory() -> None:
    """Give the system at once what this process has freed, if it runs on jemalloc."""
    if mallctl := getattr(ctypes.CDLL(None), "mallctl", None):
        mallctl(_PURGE_ALL, None, None, None, ctypes.c_size_t(0))
