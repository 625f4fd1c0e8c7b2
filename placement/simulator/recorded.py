"""Workloads of a real run: what its placement measured, drawn again."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from placement.records import Demand, PlanInputs
from placement.simulator.cells import Cell, Load
from placement.simulator.workload import RoleWork, StageWork, Workload, role_work


def recorded_load(run: str, inputs: Sequence[PlanInputs], *, workers: int, resize_seconds: Sequence[float]) -> Load:
    """Describe a run's iterations, from the inputs of its plans, in order; the last one has no successor that measured
    it, and is left out."""
    cells = tuple(Cell(f"run {run}", workers, "as it was", "measured", seconds) for seconds in resize_seconds)
    return Load(cells=cells, draw=partial(recorded_workload, tuple(inputs), workers=workers))


def recorded_workload(inputs: tuple[PlanInputs, ...], seed: int, *, workers: int) -> Workload:
    """Draw each iteration's units from the lengths and paces that the next iteration's plan knew."""
    rng = np.random.default_rng(seed)
    stages = tuple(
        StageWork(
            rollout=_drawn(now.rollout, then.rollout, rng),
            scoring=_drawn(now.scoring, then.scoring, rng),
            units_at_once=now.rollout.units_at_once,
        )
        for now, then in pairwise(inputs)
    )
    return Workload(stages=stages, slowness_N=np.ones(workers), absences=((),) * len(stages))


def _drawn(now: Demand, then: Demand, rng: np.random.Generator) -> RoleWork:
    return role_work(then.pace, rng.choice(np.asarray(then.lengths), size=(now.units, max(now.sequences, 1))))
