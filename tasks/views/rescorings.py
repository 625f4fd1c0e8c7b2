"""How the new rewards and advantages of stored rollouts compare with those that the run had."""

from collections.abc import Iterable

from infra.config import Settings
from tasks.run.rescorings import Derived
from tasks.views.runs import open_known_run


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
    return [_rescored(number, derived.made(run, number, "seal").metrics) for number in numbers]


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
    return [_recredited(number, derived.made(run, number, "seal").metrics) for number in numbers]


def _recredited(number: int, metrics: dict[str, float]) -> RecreditedIteration:
    return RecreditedIteration(
        iteration=number,
        samples=int(metrics["samples"]),
        informative_groups=int(metrics["informative_groups"]),
        advantage_size=metrics.get("advantage_size"),
        coinciding=int(metrics["coinciding"]),
        correlation=metrics.get("correlation"),
    )
