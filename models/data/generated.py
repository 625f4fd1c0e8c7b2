"""Sampling of generated problems, for data sources that do not read files."""

from collections.abc import Callable
from typing import Final

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.models.config.data import GeneratedData
from rheostat.models.data.problems import Problem, is_heldout

HELDOUT_SHARE: Final = 0.1
"""Share of the generated problems that are held out for evaluation."""
MAX_FRUITLESS_DRAWS: Final = 5000
"""Number of samples in a row without a new problem after which sampling stops. One sample in ten is held out."""


def sample_problems(
    data: GeneratedData, draw: Callable[[str], Problem], split: str, *, size_key: str | None = None
) -> list[Problem]:
    """Sample the distinct problems of a split ("train" or "heldout") with `draw`, which receives the origin of the
    problem for messages. `size_key` is the setting that raises the number of different problems, or None if there is
    none. Raises BadInput if `MAX_FRUITLESS_DRAWS` samples in a row contain no new problem."""
    wanted = data.train_problems if split == "train" else data.heldout_problems
    problems, fruitless = dict[str, Problem](), 0
    while len(problems) < wanted and fruitless < MAX_FRUITLESS_DRAWS:
        problem = draw(f"{split} problem {len(problems)}")
        name = problem.identity
        is_new = name not in problems and is_heldout(name, HELDOUT_SHARE) == (split == "heldout")
        fruitless = 0 if is_new else fruitless + 1
        if is_new:
            problems[name] = problem
    if len(problems) < wanted:
        size_of_split = f"data.options.{split}_problems"
        raise BadInput(
            f"{size_of_split} is {wanted}, but only {format_count(len(problems), 'different problem')} could be "
            f"generated. Lower {size_of_split}{f', or raise {size_key}' if size_key else ''}."
        )
    return list(problems.values())
