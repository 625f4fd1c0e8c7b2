"""What was made of a run's stored rollouts later: other scores, other advantages. Keys and facts, from the store."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from infra.config import Settings
from infra.errors import Damaged, RunChanged
from infra.manifests import Manifest
from infra.runs import Run, difference
from models.algorithms.config import AlgorithmConfig, TeacherConfig
from models.rewards.config import ScoringConfig
from tasks.plan import BatchPlan, iteration_key, waves_of

RESCORING, RECREDIT = "rescore", "recredit"


@dataclass(frozen=True, slots=True)
class Derived:
    """Names one re-scoring or re-credit of a run."""

    kind: Literal["rescore", "recredit"]
    name: str

    @property
    def prefix(self) -> str:
        """What all its keys begin with."""
        return f"{self.kind}/{self.name}/"

    @property
    def terms_key(self) -> str:
        """Key of the manifest that says by which rewards or algorithm."""
        return f"{self.prefix}terms"

    def iteration_key(self, number: int) -> str:
        """Prefix of its manifests of one iteration."""
        return f"{self.prefix}{iteration_key(number)}"

    def seal_key(self, number: int) -> str:
        """Key of the manifest that makes its part of an iteration complete."""
        return f"{self.iteration_key(number)}/seal"

    @property
    def label(self) -> str:
        """As a person says it."""
        return f"{'re-scoring' if self.kind == RESCORING else 're-credit'} {self.name!r}"


class RescoringTerms(Settings):
    """By which rewards a re-scoring scores; the detail of its first manifest."""

    scoring: ScoringConfig


class RecreditTerms(Settings):
    """By which algorithm a re-credit goes, and from which scores; the detail of its first manifest."""

    algorithm: AlgorithmConfig
    scores: str | None = None
    """Name of a re-scoring; none are the run's own scores."""

    @property
    def teacher(self) -> TeacherConfig | None:
        """Whose opinion the algorithm needs."""
        return None if self.algorithm.distillation is None else self.algorithm.distillation.teacher


class DerivedLine(Settings):
    """A re-scoring or re-credit in a run's description."""

    kind: Literal["rescore", "recredit"]
    """What was made."""
    name: str
    """Its name."""
    iterations: tuple[int, ...]
    """Iterations that are complete."""


def derived_of(run: Run) -> list[DerivedLine]:
    """Every re-scoring and re-credit of a run, with the iterations that it has."""
    kinds: tuple[Literal["rescore", "recredit"], ...] = ("rescore", "recredit")
    return [
        DerivedLine(kind=kind, name=name, iterations=sealed_numbers(run, Derived(kind, name)))
        for kind in kinds
        for name in run.folders(kind)
    ]


def sealed_numbers(run: Run, derived: Derived) -> tuple[int, ...]:
    """Iterations that a re-scoring or re-credit has done."""
    numbers = (int(m.removeprefix("it-")) for m in run.folders(derived.prefix) if m.startswith("it-"))
    return tuple(number for number in numbers if run.find(derived.seal_key(number)) is not None)


def rescoring_terms(run: Run, name: str) -> RescoringTerms | None:
    """By which rewards a re-scoring scores; none where there is no such re-scoring."""
    manifest = run.find(Derived("rescore", name).terms_key)
    return None if manifest is None else RescoringTerms.model_validate(manifest.detail)


def recredit_terms(run: Run, name: str) -> RecreditTerms | None:
    """By which algorithm a re-credit goes; none where there is no such re-credit."""
    manifest = run.find(Derived("recredit", name).terms_key)
    return None if manifest is None else RecreditTerms.model_validate(manifest.detail)


def own_terms(run: Run) -> RecreditTerms:
    """By which algorithm the run itself goes."""
    return RecreditTerms.model_validate({"algorithm": run.record.config["algorithm"]})


def check_terms(run: Run, derived: Derived, terms: RescoringTerms | RecreditTerms) -> None:
    """Raise RunChanged if the re-scoring or re-credit of that name was begun with other terms."""
    begun = run.find(derived.terms_key)
    if begun is None or begun.detail == terms.model_dump(mode="json"):
        return
    raise RunChanged(
        f"{derived.label} of run {run.name!r} was begun with other terms: "
        f"{difference(begun.detail, terms.model_dump(mode='json'))}; choose another name with --as"
    )


def rescored_waves(run: Run, name: str, number: int) -> list[BatchPlan]:
    """The batches of a stored iteration, as a re-scoring goes over them."""
    prefix = Derived("rescore", name).prefix
    waves = waves_of(run, number)
    return [wave.model_copy(update={"key": f"{prefix}{wave.key}", "rescoring": prefix}) for wave in waves]


def rescored_pairs(run: Run, name: str, number: int) -> Iterator[tuple[Manifest, Manifest, Manifest]]:
    """Rollouts, stored scores and new scores of a re-scored iteration, shard by shard. Damaged if one is missing."""
    for wave in rescored_waves(run, name, number):
        for shard in range(wave.num_shards):
            scored = wave.shard_key("scoring", shard)
            keys = (wave.rollout_key(shard), scored.removeprefix(wave.rescoring), scored)
            rollouts, stored, new = (_required(run, key) for key in keys)
            yield rollouts, stored, new


def _required(run: Run, key: str) -> Manifest:
    manifest = run.find(key)
    if manifest is None:
        raise Damaged(f"run {run.name!r}: manifest {key!r} is missing")
    return manifest
