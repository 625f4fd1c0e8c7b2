"""Start time of commands, as a multiple of Python's own start time, so that machines can be compared."""

import subprocess
import sys
import time
from pathlib import Path

from bench.tables import Table

ROUNDS = 15
RHEOSTAT = str(Path(sys.executable).with_name("rheostat"))
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "rheostat --help": [RHEOSTAT, "--help"],
    "rheostat train --help": [RHEOSTAT, "train", "--help"],
    "rheostat runs": [RHEOSTAT, "runs", "--store", "no-runs"],
}


def measure() -> list[Table]:
    """Measure the milliseconds that Rheostat's commands take to start, compared with an empty Python program.

    The fastest of 15 starts counts, because other processes delay slower ones.
    """
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - begin)
    fastest = {name: min(durations) for name, durations in seconds.items()}
    rows = tuple((name, 1e3 * duration, duration / fastest["python -c pass"]) for name, duration in fastest.items())
    return [Table("Starting a command", ("command", "ms", "times python -c pass"), rows)]
