"""Ten changes of the demo, each answered by a what-if run and by a real run with the same change.

Both are compared after every iteration, so the tables also show how the error depends on the effective sample size.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.jobs import DEMO, run_command
from bench.tables import Cell, Table
from rheostat.infra.store.runs import open_run
from rheostat.tasks.views.metrics import evaluations_of
from rheostat.tasks.views.report.sections import paired_difference

BRIEF: Final = '{kind = "length", unit = "characters", max_length = 8, margin = 8, weight = 1.0}'
"""Reward for completions as short as a bare guess, which worked answers do not get."""
CHANGES: Final[Mapping[str, Sequence[str]]] = {
    "a quarter of the learning rate": ("update.learning_rate=1.25e-4",),
    "half of the learning rate": ("update.learning_rate=2.5e-4",),
    "double learning rate": ("update.learning_rate=1e-3",),
    "one minibatch instead of four": ("update.minibatches=1",),
    "two epochs": ("update.epochs=2",),
    "RLOO": ("algorithm.kind=rloo",),
    "CISPO's loss": ("update.loss.kind=cispo",),
    "KL penalty": ("update.kl={kind = 'k3', coefficient = 0.1}",),
    "reward for short completions": (f"scoring.rewards=[{{kind = 'numeric'}}, {BRIEF}]",),
    "mostly reward for short completions": (f"scoring.rewards=[{{kind = 'numeric', weight = 0.2}}, {BRIEF}]",),
}
"""Overrides of each change."""
BOUND: Final = 0.5
LOWEST: Final = 0.02
"""Effective sample size at which the what-if runs end here, so that untrusted iterations can be compared, too."""
RANGES: Final = ((BOUND, 1.01), (0.2, BOUND), (LOWEST, 0.2))


@dataclass(frozen=True, slots=True)
class ComparedIteration:
    """Held-out accuracies after one iteration: of the demo, of the what-if run, and of the real run with the change."""

    number: int
    lowest_sample_size: float
    """Lowest effective sample size of this iteration and all before."""
    parent: float
    answer: float
    real: float
    is_significant: bool
    """Whether a paired test finds that the what-if run differs from the demo, at a level of 5% on one side."""

    @property
    def is_right(self) -> bool:
        """Whether the what-if run and the real run differ from the demo in the same direction."""
        answer, real = self.answer - self.parent, self.real - self.parent
        return (answer > 0) - (answer < 0) == (real > 0) - (real < 0)


def measure() -> Iterator[Table]:
    """Train the demo once, and each change twice: on the stored rollouts, and on its own rollouts."""
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as directory:
        home = Path(directory)
        run_command(home, "train", str(DEMO), "evaluation.every=1", "report=false")
        results = {}
        for number, (change, overrides) in enumerate(CHANGES.items()):
            results[change] = compare_change(home, f"change-{number}", overrides)
            sys.stderr.write(f"{change}: {len(results[change])} iterations\n")
    yield answers_table(results)
    yield errors_table(results)


def compare_change(home: Path, name: str, overrides: Sequence[str]) -> list[ComparedIteration]:
    """Answer a change of the demo in both ways, and return the accuracies after each iteration that both reached."""
    answer = json.loads(run_command(home, "what-if", "demo", name, *overrides, "--bound", str(LOWEST), "--json"))
    run_command(home, "fork", "demo@0", f"{name}-real", *overrides, "report=false")
    demo, run, rerun = (open_run(str(home / "runs"), each) for each in ("demo", name, f"{name}-real"))
    parent, replayed, real = ({each.number: each.mean for each in evaluations_of(run)} for run in (demo, run, rerun))
    compared, lowest = [], 1.0
    for each in answer["iterations"]:
        number, lowest = each["number"], min(lowest, each["effective_sample_size"] or 1.0)
        if number in replayed:
            difference = paired_difference(demo, number, run, number)
            means = parent[number], replayed[number], real[number]
            compared.append(ComparedIteration(number, lowest, *means, difference.lower > 0 or difference.upper < 0))
    return compared


def answers_table(results: Mapping[str, Sequence[ComparedIteration]]) -> Table:
    """Return the table of the answers after the last iteration that can be trusted, one row per change."""
    rows: list[tuple[Cell, ...]] = []
    for change, compared in results.items():
        last = [each for each in compared if each.lowest_sample_size >= BOUND][-1]
        means = (last.parent, last.answer, last.real)
        rows.append((change, last.number, *means, _say(last.is_significant), _say(last.is_right)))
    significant = [row for row in rows if row[-2] == _say(True)]
    rights = [sum(row[-1] == _say(True) for row in some) for some in (significant, rows)]
    return Table(
        title=f"Held-out accuracy after the last iteration with an effective sample size of {BOUND} or more",
        columns=("change", "iteration", "demo", "what-if run", "real run", "significant", "sign right"),
        rows=tuple(rows),
        notes=(
            f"The sign of the difference from the demo was right for {rights[0]} of the {len(significant)} changes "
            f"with a significant difference, and for {rights[1]} of all {len(rows)} changes.",
        ),
    )


def _say(is_true: bool) -> str:
    return "yes" if is_true else "no"


def errors_table(results: Mapping[str, Sequence[ComparedIteration]]) -> Table:
    """Return the table of errors by effective sample size, over all changes and iterations after the first one."""
    every = [each for compared in results.values() for each in compared if each.number > 1]
    rows: list[tuple[Cell, ...]] = []
    for low, high in RANGES:
        some = [each for each in every if low <= each.lowest_sample_size < high]
        certain = [each for each in some if each.is_significant]
        if some:
            rows.append(
                (
                    f"{low:g} to {min(high, 1):g}",
                    len(some),
                    fmean(abs(each.real - each.parent) for each in some),
                    fmean(abs(each.answer - each.real) for each in some),
                    f"{sum(each.is_right for each in certain)} of {len(certain)}",
                )
            )
    return Table(
        title="Error of what-if runs by the lowest effective sample size so far",
        columns=(
            "effective sample size",
            "iterations",
            "mean effect of the change",
            "mean error",
            "sign right, if significant",
        ),
        rows=tuple(rows),
    )
