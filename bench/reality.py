"""Comparison of real pools and flows under several placements with a simulation of the same work.

`make reality` runs `bench/reality.toml` once per placement, in real processes whose engines sleep as long as a
measured model would decode. The work units are rebuilt from the manifests of each run, with the pace and moving cost
that the run measured. The simulator plays them twice: with the run's own decisions, which shows how well it knows the
durations, and with the policy deciding again.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from bench.jobs import run_job_to_end
from bench.simulator.runs import simulate_run
from bench.simulator.stage import Stage, View
from bench.simulator.workload import StageWork, Workload, role_work
from bench.tables import Table
from rheostat.infra.store.manifests import Provenance
from rheostat.infra.store.runs import Run
from rheostat.placement.measurements import Measurements, Role
from rheostat.placement.policies.build import build_policy
from rheostat.placement.records import Decision, DrainInputs, Plan
from rheostat.tasks.config.run import RunConfig, load_config
from rheostat.tasks.placement.demand import add_observations
from rheostat.tasks.run.batch import BatchPlan
from rheostat.tasks.run.iteration import Iteration

REALITY = Path(__file__).with_name("reality.toml")
STAGES: dict[str, Role] = {"rollout": "rollout", "judge-paced": "scoring"}
PLACEMENTS = {
    "adaptive": ("placement.kind=adaptive",),
    "fixed 0.5": ("placement.kind=fixed", "placement.rollout=0.5"),
    "in turns": ("placement.kind=colocated",),
}
SETTLED = 1
"""Number of iterations at the start that are left out of the statistics.

