"""Names and stored settings of rescorings and recredits. A rescoring computes new scores for the stored rollouts of
a run, and a recredit computes new advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rheostat.infra.config import Settings, describe_difference, encode_recorded, read_recorded
from rheostat.infra.errors import RunChanged
from rheostat.infra.store.chain import Chain
from rheostat.infra.store.dependencies import DEPENDENCIES, recorded_commits, recorded_config
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run, open_run
from rheostat.models.config.algorithms import AlgorithmConfig
from rheostat.models.config.rewards import ScoringConfig
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.hub_inputs import with_derived_commits
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey, iteration_key, iteration_numbers

Kind = Literal["rescore", "recredit"]


@dataclass(frozen=True, slots=True)
class DerivedResult:
    """Name of a rescoring or recredit, from which the keys of its results are built."""

    kind: Kind
    name: str

    @property
    def prefix(self) -> str:
        """Prefix of the keys of all its results, for example `rescore/strict/`."""
        return f"{self.kind}/{self.name}/"

    @property
    def terms_key(self) -> StageKey:
        """Key under which the rewards or the algorithm are stored."""
        return StageKey.parse(f"{self.prefix}terms")

    def iteration_key(self, number: int) -> str:
        """Return the prefix of the keys that belong to one iteration."""
        return f"{self.prefix}{iteration_key(number)}"

    def key(self, number: int, stage: str) -> StageKey:
        """Return the key of one stage of an iteration. The iteration is complete when the stage `seal` is stored."""
        return StageKey.of(self.iteration_key(number), stage)

    def stage_manifest(self, run: Run, number: int, stage: str) -> Manifest:
        """Return the stored result of one stage of an iteration. Raises Damaged if it is missing."""
        return run.require(self.key(number, stage))

    @property
    def label(self) -> str:
        """Name for messages to the user, for example "rescoring 'strict'"."""
        return f"{'rescoring' if self.kind == 'rescore' else 'recredit'} {self.name!r}"


class RescoringTerms(Settings):
    """Rewards that a rescoring uses, stored when it begins, so that it cannot continue with other rewards."""

    scoring: ScoringConfig


class RecreditTerms(Settings):
    """Algorithm and scores that a recredit uses, stored when it begins, so that it cannot continue with others."""

    algorithm: AlgorithmConfig
    scores: str | None = None
    """Name of the rescoring whose scores are used. None means the run's own scores."""


class DerivedSummary(Settings):
    """New scores (rescoring) or new advantages (recredit) that were computed for a run, and the iterations that are
    complete."""

    kind: Kind
    """Whether new scores ("rescore") or new advantages ("recredit") were computed."""
    name: str
    """Name of the rescoring or recredit."""
    iterations: tuple[int, ...]
    """Numbers of the completed iterations."""
    commits: dict[str, str] = {}
    """Commit of each model on the Hugging Face Hub that was used, by its kind and name."""


def list_derived_results(run: Run) -> list[DerivedSummary]:
    """Return all rescorings and recredits that a run has, with the iterations for which each is complete."""
    kinds: tuple[Kind, ...] = ("rescore", "recredit")
    results = [DerivedResult(kind, name) for kind in kinds for name in run.folders(kind)]
    return [
        DerivedSummary(
            kind=each.kind,
            name=each.name,
            iterations=sealed_numbers(run, each),
            commits=recorded_commits(run, each.prefix),
        )
        for each in results
    ]


def describe_derived_results(lines: Sequence[DerivedSummary]) -> str:
    """Return all rescorings and recredits of a run in one line, with their completed iterations and their commits."""
    words = {"rescore": "rescored as", "recredit": "recredited as"}
    return "; ".join(
        f"{words[line.kind]} {line.name}: {iterations_text(line.iterations)}{_describe_commits(line.commits)}"
        for line in lines
    )


def _describe_commits(commits: Mapping[str, str]) -> str:
    return f" ({', '.join(f'{name} at commit {commit[:12]}' for name, commit in commits.items())})" if commits else ""


