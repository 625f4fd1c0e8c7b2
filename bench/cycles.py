"""Where the seconds of a run's iterations went, read from the provenance of its manifests.

A cycle is one turn of the loop as the clock on the wall sees it: from the end of the iteration before (its seal; for
the first, the summary of the evaluation before it) to the end of this one, reporting and retention of the one before
included. A cycle is spent in three ways:

- work: at least one worker generates, scores, credits, or takes optimizer steps;
- data: no worker does, but one loads weights, or writes shards or weights (hashing and fsync included);
- orchestration: no worker is busy. Planning, starting flows and tasks, calls to workers, commits, reports.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from infra.store.manifests import Manifest
from infra.store.runs import Run
from tasks.run.keys import iteration_key

DATA = ("load", "write", "save")
"""Timings that workers name for moving data; what is left of a worker's seconds is work."""

BEFORE = "weights_seconds"
"""All that loading weights took a worker, which does it where it wakes, just before its work, or within it."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cycle:
    """One turn of the loop in seconds."""

    number: int
    seconds: float
    busy: float
    """At least one worker was busy, with work or data."""
    data: float
    """Data moved by the slowest worker of each stage."""
    stages: dict[str, float]
    """Seconds of each stage's workers; of parallel workers the slowest."""

    @property
    def orchestration(self) -> float:
        return self.seconds - self.busy

    @property
    def overhead(self) -> float:
        """Orchestration and data together."""
        return self.orchestration + self.data


def cycles_of(run: Run) -> list[Cycle]:
    """Every sealed iteration's cycle, in order."""
    number, ends, cycles = 1, _end(run.find("eval-0000/summary")), []
    while (seal := run.find(f"{iteration_key(number)}/seal")) is not None:
        begins, ends = ends, _end(seal)
        cycles.append(_cycle(number, run.manifests(f"{iteration_key(number)}/"), seconds=ends - begins))
        number += 1
    return cycles


def median_cycle(cycles: Sequence[Cycle]) -> Cycle:
    """The medians of each quantity."""

    def median(values: Iterable[float]) -> float:
        return statistics.median(values)

    return Cycle(
        number=0,
        seconds=median(cycle.seconds for cycle in cycles),
        busy=median(cycle.busy for cycle in cycles),
        data=median(cycle.data for cycle in cycles),
        stages={name: median(cycle.stages[name] for cycle in cycles) for name in cycles[0].stages},
    )


def _cycle(number: int, manifests: Sequence[Manifest], *, seconds: float) -> Cycle:
    busy: list[Interval] = []
    stages: dict[str, list[float]] = {"rollout": [], "scoring": [], "credit": [], "update": []}
    data: dict[str, list[float]] = {stage: [] for stage in stages}
    for manifest in manifests:
        stage, spent = manifest.key.split("/")[1], manifest.provenance.seconds
        if stage in stages:
            end, before = _end(manifest), max(0.0, spent.get(BEFORE, 0.0) - spent.get("load", 0.0))
            busy.append((end - spent["worker"] - before, end))
            stages[stage].append(spent["worker"])
            data[stage].append(sum(spent.get(name, 0.0) for name in DATA) + before)
    return Cycle(
        number=number,
        seconds=seconds,
        busy=_covered(busy),
        data=sum(max(moved) for moved in data.values()),
        stages={stage: max(workers) for stage, workers in stages.items()},
    )


def _end(manifest: Manifest | None) -> float:
    assert manifest is not None, "a run that ended well has its first evaluation and its seals"
    return datetime.fromisoformat(manifest.provenance.created).timestamp()


def _covered(intervals: Sequence[Interval]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
