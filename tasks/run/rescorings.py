"""What was made of a run's stored rollouts later: other scores, other advantages. Keys and facts, from the store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infra.config import Settings, difference, omit_unchanged_keys, read_recorded
from infra.errors import RunChanged
from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.config.algorithms import AlgorithmConfig
from models.config.rewards import ScoringConfig
from models.config.teachers import TeacherConfig
from tasks.config.run import RunConfig
from tasks.run.batch import Batch
from tasks.run.iteration import Iteration
from tasks.run.keys import StageKey, iteration_key, iterations_among

Kind = Literal["rescore", "recredit"]


@dataclass(frozen=True, slots=True)
class Derived:
    """Names one re-scoring or re-credit of a run."""

    kind: Kind
    name: str

    @property
    def prefix(self) -> str:
        """What all its keys begin with."""
        return f"{self.kind}/{self.name}/"

    @property
    def terms_key(self) -> StageKey:
        """Key of the manifest that says by which rewards or algorithm."""
        return StageKey.parse(f"{self.prefix}terms")

    def iteration_key(self, number: int) -> str:
        """Prefix of its manifests of one iteration."""
        return f"{self.prefix}{iteration_key(number)}"

    def key(self, number: int, stage: str) -> StageKey:
        """Key of a stage of an iteration; its seal makes its part of the iteration complete."""
        return StageKey.of(self.iteration_key(number), stage)

    def made(self, run: Run, number: int, stage: str) -> Manifest:
        """What it made of an iteration. Raises Damaged if that is gone."""
        return run.require(self.key(number, stage))

    @property
    def label(self) -> str:
        """As a person says it."""
        return f"{'re-scoring' if self.kind == 'rescore' else 're-credit'} {self.name!r}"


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

    kind: Kind
    """What was made."""
    name: str
    """Its name."""
    iterations: tuple[int, ...]
    """Iterations that are complete."""


def derived_of(run: Run) -> list[DerivedLine]:
    """Every re-scoring and re-credit of a run, with the iterations that it has."""
    kinds: tuple[Kind, ...] = ("rescore", "recredit")
    return [
        DerivedLine(kind=kind, name=name, iterations=sealed_numbers(run, Derived(kind, name)))
        for kind in kinds
        for name in run.folders(kind)
    ]


def derived_line(lines: Sequence[DerivedLine]) -> str:
    """Every re-scoring and re-credit with its iterations, in one line."""
    words = {"rescore": "re-scored as", "recredit": "re-credited as"}
    return "; ".join(f"{words[line.kind]} {line.name}: {iterations_text(line.iterations)}" for line in lines)


def iterations_text(numbers: Sequence[int]) -> str:
    """Iterations as `--iterations` takes them."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    spans = (f"{first}-{last}" if last > first else f"{first}" for first, last in zip(firsts, lasts, strict=True))
    return f"iteration{'s' if len(numbers) > 1 else ''} {','.join(spans)}" if numbers else "no iteration yet"


def sealed_numbers(run: Run, derived: Derived) -> tuple[int, ...]:
    """Iterations that a re-scoring or re-credit has done."""
    numbers = iterations_among(run.folders(derived.prefix))
    return tuple(number for number in numbers if run.find(derived.key(number, "seal")) is not None)


def rescoring_terms(run: Run, name: str) -> RescoringTerms | None:
    """By which rewards a re-scoring scores; none where there is no such re-scoring."""
    manifest = run.find(Derived("rescore", name).terms_key)
    return None if manifest is None else read_recorded(RescoringTerms, manifest.detail)


def recredit_terms(run: Run, name: str) -> RecreditTerms | None:
    """By which algorithm a re-credit goes; none where there is no such re-credit."""
    manifest = run.find(Derived("recredit", name).terms_key)
    return None if manifest is None else read_recorded(RecreditTerms, manifest.detail)


def own_terms(run: Run) -> RecreditTerms:
    """By which algorithm the run itself goes."""
    return read_recorded(RecreditTerms, {"algorithm": run.record.config["algorithm"]})


def check_terms(run: Run, derived: Derived, terms: RescoringTerms | RecreditTerms) -> None:
    """Raise RunChanged if the re-scoring or re-credit of that name was begun with other terms."""
    begun = run.find(derived.terms_key)
    if begun is None:
        return
    recorded, wanted = omit_unchanged_keys(begun.detail, terms), terms.as_recorded()
    if recorded == wanted:
        return
    raise RunChanged(
        f"{derived.label} of run {run.name!r} was begun with other terms: "
        f"{difference(recorded, wanted)}; choose another name with --as"
    )


def rescored_batches(iteration: Iteration, derived: Derived) -> list[Batch]:
    """The batches of a stored iteration, as a re-scoring goes over them."""
    return [batch.again(derived.prefix) for batch in iteration.batches]


def rescored_shards(iteration: Iteration, derived: Derived) -> list[tuple[Manifest, Manifest, Manifest]]:
    """Rollouts, stored scores and new scores of a re-scored iteration, shard by shard. Damaged if one is missing."""
    new = [manifest for batch in rescored_batches(iteration, derived) for manifest in batch.stage("scoring")]
    return list(zip(iteration.stage("rollout"), iteration.stage("scoring"), new, strict=True))


class Rescoring(Settings):
    """Iterations of a run that are to be scored again."""

    config: RunConfig
    """The run's own configuration with the new rewards."""
    name: str
    """Name of the re-scoring."""
    iterations: tuple[int, ...]
    """Which iterations."""


class Recredit(Settings):
    """Iterations of a run that are to have other advantages."""

    config: RunConfig
    """The run's own configuration with the new algorithm, and with the rewards behind the scores."""
    name: str
    """Name of the re-credit."""
    scores: str | None
    """Re-scoring whose scores are taken; none takes the run's own."""
    iterations: tuple[int, ...]
    """Which iterations."""
