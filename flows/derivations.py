"""The commands that make more of a run's stored rollouts, and what they came to, for people."""

import argparse
import json
from collections.abc import Iterable, Sequence

from flows.launcher import recredit_here, rescore_here
from flows.reading import open_known_run
from flows.requests import request_recredit, request_rescoring
from flows.terminal import table, write
from infra.config import Settings
from tasks.derived import Derived
from tasks.reports import shown


def rescore(options: argparse.Namespace) -> int:
    """Score stored rollouts again, and show how the rewards compare."""
    request = request_rescoring(
        options.store,
        options.run,
        rewards=options.rewards,
        name=options.name,
        iterations=options.iterations,
        overrides=options.overrides,
    )
    rescore_here(request)
    lines = rescored_iterations(options.store, options.run, request.name, request.iterations)
    _show(options, Derived("rescore", request.name), lines, rescored_rows(lines))
    return 0


def recredit(options: argparse.Namespace) -> int:
    """Credit stored rollouts again, and show how the advantages compare."""
    request = request_recredit(
        options.store,
        options.run,
        algorithm=options.algorithm,
        scores=options.scores,
        name=options.name,
        iterations=options.iterations,
        overrides=options.overrides,
    )
    recredit_here(request)
    lines = recredited_iterations(options.store, options.run, request.name, request.iterations)
    _show(options, Derived("recredit", request.name), lines, recredited_rows(lines))
    return 0


def _show(
    options: argparse.Namespace, derived: Derived, lines: Sequence[Settings], rows: Sequence[dict[str, str]]
) -> None:
    if options.json:
        write(json.dumps({"name": derived.name, "iterations": [line.model_dump() for line in lines]}, indent=2))
    else:
        write(f"\n{table(rows)}\n{derived.label} of run {options.run}")


class RescoredIteration(Settings):
    """New rewards of an iteration beside the stored ones."""

    iteration: int
    """Counted from 1."""
    completions: int
    """Completions scored again."""
    missing: int
    """Those without a new score."""
    stored_reward: float | None
    """Mean of the stored rewards."""
    reward: float | None
    """Mean of the new rewards."""
    correlation: float | None
    """Pearson's, over completions with both; none where one side is the same everywhere."""
    changed: float
    """Share of completions whose reward is another."""


def rescored_iterations(store: str, run_name: str, name: str, numbers: Iterable[int]) -> list[RescoredIteration]:
    """How the new rewards of some iterations compare."""
    run, derived = open_known_run(store, run_name), Derived("rescore", name)
    return [_rescored(number, run.require(derived.seal_key(number)).metrics) for number in numbers]


def _rescored(number: int, metrics: dict[str, float]) -> RescoredIteration:
    return RescoredIteration(
        iteration=number,
        completions=int(metrics["completions"]),
        missing=int(metrics["missing"]),
        stored_reward=metrics.get("stored_reward_mean"),
        reward=metrics.get("reward_mean"),
        correlation=metrics.get("correlation"),
        changed=metrics["changed_fraction"],
    )


def rescored_rows(lines: Sequence[RescoredIteration]) -> list[dict[str, str]]:
    """The comparison as rows of a terminal's table."""
    return [
        {
            "iteration": str(line.iteration),
            "completions": str(line.completions),
            "missing": str(line.missing),
            "stored reward": shown(line.stored_reward),
            "new reward": shown(line.reward),
            "correlation": shown(line.correlation),
            "changed": f"{line.changed:.1%}",
        }
        for line in lines
    ]


class RecreditedIteration(Settings):
    """New advantages of an iteration beside those that it learnt from."""

    iteration: int
    """Counted from 1."""
    samples: int
    """Training samples."""
    informative_groups: int
    """Groups that teach something."""
    advantage_size: float | None
    """Mean absolute advantage of a completion token; none without tokens."""
    coinciding: int
    """Samples that the run learnt from as well."""
    correlation: float | None
    """Pearson's of their tokens' advantages; none where one side is the same everywhere."""


def recredited_iterations(store: str, run_name: str, name: str, numbers: Iterable[int]) -> list[RecreditedIteration]:
    """How the new advantages of some iterations compare."""
    run, derived = open_known_run(store, run_name), Derived("recredit", name)
    return [_recredited(number, run.require(derived.seal_key(number)).metrics) for number in numbers]


def _recredited(number: int, metrics: dict[str, float]) -> RecreditedIteration:
    return RecreditedIteration(
        iteration=number,
        samples=int(metrics["samples"]),
        informative_groups=int(metrics["informative_groups"]),
        advantage_size=metrics.get("advantage_size"),
        coinciding=int(metrics["coinciding"]),
        correlation=metrics.get("correlation"),
    )


def recredited_rows(lines: Sequence[RecreditedIteration]) -> list[dict[str, str]]:
    """The comparison as rows of a terminal's table."""
    return [
        {
            "iteration": str(line.iteration),
            "samples": str(line.samples),
            "informative groups": str(line.informative_groups),
            "mean |advantage|": shown(line.advantage_size),
            "coinciding": str(line.coinciding),
            "correlation": shown(line.correlation),
        }
        for line in lines
    ]
