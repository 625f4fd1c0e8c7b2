"""Environment with vLLM's build for CUDA, for tests on machines without a GPU, and substitutes for CUDA's libraries.

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

from rheostat.infra.environments.find import complete, default_directory
from rheostat.infra.environments.gpus import TORCH_VARIABLE
from rheostat.infra.environments.install import install
from tests.support.jobs import SEARCH_PATH

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
DRIVER = """
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
"""
"""Functions that succeed: the version is CUDA 13.0, and no process uses the device."""
RUNTIME = """
#include <cuda_runtime_api.h>
#include <string.h>
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "NVIDIA H100 80GB HBM3");
    properties->totalGlobalMem = 85000000000;
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    return cudaSuccess;
}
"""
"""Functions of CUDA's runtime library that PyTorch calls for tensors without data, for a machine with one H100."""
TORCH = ("torch", "torchgen", "functorch", "triton", "nvidia", "torch-*.dist-info", "triton-*.dist-info")
"""PyTorch's build for CUDA and the libraries that it loads, in the folder of installed packages."""


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
    source.write_text("\n".join([*functions, DRIVER]))
    _compile(source, folder / LIBRARY, f"-Wl,-soname,{LIBRARY}")
    return folder


def fake_gpu_variables(python: Path, folder: Path) -> dict[str, str]:
    """Return the environment variables with which this Python imports PyTorch's build for CUDA from vLLM's environment,
    and all other packages from its own environment. PyTorch then finds one H100, for tensors without data."""
    [site] = (python.parent.parent / "lib").glob("python*/site-packages")
    if site.parent.name != f"python{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip(f"vLLM's environment for CUDA has {site.parent.name}, which is not the Python of the tests")
    packages = folder / "packages"
    packages.mkdir()
    for pattern in TORCH:
        for path in site.glob(pattern):
            (packages / path.name).symlink_to(path)
    source, library = folder / "runtime.c", folder / "runtime.so"
    source.write_text(RUNTIME)
    _compile(source, library, f"-I{site / 'nvidia/cu13/include'}")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(compile_driver(folder / "driver")),
        "LD_PRELOAD": str(library),
        "PYTHONPATH": f"{SEARCH_PATH}{os.pathsep}{packages}",
        "TORCHDYNAMO_DISABLE": "1",
    }


def _compile(source: Path, library: Path, *options: str) -> None:
    subprocess.run(["gcc", "-shared", "-fPIC", *options, "-o", library, source], check=True)


def run_json(words: Sequence[str | Path], query: object, variables: Mapping[str, str], *, seconds: float) -> Any:
    """Run a program that reads JSON from its standard input, and return the JSON on the last line of its output."""
    done = subprocess.run(
        words, input=json.dumps(query), env=variables, capture_output=True, text=True, timeout=seconds
    )
    sys.stderr.write(done.stderr[-8000:])  # shown if the test fails
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
