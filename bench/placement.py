"""Time of placement decisions by number of workers: a plan, and a correction within a stage."""

import time
from collections.abc import Callable, Iterator

from bench.tables import Table
from rheostat.placement.config import AdaptivePlacement
from rheostat.placement.policies.build import build_policy
from rheostat.placement.records import Decision
from tests.support.placements import demand, drain_inputs, plan_inputs, split

ROUNDS = 5
UNITS_PER_WORKER = 6


def measure() -> Iterator[Table]:
    """Measure the CPU time of placement decisions for 8 to 4,096 workers.

    Yields a table with the milliseconds of a plan, and of a correction of the plan within a stage.
    """
    policy = build_policy(AdaptivePlacement())
    rows = []
    for workers in (8, 64, 512, 4096):
        units, half = UNITS_PER_WORKER * workers, workers // 2
        inputs = plan_inputs(workers=workers, rollout=demand(units=units), scoring=demand(units=units))
        stage = drain_inputs(
            plan=split(half, workers - half), waiting=units // 2, coming=units // 2 + half, flying=(4.0,) * half
        )
        plan_seconds = _median(lambda inputs=inputs: policy.plan(inputs))
        rows.append((str(workers), 1e3 * plan_seconds, 1e3 * _median(lambda stage=stage: policy.drain(stage))))
    yield Table("Placement decisions of the adaptive policy", ("workers", "plan, ms", "correction, ms"), tuple(rows))


def _median(decide: Callable[[], Decision]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        decide()
        seconds.append(time.process_time() - begin)
    return sorted(seconds)[ROUNDS // 2]
