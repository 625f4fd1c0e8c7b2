"""Breakdown of the time of a run's iterations, read from the provenance in its manifests.

A cycle is one iteration in wall-clock time: from the end of the previous iteration (its seal, or for the first
iteration the summary of the evaluation before it) to the end of this one. Reporting and retention of the previous
iteration are included. The time of a cycle has three parts:

- work: at least one worker generates, scores, credits, or takes optimizer steps;
- data: no worker does, but at least one loads weights, or writes shards or weights (hashing and fsync included);
- orchestration: no worker is busy. Planning, starting flows and tasks, calls to workers, commits, reports.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.tasks.run.keys import iteration_key

DATA_TIMINGS = ("load", "write", "save")
"""Names of the worker timings that measure data movement. A worker's remaining seconds are spent on computation."""

WEIGHTS_TIMING = "weights_seconds"
"""Name of the timing that measures all loading of weights by a worker, when the worker wakes up and during its work."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cycle:
    """Wall-clock seconds of one iteration, split into the seconds of workers, data movement and orchestration."""

    number: int
    seconds: float
    busy: float
    """Seconds in which at least one worker computed or moved data."""
    data: float
    """Seconds of data movement: loading weights and writing shards or weights.

    Each stage contributes the seconds of its slowest worker.
    """
    stages: dict[str, float]
    """Seconds of each stage (rollout, scoring, credit, update).

    If workers run in parallel, the slowest worker counts.
    """

    @property
    def orchestration(self) -> float:
        return self.seconds - self.busy

    @property
    def overhead(self) -> float:
        """Seconds of orchestration plus seconds of data movement."""
        return self.orchestration + self.data


def read_cycles(run: Run) -> list[Cycle]:
    """Return the time breakdown of every finished iteration of a run, in order."""
    number, ends, cycles = 1, _end(run.find("eval-0000/summary")), []
    while (seal := run.find(f"{iteration_key(number)}/seal")) is not None:
        begins, ends = ends, _end(seal)
        cycles.append(_cycle(number, run.manifests(f"{iteration_key(number)}/"), seconds=ends - begins))
        number += 1
    return cycles


def median_cycle(cycles: Sequence[Cycle]) -> Cycle:
    """Return the medians over iterations of all measured times, as one `Cycle` with the number 0."""

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
            end, before = _end(manifest), max(0.0, spent.get(WEIGHTS_TIMING, 0.0) - spent.get("load", 0.0))
            busy.append((end - spent["worker"] - before, end))
            stages[stage].append(spent["worker"])
            data[stage].append(sum(spent.get(name, 0.0) for name in DATA_TIMINGS) + before)
    return Cycle(
        number=number,
        seconds=seconds,
        busy=_covered(busy),
        data=sum(max(moved) for moved in data.values()),
        stages={stage: max(workers) for stage, workers in stages.items()},
    )


def _end(manifest: Manifest | None) -> float:
    assert manifest is not None, "a completed run has a first evaluation and seals"
    return datetime.fromisoformat(manifest.provenance.created).timestamp()


def _covered(intervals: Sequence[Interval]) -> float:
    """Return the total length of time that is covered by at least one of the intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