They include starting processes, which the simulator does not model.
"""
POLL_SECONDS = 0.1
"""Simulated seconds between two checks of whether workers have to change their roles."""


Journal = Mapping[str, Mapping[str, JsonValue]]


@dataclass(frozen=True, slots=True)
class PlacementComparison:
    """Measured and simulated durations of a run with one placement policy.

    Each tuple has one value per iteration, for the stage that generates and scores completions.
    """

    placement: str
    seconds: tuple[float, ...]
    """Measured seconds of generation and scoring in each iteration."""
    around: tuple[float, ...]
    """Measured seconds of each stage before the first work unit and after the last one.

    Workers wake up and flows start in this time.
    """
    simulated: tuple[float, ...]
    """Simulated seconds of each stage if the placement policy assigns workers to roles again in the simulator."""
    replayed: tuple[float, ...]
    """Simulated seconds of each stage with the same assignments of workers to roles as in the real run."""
    unmoved: tuple[float, ...]
    """Simulated seconds of each stage if every worker keeps the role that it had at the start of the stage."""
    plans: tuple[str, ...]
    moves: tuple[int, ...]
    """Number of worker slots in each iteration that changed between generation and scoring within the stage."""
    early: tuple[float, ...]
    """Share of the work units in each iteration that were scored before the last unit was generated."""
    share: tuple[float, ...]
    """Share of generation in the busy seconds of all workers, for each iteration. The rest is scoring."""
    planned: tuple[float, ...]
    """Seconds of each stage that the placement policy predicted beforehand, from measurements of earlier stages."""

    def predicted(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Add the measured median time before and after the work units to simulated seconds.

        The simulator does not model this time.
        """
        around = median(self.around[SETTLED:])
        return tuple(around + each for each in seconds)

    def errors(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Return the errors of simulated seconds, in percent of the measured seconds, with sign.

        The first iterations are left out.
        """
        pairs = zip(self.predicted(seconds)[SETTLED:], self.seconds[SETTLED:], strict=True)
        return tuple(100 * (predicted / measured - 1) for predicted, measured in pairs)


def measure() -> Iterator[Table]:
    """Run real jobs under each placement policy, and simulate the same work.

    Yields a table of the measured and simulated seconds per run, and a summary of the simulation errors.
    """
    runs = []
    for name, overrides in PLACEMENTS.items():
        sys.stderr.write(f"--- placement {name}\n")
        with run_job_to_end(REALITY, overrides) as job:
            runs.append(compare_placement(job.run, load_config(REALITY, overrides), placement=name))
        yield by_iteration(runs[-1])
    yield summary(runs)


def compare_placement(run: Run, config: RunConfig, *, placement: str) -> PlacementComparison:
    """Simulate the work of a finished run, and return the measured and simulated durations.

    `placement` is the name of the placement policy for the tables.
    """
    iterations = [Iteration(run, number) for number in range(1, config.iterations + 1)]
    plans = [batch.plan for iteration in iterations for batch in iteration.batches]
    journal = run.journal("placement/")
    measured = Measurements()
    for plan in plans:
        measured = add_observations(measured, run, plan, STAGES)
    work = tuple(_work(run, plan, measured) for plan in plans)
    workload = Workload(stages=work, slowness_N=np.ones(config.pools.workers.max), absences=((),) * len(work))
    resize = measured.resize().mean_seconds
    played = simulate_run(build_policy(config.placement), workload, resize_seconds=resize, clock=perf_counter)
    around = tuple(_stage_seconds(journal, plan) - _span_seconds(run, plan) for plan in plans)
    again = [_Decided.of(journal, plan, late=late) for plan, late in zip(plans, around, strict=True)]
    return PlacementComparison(
        placement=placement,
        seconds=tuple(_stage_seconds(journal, plan) for plan in plans),
        around=around,
        simulated=played.seconds,
        replayed=tuple(one.run(stage, resize_seconds=resize) for one, stage in zip(again, work, strict=True)),
        unmoved=tuple(
            replace(one, drains=()).run(stage, resize_seconds=resize) for one, stage in zip(again, work, strict=True)
        ),
        plans=tuple(one.dealt for one in again),
        moves=tuple(one.moved for one in again),
        early=tuple(_early(run, plan) for plan in plans),
        share=tuple(_share(run, plan) for plan in plans),
        planned=tuple(one.expected for one in again),
    )


@dataclass(frozen=True, slots=True)
class _Decided:
    """Assignments of workers to roles that a real run chose for one stage: the plan, and its later corrections."""

    plan: Decision
    drains: tuple[tuple[float, Plan], ...]
    """Corrections of the plan during the stage, each with the seconds since the first work unit began."""

    @classmethod
    def of(cls, journal: Journal, plan: BatchPlan, *, late: float) -> Self:
        """Read the assignments of one stage from the run's journal.

        `late` is the number of seconds between the start of the stage and the start of its first work unit.
        """
        keys = sorted(key for key in journal if key.startswith(f"placement/{plan.key}/drain-"))
        inputs = [DrainInputs.model_validate(journal[key]["inputs"]) for key in keys]
        plans = [Decision.model_validate(journal[key]["decision"]).plan for key in keys]
        drains = tuple((it.elapsed_seconds - late, to) for it, to in zip(inputs, plans, strict=True))
        return cls(Decision.model_validate(journal[f"placement/{plan.key}/plan"]["decision"]), drains)

    @property
    def dealt(self) -> str:
        plan = self.plan.plan
        return "turns" if plan.mode == "colocated" else f"{plan.rollout}/{plan.scoring}"

    @property
    def expected(self) -> float:
        return self.plan.predicted_seconds

    @property
    def moved(self) -> int:
        """Number of worker slots that changed between generation and scoring during the stage."""
        plans = [self.plan.plan, *(plan for _, plan in self.drains)]
        return sum(abs(one.rollout - other.rollout) for one, other in pairwise(plans))

    def run(self, work: StageWork, *, resize_seconds: float) -> float:
        """Simulate the stage with the assignments of the real run, and return the simulated seconds.

        `resize_seconds` is the time that a worker needs to change its role.
        """
        plan = self.plan.plan
        slots = plan.rollout + (plan.scoring if plan.mode == "split" else 0)
        roles: list[Role] = ["rollout" if slot < plan.rollout else "scoring" for slot in range(slots)]
        stage = Stage(work, np.ones(slots), plan=plan, roles=roles, move_seconds=resize_seconds)
        return stage.run(drain=self._drain, poll_seconds=POLL_SECONDS).seconds

    def _drain(self, view: View) -> Plan:
        """Return the assignment of workers to roles that the real run used at the simulated time.

        The simulator calls this during a stage. An assignment that gives no worker to a role with waiting work units is
        skipped, because the real run never chose one.
        """
        for at, plan in reversed(self.drains):
            left = [
                role.waiting + role.coming
                for role, slots in ((view.rollout, plan.rollout), (view.scoring, plan.scoring))
                if slots == 0
            ]
            if at <= view.elapsed and not any(left):
                return plan
        return view.plan


def _work(run: Run, plan: BatchPlan, measured: Measurements) -> StageWork:
    """Build the simulator's work units of one stage from the recorded lengths and the speed that the run measured."""
    rollout, scoring = (
        role_work(measured.demand(role, units=1, sequences=1).pace, _lengths(run, plan, stage))
        for stage, role in STAGES.items()
    )
    return StageWork(rollout=rollout, scoring=scoring, units_at_once=1)


def by_iteration(run: PlacementComparison) -> Table:
    """Build a table of the measured and simulated seconds of a run, with one row per iteration."""
    columns: dict[str, Sequence[str | int | float]] = {
        "iteration": [str(number + 1) for number in range(len(run.seconds))],
        "plan": run.plans,
        "moved inside": run.moves,
        "judged early": run.early,
        "rollout share": run.share,
        "around s": run.around,
        "measured s": run.seconds,
        "replayed s": run.predicted(run.replayed),
        "unmoved s": run.predicted(run.unmoved),
        "simulated s": run.predicted(run.simulated),
        "planned s": run.planned,
    }
    return Table(
        title=f"Stages under placement {run.placement}",
        columns=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        notes=(
            "judged early: share of units judged before the last unit was generated; rollout share: share of the busy",
            "seconds; around: seconds before the first unit and after the last one; replayed: units and decisions of "
            "the",
            "run in the simulator, plus the median of around; unmoved: the same without moves inside the stage; "
            "simulated:",
            "the simulator's policy decides too; planned: estimate of the policy from earlier stages, without around",
        ),
    )


def summary(runs: Sequence[PlacementComparison]) -> Table:
    """Build a table with the mean seconds and the simulation errors of each run, with one row per placement policy."""
    rows = []
    for run in runs:
        row: list[str | float] = [run.placement, mean(run.seconds[SETTLED:])]
        for seconds in (run.replayed, run.simulated):
            off = [abs(error) for error in run.errors(seconds)]
            row += [mean(run.predicted(seconds)[SETTLED:]), median(off), max(off)]
        rows.append(tuple(row))
    return Table(
        title="Seconds of generation and scoring per iteration, measured and simulated",
        columns=(
            "placement",
            "measured s",
            "replayed s",
            "median |error| %",
            "largest %",
            "simulated s",
            "median |error| % ",
            "largest % ",
        ),
        rows=tuple(rows),
        notes=(f"without the first {SETTLED} iterations, in which processes start",),
    )


def _lengths(run: Run, plan: BatchPlan, stage: str) -> NDArray[np.float64]:
    """Return the sequence lengths of each work unit of a stage, as an array with one row per unit.

    Lengths are read from manifests, which list all of them because the units are small.
    """
    units = []
    for shard in range(plan.num_shards):
        manifest = run.find(plan.shard_key(stage, shard))
        assert manifest is not None, f"{plan.shard_key(stage, shard)} must exist in a finished run"
        lengths = manifest.detail["lengths"]
        assert isinstance(lengths, list) and len(lengths) == manifest.metrics["sequences"]
        units.append([_number(length) for length in lengths])
    return np.array(units)


def _share(run: Run, plan: BatchPlan) -> float:
    busy = {stage: sum(unit.seconds["worker"] for unit in _units(run, plan, stage)) for stage in STAGES}
    return busy["rollout"] / sum(busy.values())


def _span_seconds(run: Run, plan: BatchPlan) -> float:
    """Return the seconds from the start of the first work unit to the end of the last one.

    Units of generation and of scoring count.
    """
    units = [unit for stage in STAGES for unit in _units(run, plan, stage)]
    ends = [datetime.fromisoformat(unit.created).timestamp() for unit in units]
    return max(ends) - min(end - unit.seconds["worker"] for end, unit in zip(ends, units, strict=True))


def _units(run: Run, plan: BatchPlan, stage: str) -> list[Provenance]:
    manifests = [run.find(plan.shard_key(stage, shard)) for shard in range(plan.num_shards)]
    return [manifest.provenance for manifest in manifests if manifest is not None]


def _stage_seconds(journal: Journal, plan: BatchPlan) -> float:
    return _number(journal[f"placement/{plan.key}/stage"]["seconds"])


def _early(run: Run, plan: BatchPlan) -> float:
    """Return the share of work units that were scored before the last unit was generated."""
    last = max(unit.created for unit in _units(run, plan, "rollout"))
    return mean(unit.created < last for unit in _units(run, plan, "judge-paced"))


def _number(value: JsonValue) -> float:
    assert isinstance(value, int | float)
    return float(value)
