"""Workloads of a real run: what its placement measured, drawn again."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from placement.records import Demand
from placement.simulator.cells import Cell, Load
from placement.simulator.workload import RoleWork, StageWork, Workload, role_work


def recorded_load(
    run: str, stages: Sequence[tuple[Demand, Demand]], *, workers: int, resize_seconds: Sequence[float]
) -> Load:
    """Describe a run's iterations, from what each of them measured of itself: rollout and scoring."""
    cells = tuple(Cell(f"run {run}", workers, "as it was", "measured", seconds) for seconds in resize_seconds)
    return Load(cells=cells, draw=partial(recorded_workload, tuple(stages), workers=workers))


def recorded_workload(stages: tuple[tuple[Demand, Demand], ...], seed: int, *, workers: int) -> Workload:
    """Draw each iteration's units from its own lengths and paces."""
    rng = np.random.default_rng(seed)
    drawn = tuple(
        StageWork(rollout=_drawn(rollout, rng), scoring=_drawn(scoring, rng), units_at_once=rollout.units_at_once)
        for rollout, scoring in stages
    )
    return Workload(stages=drawn, slowness_N=np.ones(workers), absences=((),) * len(drawn))


def _drawn(demand: Demand, rng: np.random.Generator) -> RoleWork:
    sequences = max(demand.sequences, 1)
    return role_work(demand.pace, rng.choice(np.asarray(demand.lengths), size=(demand.units, sequences)))
