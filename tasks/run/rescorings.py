"""Re-scorings and re-credits, which compute other scores or other advantages later from a run's stored rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from infra.config import Settings, describe_difference, encode_recorded, read_recorded
from infra.errors import RunChanged
from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.config.algorithms import AlgorithmConfig
from models.config.rewards import ScoringConfig
from models.config.teachers import TeacherConfig
from tasks.config.run import RunConfig
from tasks.run.batch import Batch
from tasks.run.iteration import Iteration
from tasks.run.keys import StageKey, iteration_key, iteration_numbers

Kind = Literal["rescore", "recredit"]


@dataclass(frozen=True, slots=True)
class DerivedResult:
    """Name of one re-scoring or re-credit of a run."""

    kind: Kind
    name: str

    @property
    def prefix(self) -> str:
        """Prefix of all keys of the re-scoring or re-credit."""
        return f"{self.kind}/{self.name}/"

    @property
    def terms_key(self) -> StageKey:
        """Key of the manifest that records the rewards or the algorithm."""
        return StageKey.parse(f"{self.prefix}terms")

    def iteration_key(self, number: int) -> str:
        """Return the key prefix of one iteration."""
        return f"{self.prefix}{iteration_key(number)}"

    def key(self, number: int, stage: str) -> StageKey:
        """Return the key of a stage of an iteration. The iteration is complete when its seal exists."""
        return StageKey.of(self.iteration_key(number), stage)

    def stage_manifest(self, run: Run, number: int, stage: str) -> Manifest:
        """Return the manifest of a stage of an iteration. Raises Damaged if it is missing."""
        return run.require(self.key(number, stage))

    @property
    def label(self) -> str:
        """Text that names the re-scoring or re-credit for a user."""
        return f"{'re-scoring' if self.kind == 'rescore' else 're-credit'} {self.name!r}"


class RescoringTerms(Settings):
    """Rewards of a re-scoring, stored in the detail of its first manifest."""

    scoring: ScoringConfig


class RecreditTerms(Settings):
    """Algorithm of a re-credit and the source of its scores, stored in the detail of its first manifest."""

    algorithm: AlgorithmConfig
    scores: str | None = None
    """Name of the re-scoring whose scores are used. None means the run's own scores."""

    @property
    def teacher(self) -> TeacherConfig | None:
        """Teacher whose log-probs the algorithm needs, or None."""
        return None if self.algorithm.distillation is None else self.algorithm.distillation.teacher


class DerivedSummary(Settings):
    """Re-scoring or re-credit in the description of a run."""

    kind: Kind
    """Kind of the result."""
    name: str
    """Name of the re-scoring or re-credit."""
    iterations: tuple[int, ...]
    """Numbers of the completed iterations."""


def list_derived_results(run: Run) -> list[DerivedSummary]:
    """Return every re-scoring and re-credit of a run, with its completed iterations."""
    kinds: tuple[Kind, ...] = ("rescore", "recredit")
    return [
        DerivedSummary(kind=kind, name=name, iterations=sealed_numbers(run, DerivedResult(kind, name)))
        for kind in kinds
        for name in run.folders(kind)
    ]


def describe_derived_results(lines: Sequence[DerivedSummary]) -> str:
    """Return one line of text with every re-scoring and re-credit and its iterations."""
    words = {"rescore": "re-scored as", "recredit": "re-credited as"}
    return "; ".join(f"{words[line.kind]} {line.name}: {iterations_text(line.iterations)}" for line in lines)


def iterations_text(numbers: Sequence[int]) -> str:
    """Return iteration numbers as text in the format of `--iterations`."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    spans = (f"{first}-{last}" if last > first else f"{first}" for first, last in zip(firsts, lasts, strict=True))
    return f"iteration{'s' if len(numbers) > 1 else ''} {','.join(spans)}" if numbers else "no iteration yet"


def sealed_numbers(run: Run, derived: DerivedResult) -> tuple[int, ...]:
    """Return the numbers of the iterations that a re-scoring or re-credit has completed."""
    numbers = iteration_numbers(run.folders(derived.prefix))
    return tuple(number for number in numbers if run.find(derived.key(number, "seal")) is not None)


def rescoring_terms(run: Run, name: str) -> RescoringTerms | None:
    """Return the rewards of a re-scoring, or None if there is no such re-scoring."""
    manifest = run.find(DerivedResult("rescore", name).terms_key)
    return None if manifest is None else read_recorded(RescoringTerms, manifest.detail)


def recredit_terms(run: Run, name: str) -> RecreditTerms | None:
    """Return the algorithm of a re-credit, or None if there is no such re-credit."""
    manifest = run.find(DerivedResult("recredit", name).terms_key)
    return None if manifest is None else read_recorded(RecreditTerms, manifest.detail)


def recorded_terms(run: Run) -> RecreditTerms:
    """Return the algorithm of the run itself."""
    return read_recorded(RecreditTerms, {"algorithm": run.record.config["algorithm"]})


def check_terms(run: Run, derived: DerivedResult, terms: RescoringTerms | RecreditTerms) -> None:
    """Raise RunChanged if the re-scoring or re-credit of that name was begun with other terms."""
    manifest = run.find(derived.terms_key)
    if manifest is None:
        return
    recorded, requested = encode_recorded(manifest.detail, terms), terms.as_recorded()
    if recorded == requested:
        return
    raise RunChanged(
        f"{derived.label} of run {run.name!r} was started with other settings: "
        f"{describe_difference(terms.present_names(recorded), terms.present_names(requested))}. "
        "Choose another name with --as."
    )


def rescored_batches(iteration: Iteration, derived: DerivedResult) -> list[Batch]:
    """Return the batches of a stored iteration under the keys of a re-scoring."""
    return [batch.as_rescoring(derived.prefix) for batch in iteration.batches]


def rescored_shards(iteration: Iteration, derived: DerivedResult) -> list[tuple[Manifest, Manifest, Manifest]]:
    """Return rollouts, stored scores and new scores of a re-scored iteration, shard by shard. Raises Damaged if one is
    missing."""
    new = [manifest for batch in rescored_batches(iteration, derived) for manifest in batch.stage_manifests("scoring")]
    return list(zip(iteration.shard_manifests("rollout"), iteration.shard_manifests("scoring"), new, strict=True))


class Rescoring(Settings):
    """Request to score iterations of a run again."""

    config: RunConfig
    """Configuration of the run, with the new rewards."""
    name: str
    """Name of the re-scoring."""
    iterations: tuple[int, ...]
    """Numbers of the iterations."""


class Recredit(Settings):
    """Request to compute other advantages for iterations of a run."""

    config: RunConfig
    """Configuration of the run, with the new algorithm and with the rewards that gave the scores."""
    name: str
    """Name of the re-credit."""
    scores: str | None
    """Name of the re-scoring whose scores are used. None means the run's own scores."""
    iterations: tuple[int, ...]
    """Numbers of the iterations."""
