"""Peak speed of this machine's accelerator, measured by `python -m bench.device DTYPE THREADS` and written as JSON.

It runs in a separate process, so that no memory of the device stays allocated while a job runs there.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rheostat.placement.roofline import ACCELERATORS

SECONDS = 0.5
"""Minimum duration of each speed measurement in seconds."""


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Measured speed of a GPU or CPU in FLOP/s and bytes/s, with its name and memory."""

    name: str
    cuda: bool
    memory: int
    """Total memory of the GPU in bytes, or 0 without a GPU."""
    flops: float
    bandwidth: float


def peak_flops(name: str) -> float | None:
    """Return a GPU's dense bfloat16 FLOP/s according to its data sheet, or None if the GPU's name is unknown."""
    return next((accelerator.bfloat16 for accelerator in ACCELERATORS if accelerator.name in name), None)


def has_gpu() -> bool:
    """Return whether there is a GPU.
    A separate process checks this, because a process that uses CUDA holds device memory.
    """
    program = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode == 0


def measure_device(dtype: str, *, threads: int) -> DeviceSpeed:
    """Measure the FLOP/s and memory bandwidth of the GPU, or of the CPU if there is no GPU, in a separate process.

    `dtype` is the data type of the matrix multiplication.
    """
    command = [sys.executable, "-m", "bench.device", dtype, str(threads)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return DeviceSpeed(**json.loads(answer))


def _measure(dtype: str, threads: int) -> DeviceSpeed:
    import torch

    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    side, values = (8192, 1 << 30) if cuda else (1024, 1 << 26)
    left, right = (torch.randn(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    source = torch.ones(values, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    properties = torch.cuda.get_device_properties(0) if cuda else None
    return DeviceSpeed(
        name=properties.name if properties else f"{threads} CPU threads",
        cuda=cuda,
        memory=properties.total_memory if properties else 0,
        flops=2 * side**3 / _seconds(lambda: torch.matmul(left, right), wait=torch.cuda.synchronize if cuda else None),
        bandwidth=4 * values / _seconds(lambda: target.copy_(source), wait=torch.cuda.synchronize if cuda else None),
    )


def _seconds(work: Callable[[], object], *, wait: Callable[[], None] | None) -> float:
    """Return the mean seconds of one call of `work`, over enough calls for a total of at least `SECONDS`.

    `wait`, if given, waits until the device has finished.
    """
    elapsed, calls = 0.0, 1
    while elapsed < SECONDS:
        calls *= 2
        started = time.perf_counter()
        for _ in range(calls):
            work()
        if wait is not None:
            wait()
        elapsed = time.perf_counter() - started
    return elapsed / calls


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_measure(sys.argv[1], int(sys.argv[2])))) + "\n")
