"""`rheostat simulate`: what placement policies would make of a load, without workers."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flows.cli.output import table, write
from infra.errors import BadInput
from infra.store.runs import Run
from infra.validation_errors import nearest
from models.config.rewards import ScoringConfig
from placement.measurements import Measurements, Role
from placement.records import Demand, PlanInputs
from placement.simulator.cells import POLICIES, REGIMES, CellResult, Load, evaluate_cell, load_of, recorded_load
from placement.simulator.report import AIMS, AimResult, paired_ratio, verdicts
from placement.simulator.workload import KNOWN, SCENARIOS
from tasks.placement.demand import observed
from tasks.run.batch import BatchPlan
from tasks.run.keys import judge_role
from tasks.views.plots import policy_bars
from tasks.views.runs import open_known_run

MOST_WORKERS = 4096
SHOWN_SHORT = 40
"""Cells that fall short, named one by one; the others are counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `simulate` can be told; lists are separated by commas, `all` is every name."""
    add = parser.add_argument
    add("--workers", default="8,64", metavar="N,…", help="worker slots (default: %(default)s)")
    add("--scenario", default="all", metavar="NAME,…", help=f"{', '.join(SCENARIOS)} (default: all)")
    add("--regime", default="throughput", metavar="NAME,…", help=f"{', '.join(REGIMES)} (default: %(default)s)")
    add("--lengths", metavar="NAME,…", help=f"{', '.join(KNOWN)} (default: the regime's)")
    add("--resize-seconds", default="2", metavar="S,…", help="cost of moving a worker (default: %(default)s)")
    add("--seeds", type=int, default=20, metavar="N", help="workloads per cell (default: %(default)s)")
    add("--iterations", type=int, metavar="N", help="iterations of a workload (default: 12)")
    add("--policies", default="all", metavar="NAME,…", help=f"{', '.join(POLICIES)} (default: all)")
    add("--aims", action="store_true", help="print the aims, too, and the cells that fall short")
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="FILE", help="write the times as a PNG")
    add("--run", metavar="RUN", help="simulate this run's own measurements instead of a regime")
    add("--store", default="./runs", help="where runs lie (default: %(default)s)")


def simulate(options: argparse.Namespace) -> int:
    """Simulate every cell that the options name, and print what came out; raises `BadInput` for wrong names."""
    policies = _names("--policies", options.policies, POLICIES)
    if options.seeds < 1:
        raise BadInput(f"--seeds {options.seeds}: expected at least 1")
    results: list[CellResult] = []
    for load in _recorded(options) if options.run else _loads(options):
        results += evaluate_cell(load, seeds=options.seeds, policies=policies, clock=time.process_time, told=_tell)
    if options.plot is not None:
        _plot(results, options.plot)
    found = verdicts(results)
    if options.json:
        write(json.dumps(_described(results, found), indent=2))
    else:
        write(table(_time_rows(results)))
    if options.aims and not options.json:
        write(f"\n{table(_aim_rows(found))}{_short(found)}")
    return 0


def _loads(options: argparse.Namespace) -> list[Load]:
    if options.iterations is not None and options.iterations < 2:
        raise BadInput(f"--iterations {options.iterations}: expected at least 2")
    return [
        load_of(
            regime,
            workers=workers,
            scenario=scenario,
            lengths=lengths,
            resize_seconds=_numbers("--resize-seconds", options.resize_seconds, least=0),
            iterations=options.iterations,
        )
        for regime in _names("--regime", options.regime, list(REGIMES))
        for lengths in (_names("--lengths", options.lengths, list(KNOWN)) if options.lengths else (None,))
        for workers in _workers(options.workers)
        for scenario in _names("--scenario", options.scenario, list(SCENARIOS))
    ]


def _recorded(options: argparse.Namespace) -> list[Load]:
    """What each finished batch of a run measured of itself, dealt as its plan knew it."""
    run = open_known_run(options.store, options.run)
    entries = run.journal("placement/it-")
    plans = {key: PlanInputs.model_validate(entry["inputs"]) for key, entry in entries.items() if key.endswith("/plan")}
    stages: list[tuple[Demand, Demand]] = []
    for key, plan in plans.items():
        if plan.scoring.units != plan.rollout.units or plan.scoring.slots > 1:
            raise BadInput(
                f"run {options.run!r}: expected one reward model on one slot per worker, which is what is simulated; "
                f"found {plan.scoring.units} units to score for {plan.rollout.units} to generate, "
                f"{plan.scoring.slots} slots per worker"
            )
        if key.removesuffix("plan") + "stage" in entries:
            stages.append(_measured(run, key.removeprefix("placement/"), plan))
    if len(stages) < 2:
        raise BadInput(f"run {options.run!r}: expected at least 2 finished batches, found {len(stages)}")
    seconds = _numbers("--resize-seconds", options.resize_seconds, least=0)
    workers = next(reversed(plans.values())).workers
    return [recorded_load(options.run, stages, workers=workers, resize_seconds=seconds)]


def _measured(run: Run, plan_key: str, plan: PlanInputs) -> tuple[Demand, Demand]:
    manifest = run.find(plan_key)
    assert manifest is not None, f"{plan_key} of a batch that was placed"
    terms = ScoringConfig.model_validate(run.record.config["scoring"]).local
    stages: dict[str, Role] = {"rollout": "rollout", **dict.fromkeys(map(judge_role, terms), "scoring")}
    alone = observed(Measurements(), run, BatchPlan.read(manifest), stages)
    return _own(alone, "rollout", plan.rollout), _own(alone, "scoring", plan.scoring)


def _own(measured: Measurements, role: Role, its: Demand) -> Demand:
    return measured.demand(role, units=its.units, sequences=its.sequences, units_at_once=its.units_at_once)


def _names(option: str, given: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(known) if given == "all" else tuple(name.strip() for name in given.split(","))
    for name in names:
        if name not in known:
            raise BadInput(f"{option} {name!r}: expected {', '.join(known)} or all{nearest(name, known)}")
    return names


def _numbers(option: str, given: str, *, least: float) -> tuple[float, ...]:
    try:
        numbers = tuple(float(number) for number in given.split(","))
    except ValueError:
        raise BadInput(f"{option} {given!r}: expected numbers separated by commas") from None
    if not all(least <= number < float("inf") for number in numbers):
        raise BadInput(f"{option} {given!r}: expected numbers of at least {least:g}")
    return numbers


def _workers(given: str) -> tuple[int, ...]:
    numbers = _numbers("--workers", given, least=2)
    if any(number != int(number) or number > MOST_WORKERS for number in numbers):
        raise BadInput(f"--workers {given!r}: expected whole numbers from 2 to {MOST_WORKERS}")
    return tuple(int(number) for number in numbers)


def _tell(what: str) -> None:
    """Say on stderr what is being done; one line that is written over, where a person looks on."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
    elif what.partition(": seed ")[2].startswith("1 "):
        sys.stderr.write(f"{what.partition(': seed ')[0]}\n")
    sys.stderr.flush()


