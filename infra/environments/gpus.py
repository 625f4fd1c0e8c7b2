"""NVIDIA driver and GPUs of this machine, and the choice between PyTorch's builds for CPUs and for CUDA.

infra/environments/install.sh runs this module before any package is installed, so the module and its imports need only
the standard library.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal

from rheostat.infra.errors import BadInput
from rheostat.infra.untrusted_text import make_visible

Platform = Literal["cpu", "cuda"]

TORCH_VARIABLE: Final = "RHEOSTAT_TORCH"
"""Environment variable that chooses PyTorch's build, "cpu" or "cuda". If it is not set, the driver decides."""

TORCH_CUDA: Final = "13.0"
"""CUDA version of the pinned PyTorch (install.sh and vllm-cuda.txt): the wheels of torch 2.13.0 for Linux on PyPI."""

MIN_DRIVERS: Final[Mapping[str, int]] = {"11": 450, "12": 525, "13": 580}
"""Oldest branch of the NVIDIA driver for Linux on which programs of a major CUDA version run, from the table "CUDA
Minor Version Compatibility" in NVIDIA's CUDA Toolkit release notes. On an older driver PyTorch imports, but finds no
GPU."""

DRIVER: Final = Path("/proc/driver/nvidia/version")
NVML: Final = "libnvidia-ml.so.1"
"""Library of the driver with which nvidia-smi and Ray count GPUs."""
QUERY_SECONDS: Final = 60.0
"""Maximum time in seconds for nvidia-smi to respond."""


def platform_here() -> Platform:
    """Return the platform for which packages are installed and engines are searched on this machine: the value of
    RHEOSTAT_TORCH, or "cuda" if this machine has an NVIDIA driver, otherwise "cpu".

    Raises BadInput if the variable has another value.
    """
    chosen = os.environ.get(TORCH_VARIABLE, "")
    if chosen not in ("", "cpu", "cuda"):
        raise BadInput(
            f"the environment variable {TORCH_VARIABLE} is {chosen!r}, but it must be 'cpu' or 'cuda'. Unset it to "
            "install the build for CUDA only on machines with an NVIDIA driver."
        )
    return "cuda" if chosen == "cuda" or (not chosen and has_driver()) else "cpu"


def has_driver() -> bool:
    """Return whether this machine has an NVIDIA driver. A container shows the driver of its host."""
    # If the driver has no file, as under WSL, its command shows whether a driver exists.
    return DRIVER.exists() or _query_gpus("-L") is not None


def read_driver_version() -> str | None:
    """Return the version of the NVIDIA driver, such as "580.65.06", or None if it is unknown or there is no driver."""
    try:
        text = DRIVER.read_text(errors="replace")
    except OSError:
        text = _query_gpus("--query-gpu=driver_version", "--format=csv,noheader") or ""
    found = re.search(r"(?<![\w.])\d{3,}(?:\.\d+)+(?![\w.])", text)
    return found[0] if found else None


def describe_old_driver(cuda: str) -> str | None:
    """Return a sentence part which says that the driver of this machine is too old for programs of a CUDA version, such
    as "13.0". Return None if the driver is new enough, or if its version or that of CUDA is unknown."""
    version, oldest = read_driver_version(), MIN_DRIVERS.get(cuda.partition(".")[0])
    if version is None or oldest is None or int(version.partition(".")[0]) >= oldest:
        return None
    return f"the NVIDIA driver {version} of this machine is too old for CUDA {cuda}, which needs {oldest} or newer"


def check_driver(cuda: str) -> None:
    """Raise BadInput if the driver of this machine is too old for programs of a CUDA version, unless the user has set
    RHEOSTAT_TORCH to "cuda"."""
    fault = describe_old_driver(cuda)
    if fault is not None and os.environ.get(TORCH_VARIABLE) != "cuda":
        raise BadInput(
            f"{fault}. Update the driver, or set {TORCH_VARIABLE}=cpu to use the build for CPUs. Set "
            f"{TORCH_VARIABLE}=cuda to skip this check, for example for an image that runs on other machines, or with "
            "NVIDIA's package cuda-compat."
        )


def visible_devices() -> tuple[str, ...] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES gives to this process, or None if the variable is not set.

    The GPUs are indices, or UUIDs that begin with "GPU-" or "MIG-". CUDA ignores the first entry that cannot be a GPU
    and all entries after it: -1, an empty entry, and NoDevFiles, which Slurm sets for jobs without GPUs.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return None
    entries = [entry.strip() for entry in variable.split(",")]
    return tuple(takewhile(lambda entry: entry and not entry.startswith("-") and entry != "NoDevFiles", entries))


def num_gpus() -> int:
    """Return the number of GPUs of this machine. GPUs that `CUDA_VISIBLE_DEVICES` hides are not counted.

    If nvidia-smi is not installed, as in some containers, the driver's library NVML counts the GPUs, as in Ray. The
    instances of a GPU that is divided by MIG count as one GPU.
    """
    listed = _query_gpus("-L")
    count = _count_by_nvml() if listed is None else sum(line.startswith("GPU ") for line in listed.splitlines())
    visible = visible_devices()
    return count if visible is None else min(count, len(visible))


def gpu_memory() -> int | None:
    """Return the memory in bytes of the GPU with the least memory, or None if nvidia-smi lists no GPU."""
    lines = (_query_gpus("--query-gpu=memory.total", "--format=csv,noheader,nounits") or "").split()
    return min((int(line) << 20 for line in lines if line.isdecimal()), default=None)


def _count_by_nvml() -> int:
    """Return the number of GPUs that NVML finds, or 0 if the library is not installed or finds no driver."""
    try:
        library = ctypes.CDLL(NVML)
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    is_counted = library.nvmlInit_v2() == 0 and library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    return count.value if is_counted else 0


def _query_gpus(*options: str) -> str | None:
    """Return the output of nvidia-smi with these options, or None if the command is not installed, fails or does not
    respond."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        done = subprocess.run([command, *options], capture_output=True, text=True, check=False, timeout=QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def main() -> int:
    """Write the platform for which install.sh installs PyTorch, or the reason why it cannot."""
    try:
        platform = platform_here()
        if platform == "cuda":
            check_driver(TORCH_CUDA)
    except BadInput as error:
        sys.stderr.write(make_visible(f"rheostat: {error}\n"))
        return error.exit_code
    sys.stdout.write(make_visible(f"{platform}\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
