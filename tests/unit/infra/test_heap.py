"""Memory of workers with jemalloc."""

import os
import subprocess
import sys

import pytest

from rheostat.infra.processes.heap import heap_variables

PROGRAM = """
from pathlib import Path
from rheostat.infra.processes.heap import return_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

blocks = [b"x" * 2**16 for _ in range(1600)]
full = resident()
del blocks[:-1]
return_freed_memory()
print(full - resident())
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Ray has jemalloc on Linux only")


def test_a_process_with_jemalloc_returns_freed_memory():
    environment = os.environ | heap_variables()
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 99
    assert done.stderr == ""  # nothing is wrong with its settings


def test_another_preloaded_library_is_kept(monkeypatch):
    assert heap_variables().keys() == {"LD_PRELOAD"}
    monkeypatch.setenv("LD_PRELOAD", "another.so")
    assert heap_variables() == {}
