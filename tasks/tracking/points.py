"""Points that trackers receive: the metrics of each iteration and each evaluation of a run, in order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Final

from rheostat.infra.costs import total
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.infra.trackers.records import Point, Series, Subject
from rheostat.tasks.run.keys import SFT, StageKey, evaluation_key, iteration_key
from rheostat.tasks.tracking.samples import sample_table
from rheostat.tasks.views.metrics import accuracy_of

NOT_SECONDS: Final = "weights_bytes"
"""Name of the only value in an iteration's `seconds` that is not a duration."""


@dataclass(frozen=True, slots=True)
class PointName:
    """Identity of a point: whether it is an iteration or an evaluation, and its number."""

    series: Series
    step: int


def subject_of(run: Run) -> Subject:
    """Return the name and settings under which trackers show a run. Different runs have different identities, even if
    one has reused the name of the other."""
    creation_time = "".join(letter for letter in run.record.created if letter.isdigit())[:14]
    identity = f"{run.name}-{run.record.fingerprint[:8]}-{creation_time}".replace(".", "-").replace("_", "-")
    return Subject(name=run.name, identity=identity, config=run.record.config)


def points_after(run: Run, last: PointName | None) -> Iterator[PointName]:
    """Yield the iterations and evaluations of a run that come after `last`, in order. None yields all of them."""
    folders = {*run.folders()}

    def is_there(batch: str, stage: str) -> bool:
        return batch in folders and run.has(StageKey.of(batch, stage))

    number = 0 if last is None else last.step
    if (last is None or last.series == "iteration") and is_there(evaluation_key(number), "summary"):
        yield PointName("evaluation", number)
    while is_there(iteration_key(number + 1), "seal"):
        number += 1
        yield PointName("iteration", number)
        if is_there(evaluation_key(number), "summary"):
            yield PointName("evaluation", number)


def read_point(run: Run, place: PointName, *, samples: bool = False) -> Point:
    """Read the metrics of an iteration or evaluation. With `samples`, the point also has a function that reads some
    completions."""
    if place.series == "evaluation":
        summary = run.require(StageKey.of(evaluation_key(place.step), "summary"))
        trained = None if place.step else run.find(SFT)
        scalars = evaluation_scalars(summary) | ({} if trained is None else chat_scalars(trained))
        return Point(place.series, place.step, scalars)
    sealed = run.require(StageKey.of(iteration_key(place.step), "seal"))
    table = partial(sample_table, run, place.step) if samples else None
    return Point(place.series, place.step, iteration_scalars(sealed), table)


def iteration_scalars(sealed: Manifest) -> dict[str, float]:
    """Return the metrics, durations and costs of a completed iteration, by name. Values that are not finite are left
    out."""
    metrics, provenance = sealed.metrics, sealed.provenance
    seconds = {name: value for name, value in provenance.seconds.items() if name != NOT_SECONDS}
    costs = {f"cost/{role}_worker_seconds": cost.worker_seconds for role, cost in provenance.costs.items()}
    if provenance.costs:
        whole = total(provenance.costs.values())
        costs |= {
            f"cost/{name}": float(value) for name, value in {**whole.model_dump(), "tokens": whole.tokens}.items()
        }
    return _keep_finite(
        {
            **metrics,
            **_uninformative_share(metrics),
            **{f"seconds/{name.removesuffix('_seconds')}": value for name, value in seconds.items()},
            **costs,
            **_generation_speed(sealed),
        }
    )


def _uninformative_share(metrics: Mapping[str, float]) -> dict[str, float]:
    groups = metrics.get("credit/groups", 0.0)
    return {"credit/groups_without_spread": 1 - metrics["credit/informative_groups"] / groups} if groups else {}


def _generation_speed(sealed: Manifest) -> dict[str, float]:
    rollout, seconds = sealed.provenance.costs.get("rollout"), sealed.provenance.seconds.get("rollout", 0.0)
    return {"tokens_per_second": rollout.written_tokens / seconds} if rollout is not None and seconds else {}


def evaluation_scalars(summary: Manifest) -> dict[str, float]:
    """Return the held-out accuracy of an evaluation with its confidence interval and pass@k, by name."""
    accuracy = accuracy_of(summary)
    pass_rates = {f"eval/pass_at_{k}": share for k, share in accuracy.pass_at.items()}
    numbers = {
        "accuracy": accuracy.mean,
        "low": accuracy.low,
        "high": accuracy.high,
        "problems": float(accuracy.problems),
    }
    return _keep_finite({**{f"eval/{name}": value for name, value in numbers.items()}, **pass_rates})


def chat_scalars(trained: Manifest) -> dict[str, float]:
    """Return the losses on held-out chats before and after the warm-up, by name. Empty if there are no held-out
    chats."""
    losses = {f"warmup/{name}": trained.metrics.get(name) for name in ("heldout_loss_first", "heldout_loss")}
    return _keep_finite({name: loss for name, loss in losses.items() if loss is not None})


def _keep_finite(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(scalars.items()) if isfinite(value)}