def iterations_text(numbers: Sequence[int]) -> str:
    """Return iteration numbers in the form that `--iterations` accepts, for example "iterations 1-3,5"."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    spans = (f"{first}-{last}" if last > first else f"{first}" for first, last in zip(firsts, lasts, strict=True))
    return f"iteration{'s' if len(numbers) > 1 else ''} {','.join(spans)}" if numbers else "no iteration yet"


def sealed_numbers(run: Run, derived: DerivedResult) -> tuple[int, ...]:
    """Return the numbers of the iterations for which a rescoring or recredit is complete."""
    numbers = iteration_numbers(run.folders(derived.prefix))
    return tuple(number for number in numbers if run.find(derived.key(number, "seal")) is not None)


def link_completed_iterations(run: Run, derived: DerivedResult) -> None:
    """Append the completed iterations of a rescoring or recredit to its chain (hash-linked list), so that `verify`
    detects deleted and edited records. Iterations that are already in the chain are skipped.

    The first record of the chain also protects the rewards or the algorithm. The run must be locked.
    """
    chain = Chain(run, derived.prefix)
    for number in sealed_numbers(run, derived):
        chain.link(iteration_key(number), journal=[f"{derived.prefix}{DEPENDENCIES}"])


def with_rescoring_commits(config: RunConfig, derived: DerivedResult) -> RunConfig:
    """Return the configuration of a rescoring in which the names of judges and reward models on the Hugging Face Hub
    refer to commits, as `with_derived_commits` chooses them."""
    run = open_run(config.store, config.name)
    return config.model_copy(update={"scoring": with_derived_commits(config.scoring, run, derived.prefix)})


def rescoring_terms(run: Run, name: str) -> RescoringTerms | None:
    """Return the rewards that a rescoring was begun with, or None if there is no rescoring of this name."""
    manifest = run.find(DerivedResult("rescore", name).terms_key)
    return None if manifest is None else read_recorded(RescoringTerms, manifest.detail)


def recredit_terms(run: Run, name: str) -> RecreditTerms | None:
    """Return the algorithm that a recredit was begun with, or None if there is no recredit of this name."""
    manifest = run.find(DerivedResult("recredit", name).terms_key)
    return None if manifest is None else read_recorded(RecreditTerms, manifest.detail)


def recorded_terms(run: Run) -> RecreditTerms:
    """Return the algorithm of the run itself in the form of a recredit, to compare both."""
    return read_recorded(RecreditTerms, {"algorithm": recorded_config(run)["algorithm"]})


def check_terms(run: Run, derived: DerivedResult, terms: RescoringTerms | RecreditTerms) -> None:
    """Raise RunChanged if a rescoring or recredit of this name was begun with other settings."""
    manifest = run.find(derived.terms_key)
    if manifest is None:
        return
    recorded, requested = encode_recorded(manifest.detail, terms), terms.as_recorded()
    if recorded == requested:
        return
    raise RunChanged(
        f"{derived.label} of run {run.name!r} already exists with other settings: "
        f"{describe_difference(terms.present_names(recorded), terms.present_names(requested))}. Choose another name "
        "with --as, or use the same settings."
    )


def rescored_batches(iteration: Iteration, derived: DerivedResult) -> list[Batch]:
    """Return the batches of an iteration for scoring them again. Results are stored under keys of the rescoring."""
    return [batch.as_rescoring(derived.prefix) for batch in iteration.batches]


def rescored_shards(iteration: Iteration, derived: DerivedResult) -> list[tuple[Manifest, Manifest, Manifest]]:
    """Return (rollouts, stored scores, new scores) for each shard of an iteration that was scored again. Raises Damaged
    if one of them is missing."""
    new = [manifest for batch in rescored_batches(iteration, derived) for manifest in batch.stage_manifests("scoring")]
    return list(zip(iteration.shard_manifests("rollout"), iteration.shard_manifests("scoring"), new, strict=True))


class Rescoring(Settings):
    """Arguments of the flow that scores stored rollouts again."""

    config: RunConfig
    """Configuration of the run in which the rewards are replaced by the new ones."""
    name: str
    """Name of the rescoring."""
    iterations: tuple[int, ...]
    """Numbers of the iterations to score again."""


class Recredit(Settings):
    """Arguments of the flow that computes new advantages for stored rollouts."""

    config: RunConfig
    """Configuration of the run with the new algorithm, and with the rewards from which the scores were computed."""
    name: str
    """Name of the recredit."""
    scores: str | None
    """Name of the rescoring whose scores are used. None means the run's own scores."""
    iterations: tuple[int, ...]
    """Numbers of the iterations to compute advantages for."""