def _time_rows(results: Sequence[CellResult]) -> list[dict[str, str]]:
    """Times over the lower bound, or in seconds where that was not asked for."""
    return [
        {
            "cell": str(result.cell),
            "seeds": str(len(result.moves)),
            "tail": f"{result.tail:.2f}",
            **{name: _relative(result, name) for name in result.seconds},
            "moves": f"{sum(result.moves) / len(result.moves):.2f}",
            "handovers": f"{sum(result.handovers) / len(result.handovers):.2f}",
            "turns": f"{100 * sum(result.turns) / len(result.turns):.0f}%",
        }
        for result in results
    ]


def _relative(result: CellResult, name: str) -> str:
    if "lower_bound" not in result.seconds or name == "lower_bound":
        return f"{sum(result.seconds[name]) / len(result.seconds[name]) / result.iterations:.1f} s"
    return f"{paired_ratio(result.seconds[name], result.seconds['lower_bound']).mean:.3f}"


def _aim_rows(found: Sequence[AimResult]) -> list[dict[str, str]]:
    """Per aim: cells, those that hold, and the worst one."""
    rows = []
    for aim in AIMS:
        cells = [verdict for verdict in found if verdict.aim is aim]
        if not cells:
            continue
        pick = min if aim.side == "at least" else max
        worst = pick(cells, key=lambda verdict: verdict.ratio.mean)
        rows.append(
            {
                "aim": f"{aim.name} {'≥' if aim.side == 'at least' else '≤'} {aim.bound:g}",
                "cells": str(len(cells)),
                "hold": str(sum(verdict.holds for verdict in cells)),
                "mean": f"{sum(verdict.ratio.mean for verdict in cells) / len(cells):.3f}",
                "worst [95%]": str(worst.ratio),
                "where": str(worst.result.cell),
            }
        )
    return rows


def _short(found: Sequence[AimResult]) -> str:
    short = [verdict for verdict in found if not verdict.holds]
    if not short:
        return "\nno cell falls short"
    lines = [f"falls short: {v.aim.name} {v.ratio} ({v.aim.bound:g}): {v.result.cell}" for v in short[:SHOWN_SHORT]]
    more = len(short) - len(lines)
    return "\n" + "\n".join(lines) + (f"\nand {more} more" if more else "")


def _plot(results: Sequence[CellResult], path: Path) -> None:
    if any("lower_bound" not in result.seconds for result in results):
        raise BadInput("--plot needs the policy lower_bound: its times are drawn over it")
    names = [name for name in results[0].seconds if name != "lower_bound" and all(name in r.seconds for r in results)]
    bars = {name: [paired_ratio(r.seconds[name], r.seconds["lower_bound"]) for r in results] for name in names}
    groups = [f"{r.cell.scenario}\nN={r.cell.workers}, S={r.cell.resize_seconds:g}" for r in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(policy_bars(groups, bars, title=f"Simulated placement, {results[0].cell.regime}"))


def _described(results: Sequence[CellResult], found: Sequence[AimResult]) -> list[dict[str, object]]:
    return [
        {
            "regime": result.cell.regime,
            "workers": result.cell.workers,
            "scenario": result.cell.scenario,
            "lengths": result.cell.lengths,
            "resize_seconds": result.cell.resize_seconds,
            "iterations": result.iterations,
            "tail": result.tail,
            "seconds": {name: list(seconds) for name, seconds in result.seconds.items()},
            "moves_per_worker_and_iteration": list(result.moves),
            "handovers_per_worker_and_iteration": list(result.handovers),
            "slowest_decision_seconds": result.slowest_decision,
            "aims": [
                {
                    "aim": v.aim.name,
                    "bound": v.aim.bound,
                    "mean": v.ratio.mean,
                    "low": v.ratio.low,
                    "high": v.ratio.high,
                }
                for v in found
                if v.result is result and v.ratio.seeds > 1
            ],
        }
        for result in results
    ]
