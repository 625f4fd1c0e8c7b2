"""What a run's re-scorings and re-credits promise, checked from the store alone."""

from collections.abc import Iterator, Mapping
from math import isclose

from infra.store.manifests import Manifest
from infra.store.runs import Run
from infra.store.shards import ShardRef, read_shard
from models.config.rewards import ScoringConfig
from models.credit.comparison import compare_rewards, rewards_of
from tasks.run.batch import Batch
from tasks.run.iteration import Iteration
from tasks.run.keys import reward_model_role
from tasks.run.rescorings import (
    Derived,
    derived_of,
    recredit_terms,
    rescored_batches,
    rescored_shards,
    rescoring_terms,
)


def check_derived(run: Run) -> Iterator[str]:
    """Check every iteration that was scored or credited again; one line per broken promise, naming the offender."""
    digests = {manifest.digest for manifest in run.manifests()}
    for line in derived_of(run):
        derived = Derived(line.kind, line.name)
        for manifest in run.manifests(derived.prefix):
            for parent in manifest.parents:
                if parent not in digests:
                    yield f"{manifest.key}: no manifest has the parent digest {parent}"
        check = _check_rescored if line.kind == "rescore" else _check_recredited
        for number in line.iterations:
            yield from check(Iteration(run, number), derived)


def _check_rescored(iteration: Iteration, derived: Derived) -> Iterator[str]:
    """Every shard was scored, by the rewards that it says, over the rollouts that it says."""
    run = iteration.run
    terms, shards = rescoring_terms(run, derived.name), rescored_shards(iteration, derived)
    if terms is None:
        yield f"{derived.terms_key}: the manifest is missing"
        return
    for rollouts, _, scores in shards:
        yield from _check_scores(run, rollouts, scores, terms.scoring)
    for batch in rescored_batches(iteration, derived):
        yield from _check_verdicts(batch, terms.scoring)
    expected = compare_rewards(
        rewards_of(run.store, [stored.shards[0] for _, stored, _ in shards]),
        rewards_of(run.store, [scores.shards[0] for _, _, scores in shards]),
    )
    yield from _check_seal(iteration, derived, [part for parts in shards for part in parts], expected)


def _check_scores(run: Run, rollouts: Manifest, scores: Manifest, scoring: ScoringConfig) -> Iterator[str]:
    """One shard: its parent, its rollouts, its rows and its terms."""
    if scores.parents[:1] != (rollouts.digest,):
        yield f"{scores.key}: its first parent is not {rollouts.key}"
    table = read_shard(run.store, scores.shards[0])
    if table.schema.metadata[b"rollouts"].decode() != rollouts.shards[0].digest:
        yield f"{scores.key}: scores other rollouts than those of {rollouts.key}"
    if _names(run, scores.shards[0]) != _names(run, rollouts.shards[0]):
        yield f"{scores.key}: its rows are not those of {rollouts.key}"
    if any(f"reward_{term}" not in table.column_names for term in scoring.terms):
        yield f"{scores.key}: expected the terms {', '.join(scoring.terms)}, found {', '.join(table.column_names)}"


def _check_verdicts(batch: Batch, scoring: ScoringConfig) -> Iterator[str]:
    """Every verdict shard is of the rollouts that it says."""
    for term in scoring.model_rewards:
        for rollouts, verdicts in zip(batch.rollouts, batch.stage(reward_model_role(term)), strict=True):
            if rollouts.digest not in verdicts.parents:
                yield f"{verdicts.key}: {rollouts.key} is none of its parents"


def _check_recredited(iteration: Iteration, derived: Derived) -> Iterator[str]:
    """The advantages are of the completions and from the scores that the re-credit says."""
    run = iteration.run
    terms = recredit_terms(run, derived.name)
    if terms is None:
        yield f"{derived.terms_key}: the manifest is missing"
        return
    credit = derived.made(run, iteration.number, "credit")
    scored = iteration.scored(prefix="" if terms.scores is None else Derived("rescore", terms.scores).prefix)
    parents = [manifest.digest for manifest in scored.manifests]
    if list(credit.parents[: len(parents)]) != parents:
        yield f"{credit.key}: its parents are not the iteration's rollouts and their scores"
    if len(credit.parents) > len(parents) and credit.parents[-1] != iteration.made("estimates").digest:
        yield f"{credit.key}: its last parent is not {iteration.stage_key('estimates')}"
    finished = {name for rollouts in scored.rollouts for name in _names(run, rollouts.shards[0])}
    names = _names(run, credit.shards[0])
    if len({*names}) < len(names) or not finished.issuperset(names):
        yield f"{credit.key}: a completion is repeated or is none of the iteration's"
    yield from _check_seal(iteration, derived, [iteration.credit, credit], None)


def _check_seal(
    iteration: Iteration, derived: Derived, parts: list[Manifest], expected: dict[str, float] | None
) -> Iterator[str]:
    sealed = derived.made(iteration.run, iteration.number, "seal")
    if sealed.parents != tuple(part.digest for part in parts):
        yield f"{sealed.key}: its parents are not all that it was made from"
    if expected is not None and not _agree(sealed.metrics, expected):
        yield f"{sealed.key}: its comparison is not that of the shards"


def _agree(metrics: Mapping[str, float], expected: Mapping[str, float]) -> bool:
    """Sums of floats may differ in their last digits on another machine."""
    return metrics.keys() == expected.keys() and all(
        isclose(metrics[name], expected[name], abs_tol=1e-12) for name in expected
    )


def _names(run: Run, ref: ShardRef) -> list[tuple[int, int]]:
    table = read_shard(run.store, ref, columns=["prompt_row", "sample"])
    return list(zip(table["prompt_row"].to_pylist(), table["sample"].to_pylist(), strict=True))
