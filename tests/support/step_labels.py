"""Small generated arithmetic solutions whose steps are labeled, for tests of process reward models."""

from pathlib import Path
from random import Random

from tests.support.data_files import write_lines


def add_in_steps(rng: Random) -> dict[str, object]:
    """Return a row with a sum of three digits, its solution in two steps, and labels. Half of the steps are wrong."""
    first, second, third = (rng.randrange(3) for _ in range(3))
    errors = [rng.choice((0, 0, 1, 2)) for _ in range(2)]
    middle = first + second + errors[0]
    steps = [f"{first}+{second}={middle}", f"{middle}+{third}={middle + third + errors[1]}"]
    return {"prompt": f"{first}+{second}+{third}?", "completions": steps, "labels": [error == 0 for error in errors]}


def write_solutions(path: Path, count: int, *, seed: int = 0) -> Path:
    """Write a file of labeled solutions of sums."""
    rng = Random(seed)
    return write_lines(path, *(add_in_steps(rng) for _ in range(count)))
