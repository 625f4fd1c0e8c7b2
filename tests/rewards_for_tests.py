"""Rewards that behave as rewards in the wild do; the completion says what to do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def obedient(prompt: str, completion: str, answer: str) -> float:
    """Return the number that the completion is, or do the harm that it names."""
    if completion == "hang":
        time.sleep(3600)
    if completion == "exit":
        os._exit(0)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "raise":
        raise RuntimeError(f"cannot judge\n{object()!r}")
    if completion == "leave":
        sys.exit(3)
    if completion == "none":
        return None  # type: ignore[return-value]
    return float(completion)


def length(prompt: str, completion: str, answer: str, *, scale: float = 1.0) -> float:
    """Return the completion's length."""
    return scale * len(completion)


def leave_pid_and_hang(prompt: str, completion: str, answer: str) -> float:
    """Write the ids of this process and of one it starts to the file that the completion names, and never return."""
    started = subprocess.Popen(["sleep", "3600"])
    path = Path(completion)
    path.with_suffix(".part").write_text(f"{os.getpid()} {started.pid}")
    path.with_suffix(".part").rename(path)
    time.sleep(3600)
    return 0.0


async def asynchronous(prompt: str, completion: str, answer: str) -> float:
    """Return what no caller waits for."""
    return 1.0


def two_arguments(prompt: str, completion: str) -> float:
    """Take too little."""
    return 1.0


NUMBER = 7


def even(prompt: str, completion: str, answer: str) -> float:
    """Return 1 for an even number of characters: any policy gets it right now and then, in every group."""
    return float(len(completion) % 2 == 0)
