"""Environment with vLLM's build for CUDA, which tests use on machines without a GPU, and a substitute for the driver.

Tests are skipped if the environment is not installed. If `RHEOSTAT_REQUIRE_CUDA_BUILD` is set, they install it instead
(8 GB, in the folder of `RHEOSTAT_ENGINES`) and fail if that is not possible.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.environments.find import complete, default_directory
from infra.environments.gpus import TORCH_VARIABLE
from infra.environments.install import install

VARIABLE = "RHEOSTAT_REQUIRE_CUDA_BUILD"
ABSENT = (
    f"vLLM's build for CUDA is not installed here. Set {VARIABLE}=1 to install it (8 GB), or run "
    f"`{TORCH_VARIABLE}=cuda rheostat engine install vllm`"
)
LIBRARY = "libcuda.so.1"
FUNCTIONS = (
    "cuInit",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuGetErrorString",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
)
"""Functions of the CUDA driver to which vLLM's compiled modules are linked."""
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""
VERSION = 13000
"""Version that the driver reports: CUDA 13.0, in the encoding of `cuDriverGetVersion`."""


def require_cuda_build(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the Python of vLLM's environment for CUDA. Install the environment if `RHEOSTAT_REQUIRE_CUDA_BUILD` is
    set, otherwise skip the test if there is none."""
    found = complete(default_directory("vllm", "cuda"), "vllm", platform="cuda")
    if found is None and VARIABLE not in os.environ:
        pytest.skip(ABSENT)
    if found is None:
        monkeypatch.setenv(TORCH_VARIABLE, "cuda")
        found = install("vllm", platform="cuda")
    return found.python


def compile_driver(folder: Path) -> Path:
    """Compile a substitute for the driver's library into a folder, and return the folder. The library lets programs
    for CUDA start, and reports that the machine has no device."""
    folder.mkdir()
    source = folder / "libcuda.c"
    functions = [f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in FUNCTIONS]
    version = f"int cuDriverGetVersion(int *version) {{ *version = {VERSION}; return 0; }}"
    source.write_text("\n".join([*functions, version, ""]))
    gcc = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", folder / LIBRARY, source]
    subprocess.run(gcc, check=True)
    return folder


def run_json(words: Sequence[str | Path], query: object, variables: Mapping[str, str], *, seconds: float) -> Any:
    """Run a program that reads JSON from its standard input, and return the JSON on the last line of its output."""
    done = subprocess.run(
        words, input=json.dumps(query), env=variables, capture_output=True, text=True, timeout=seconds
    )
    sys.stderr.write(done.stderr[-8000:])  # shown if the test fails
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
