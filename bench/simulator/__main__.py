"""Command `python -m bench.simulator`, which compares placement policies on simulated workers."""

import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import ValidationError

from bench.simulator.cells import (
    AIMS,
    POLICIES,
    REGIMES,
    AimResult,
    CellResult,
    Load,
    Ratio,
    check_aims,
    evaluate_cell,
    load_of,
    paired_ratio,
    recorded_load,
)
from bench.simulator.workload import KNOWN, SCENARIOS
from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import nearest_name
from rheostat.infra.terminal import Json, command_app, run_command, table, write
from rheostat.placement.records import MeasuredRun

MAX_WORKERS = 4096
MAX_MISSES_SHOWN = 40
"""Maximum number of missed aims that are listed individually. An aim is a bound on a result of the adaptive policy,
such as its time relative to taking turns."""

Workers = Annotated[str, Parameter(metavar="N,…", help="numbers of worker slots")]
Scenario = Annotated[str, Parameter(metavar="NAME,…", help=", ".join(SCENARIOS))]
Regime = Annotated[str, Parameter(metavar="NAME,…", help=", ".join(REGIMES))]
Lengths = Annotated[str | None, Parameter(metavar="NAME,…", show_default="the regime's", help=", ".join(KNOWN))]
ResizeSeconds = Annotated[str, Parameter(metavar="S,…", help="seconds that the move of a worker takes")]
Seeds = Annotated[int, Parameter(metavar="N", help="number of random workloads for each cell")]
Iterations = Annotated[int | None, Parameter(metavar="N", show_default="12", help="number of iterations of a workload")]
Policies = Annotated[str, Parameter(metavar="NAME,…", help=", ".join(POLICIES))]
Aims = Annotated[bool, Parameter(help="also print the aims of the adaptive policy and the cells that miss them")]
Plot = Annotated[Path | None, Parameter(metavar="FILE", help="write a bar chart of the times to this PNG file")]
Stages = Annotated[
    Path | None,
    Parameter(
        metavar="FILE",
        help="simulate a run from its measurements (output of `rheostat placement RUN --stages`) instead of a regime",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Simulated:
    """Command-line options that select the cells to simulate. A cell is a combination of pool size, load and cost of
    moving a worker."""

    workers: Workers = "8,64"
    scenario: Scenario = "all"
    regime: Regime = "throughput"
    lengths: Lengths = None
    resize_seconds: ResizeSeconds = "2"
    iterations: Iterations = None
    stages: Stages = None

    def loads(self) -> list[Load]:
        """Return the loads of all selected cells. Raises BadInput if a name is unknown or a number is invalid."""
        if self.iterations is not None and self.iterations < 2:
            raise BadInput(f"--iterations must be at least 2, got {self.iterations}")
        resize_seconds = _numbers("--resize-seconds", self.resize_seconds, minimum=0)
        if self.stages is not None:
            return [_recorded(self.stages, resize_seconds)]
        return [
            load_of(
                regime,
                workers=workers,
                scenario=scenario,
                lengths=lengths,
                resize_seconds=resize_seconds,
                iterations=self.iterations,
            )
            for regime in _names("--regime", self.regime, list(REGIMES))
            for lengths in (_names("--lengths", self.lengths, list(KNOWN)) if self.lengths else (None,))
            for workers in _workers(self.workers)
            for scenario in _names("--scenario", self.scenario, list(SCENARIOS))
        ]


DEFAULTS = Simulated()


def simulate(
    *,
    what: Simulated = DEFAULTS,
    seeds: Seeds = 20,
    policies: Policies = "all",
    aims: Aims = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Simulate every selected cell and print the results. Raises BadInput if a name is unknown or a number is
    invalid."""
    compared = _names("--policies", policies, POLICIES)
    if seeds < 1:
        raise BadInput(f"--seeds must be at least 1, got {seeds}")
    results: list[CellResult] = []
    for load in what.loads():
        results += evaluate_cell(load, seeds=seeds, policies=compared, clock=time.process_time, report=_print_progress)
    if plot is not None:
        _plot(results, plot)
    aim_results = check_aims(results)
    if as_json:
        write(json.dumps(_to_documents(results, aim_results), indent=2))
        return
    write(table(_time_rows(results)))
    if aims:
        write(f"\n{table(_aim_rows(aim_results))}{_describe_misses(aim_results)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulator with command-line arguments and return its exit status."""
    summary = "Compare placement policies over simulated workers. Separate values by commas; `all` is every name."
    app = command_app("simulator", summary, example="example: python -m bench.simulator --workers 8,64")
    app.default(simulate)
    return run_command(app, arguments, again="nothing was written")


def _recorded(path: Path, resize_seconds: Sequence[float]) -> Load:
    """Read the measurements of a run from a file. Return a load with the same work and the same number of workers.

    Raises BadInput if the file cannot be read, has fewer than two stages, or was measured with more than one reward
    model.
    """
    try:
        run = MeasuredRun.model_validate_json(path.read_bytes())
    except OSError as error:
        raise BadInput(
            f"--stages {path} cannot be read: {error.strerror}. Name an output of `rheostat placement RUN --stages`."
        ) from None
    except ValidationError:
        raise BadInput(
            f"--stages {path}: the file is not an output of `rheostat placement RUN --stages`. Write it with this "
            "command."
        ) from None
    for stage in run.stages:
        if stage.scoring.units != stage.rollout.units or stage.scoring.slots > 1:
            raise BadInput(
                f"run {run.run!r} cannot be simulated, because the simulator supports only one reward model with one "
                f"slot per worker, but the run has {stage.scoring.units} units to score for {stage.rollout.units} to "
                f"generate and {stage.scoring.slots} slots per worker. Choose another run."
            )
    if len(run.stages) < 2:
        raise BadInput(
            f"run {run.run!r} cannot be simulated, because it has only {len(run.stages)} finished batches, but at "
            "least 2 are needed. Wait until it has more."
        )
    pairs = [(stage.rollout, stage.scoring) for stage in run.stages]
    return recorded_load(run.run, pairs, workers=run.workers, resize_seconds=resize_seconds)


def _names(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(known) if text == "all" else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise BadInput(f"{option}: there is no {name!r}. Use {', '.join(known)} or all{nearest_name(name, known)}")
    return names


def _numbers(option: str, text: str, *, minimum: float) -> tuple[float, ...]:
    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        raise BadInput(f"{option} must be numbers separated by commas, such as 8,64, got {text!r}") from None
    if not all(minimum <= number < float("inf") for number in numbers):
        raise BadInput(f"{option} must be numbers of at least {minimum:g}, got {text!r}")
    return numbers


def _workers(text: str) -> tuple[int, ...]:
    numbers = _numbers("--workers", text, minimum=2)
    if any(number != int(number) or number > MAX_WORKERS for number in numbers):
        raise BadInput(f"--workers must be whole numbers from 2 to {MAX_WORKERS}, got {text!r}")
    return tuple(int(number) for number in numbers)


def _print_progress(what: str) -> None:
    """Print the progress on stderr. A terminal shows only the latest line. In a file or a pipe, each cell gets a
    line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what}")
    elif what.partition(": seed ")[2].startswith("1 "):
        sys.stderr.write(f"{what.partition(': seed ')[0]}\n")
    sys.stderr.flush()


def _time_rows(results: Sequence[CellResult]) -> list[dict[str, str]]:
    """Return one table row for each cell, with the time of each policy relative to the lower bound.

    If the lower bound was not computed, the row contains times in seconds.
    """
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


def _aim_rows(aim_results: Sequence[AimResult]) -> list[dict[str, str]]:
    """Return one table row for each aim: the number of cells, the number of cells that satisfy the aim, and the worst
    cell."""
    rows = []
    for aim in AIMS:
        cells = [verdict for verdict in aim_results if verdict.aim is aim]
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


def _describe_misses(aim_results: Sequence[AimResult]) -> str:
    missed = [verdict for verdict in aim_results if not verdict.holds]
    if not missed:
        return "\nevery cell reaches its aims"
    lines = [f"missed: {v.aim.name} {v.ratio} ({v.aim.bound:g}): {v.result.cell}" for v in missed[:MAX_MISSES_SHOWN]]
    more = len(missed) - len(lines)
    return "\n" + "\n".join(lines) + (f"\nand {more} more" if more else "")


def _plot(results: Sequence[CellResult], path: Path) -> None:
    if any("lower_bound" not in result.seconds for result in results):
        raise BadInput(
            "--plot shows times relative to the policy lower_bound, which is not simulated. Add lower_bound to "
            "--policies."
        )
    names = [name for name in results[0].seconds if name != "lower_bound" and all(name in r.seconds for r in results)]
    bars = {name: [paired_ratio(r.seconds[name], r.seconds["lower_bound"]) for r in results] for name in names}
    groups = [f"{r.cell.scenario}\nN={r.cell.workers}, S={r.cell.resize_seconds:g}" for r in results]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_policy_bars(groups, bars, title=f"Simulated placement, {results[0].cell.regime}"))


def _policy_bars(groups: Sequence[str], bars: Mapping[str, Sequence[Ratio]], *, title: str) -> bytes:
    """Return a PNG with one group of bars for each cell and one bar for each policy.

    A bar shows the time relative to the lower bound, with its 95% interval.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # takes 0.5 s to import, and only --plot needs it

    figure = Figure(figsize=(max(7.0, 1.4 * len(groups) + 2), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(bars)
    for number, (policy, ratios) in enumerate(bars.items()):
        at = [group + (number - (len(bars) - 1) / 2) * width for group in range(len(groups))]
        # No interval can be computed from a single seed.
        spans = [ratio.high - ratio.mean if ratio.seeds > 1 else 0.0 for ratio in ratios]
        color = "black" if policy == "adaptive" else colormaps["tab10"](number % 10)
        axes.bar(at, [ratio.mean for ratio in ratios], width, yerr=spans, label=policy, color=color, ecolor="gray")
    axes.axhline(1.0, color="gray", linewidth=1)
    axes.set(title=title, ylabel="time over the lower bound", ylim=(0.9, None))
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=3, fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    return buffer.getvalue()


def _to_documents(results: Sequence[CellResult], aim_results: Sequence[AimResult]) -> list[dict[str, object]]:
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
                for v in aim_results
                if v.result is result and v.ratio.seeds > 1
            ],
        }
        for result in results
    ]


if __name__ == "__main__":
    sys.exit(main())
