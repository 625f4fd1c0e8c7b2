"""What the reading commands show; needs neither Prefect's API nor a worker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pyarrow as pa

from infra.config import Settings
from infra.errors import BadInput
from infra.export import export_parquet
from infra.runs import Run, list_runs, open_run
from infra.shards import read_shard
from infra.verify import verify_store
from models.config import ScoringConfig
from tasks.invariants import check_invariants
from tasks.plan import iteration_key
from tasks.reports import Accuracy, IterationReport, evaluations_of, reports_of
from tasks.samples import Sample, sample_rollouts


class RunDescription(Settings):
    """A run as the store knows it."""

    name: str
    """Name."""
    created: str
    """When it was made, UTC."""
    fingerprint: str
    """Digest of the configuration that results depend on."""
    evaluations: list[Accuracy]
    """Held-out evaluations, in order."""
    iterations: list[IterationReport]
    """Sealed iterations, in order."""


def describe_run(store: str, name: str) -> RunDescription:
    """Read a run's seals and evaluations."""
    run = open_run(store, name)
    return RunDescription(
        name=name,
        created=run.record.created,
        fingerprint=run.record.fingerprint,
        evaluations=evaluations_of(run),
        iterations=reports_of(run, term=_terms(run)[0]),
    )


def describe_runs(store: str) -> list[dict[str, object]]:
    """One row per run of a store."""
    rows: list[dict[str, object]] = []
    for name in list_runs(store):
        described = describe_run(store, name)
        accuracy = described.evaluations[-1].mean if described.evaluations else None
        rows.append(
            {
                "run": name,
                "created": described.created,
                "iterations": len(described.iterations),
                "accuracy": None if accuracy is None else round(accuracy, 3),
                "fingerprint": described.fingerprint,
            }
        )
    return rows


def iteration_rows(description: RunDescription) -> list[dict[str, object]]:
    """The iterations of a run as rows of a terminal's table."""
    return [
        {
            "iteration": report.iteration,
            "accuracy": f"{report.accuracy:.3f}",
            "reward": f"{report.reward:.3f}",
            "length": f"{report.length:.1f}",
            "kl": f"{report.kl:.4f}",
            "missing": report.missing,
            **{f"{name} s": f"{seconds:.2f}" for name, seconds in report.seconds.items()},
            "policy": report.policy[:16],
        }
        for report in description.iterations
    ]


def read_rollouts(
    store: str, name: str, *, iteration: int | None, order: Literal["position", "reward", "length"], limit: int
) -> list[Sample]:
    """Completions of one iteration, by default the last sealed one."""
    run = open_run(store, name)
    if iteration is None:
        reports = reports_of(run, term=_terms(run)[0])
        if not reports:
            raise BadInput(f"run {name!r} has no sealed iteration yet: name one with --iteration")
        iteration = reports[-1].iteration
    return sample_rollouts(run, iteration, limit=limit, order=order)


def export_run(store: str, name: str) -> list[Path]:
    """Write one Parquet file per sealed iteration: rollouts with their scores; return the files."""
    run = open_run(store, name)
    numbers = [report.iteration for report in reports_of(run, term=_terms(run)[0])]
    return [export_parquet(run, _scored(run, number), iteration_key(number)) for number in numbers]


def verify_run(store: str, name: str) -> list[str]:
    """Check every digest and every invariant of a run; one line per problem, naming the offender."""
    run = open_run(store, name)
    return verify_store(run) or check_invariants(run)


def _scored(run: Run, number: int) -> Iterator[pa.Table]:
    """An iteration's rollouts and scores side by side, shard by shard, with run and iteration as columns."""
    for rollouts in run.manifests(f"{iteration_key(number)}/rollout/"):
        table = read_shard(run.store, rollouts.shards[0])
        scored = run.find(rollouts.key.replace("/rollout/", "/scoring/"))
        assert scored is not None, "a sealed iteration has scores for every rollout shard"
        scores = read_shard(run.store, scored.shards[0])
        for name in scores.column_names:
            if name not in ("prompt_row", "sample"):
                table = table.append_column(name, scores[name])
        table = table.add_column(0, "iteration", pa.array([number] * table.num_rows, pa.int32()))
        yield table.add_column(0, "run", pa.array([run.name] * table.num_rows))


def _terms(run: Run) -> tuple[str, ...]:
    return ScoringConfig.model_validate(run.record.config["scoring"]).terms
