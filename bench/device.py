"""What this machine's accelerator does at best, measured by `python -m bench.device DTYPE THREADS`, as JSON.

A process of its own, so that none of the device's memory stays taken while a job runs on it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from placement.roofline import ACCELERATORS

SECONDS = 0.5
"""Each measurement is repeated so long."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One device."""

    name: str
    cuda: bool
    memory: int
    """Bytes in all; 0 where there is no GPU."""
    flops: float
    bandwidth: float


def peak_flops(name: str) -> float | None:
    """Look up the dense bfloat16 FLOP/s; none where the data sheet is not known here."""
    return next((known.bfloat16 for known in ACCELERATORS if known.name in name), None)


def has_gpu() -> bool:
    """Ask in another process: one that has asked CUDA holds memory of the device."""
    asked = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", asked], stderr=subprocess.DEVNULL).returncode == 0


def measured_device(dtype: str, *, threads: int) -> Measured:
    """Measure in another process."""
    command = [sys.executable, "-m", "bench.device", dtype, str(threads)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return Measured(**json.loads(answer))


def _measure(dtype: str, threads: int) -> Measured:
    import torch

    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    side, values = (8192, 1 << 30) if cuda else (1024, 1 << 26)
    left, right = (torch.randn(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    source = torch.ones(values, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    properties = torch.cuda.get_device_properties(0) if cuda else None
    return Measured(
        name=properties.name if properties else f"{threads} CPU threads",
        cuda=cuda,
        memory=properties.total_memory if properties else 0,
        flops=2 * side**3 / _seconds(lambda: torch.matmul(left, right), wait=torch.cuda.synchronize if cuda else None),
        bandwidth=4 * values / _seconds(lambda: target.copy_(source), wait=torch.cuda.synchronize if cuda else None),
    )


def _seconds(work: Callable[[], object], *, wait: Callable[[], None] | None) -> float:
    """Return the seconds of one call, repeated until the clock can tell."""
    taken, calls = 0.0, 1
    while taken < SECONDS:
        calls *= 2
        started = time.perf_counter()
        for _ in range(calls):
            work()
        if wait is not None:
            wait()
        taken = time.perf_counter() - started
    return taken / calls


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(_measure(sys.argv[1], int(sys.argv[2])))) + "\n")
