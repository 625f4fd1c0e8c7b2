"""What a run's re-scorings and re-credits promise, checked from the store alone."""

from collections.abc import Iterator, Mapping
from math import isclose

from infra.store.manifests import Manifest
from infra.store.runs import Run
from infra.store.shards import ShardRef, read_shard
from models.config.rewards import ScoringConfig
from models.credit.comparison import compare_rewards, rewards_of
from tasks.run.batch import BatchPlan
from tasks.run.keys import StageKey, iteration_key, judge_role
from tasks.run.rescorings import (
    Derived,
    credited_pairs,
    derived_of,
    recredit_terms,
    rescored_pairs,
    rescored_waves,
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
            yield from check(run, derived, number)


def _check_rescored(run: Run, derived: Derived, number: int) -> Iterator[str]:
    """Every shard was scored, by the rewards that it says, over the rollouts that it says."""
    terms, pairs = rescoring_terms(run, derived.name), list(rescored_pairs(run, derived.name, number))
    if terms is None:
        yield f"{derived.terms_key}: the manifest is missing"
        return
    for rollouts, _, scores in pairs:
        yield from _check_scores(run, rollouts, scores, terms.scoring)
    for wave in rescored_waves(run, derived.name, number):
        yield from _check_verdicts(run, wave, terms.scoring)
    expected = compare_rewards(
        rewards_of(run.store, [stored.shards[0] for _, stored, _ in pairs]),
        rewards_of(run.store, [scores.shards[0] for _, _, scores in pairs]),
    )
    yield from _check_seal(run, derived, number, [part for pair in pairs for part in pair], expected)


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


def _check_verdicts(run: Run, wave: BatchPlan, scoring: ScoringConfig) -> Iterator[str]:
    """Every verdict shard is of the rollouts that it says."""
    for shard in range(wave.num_shards):
        rollouts = run.require(wave.rollout_key(shard))
        for term in scoring.served:
            verdicts = run.require(wave.shard_key(judge_role(term), shard))
            if rollouts.digest not in verdicts.parents:
                yield f"{verdicts.key}: {rollouts.key} is none of its parents"


def _check_recredited(run: Run, derived: Derived, number: int) -> Iterator[str]:
    """The advantages are of the completions and from the scores that the re-credit says."""
    terms = recredit_terms(run, derived.name)
    if terms is None:
        yield f"{derived.terms_key}: the manifest is missing"
        return
    credit = run.require(derived.key(number, "credit"))
    pairs = credited_pairs(run, number, terms.scores)
    parents = [manifest.digest for pair in pairs for manifest in pair]
    if list(credit.parents[: len(parents)]) != parents:
        yield f"{credit.key}: its parents are not the iteration's rollouts and their scores"
    if (
        len(credit.parents) > len(parents)
        and credit.parents[-1] != run.require(StageKey.of(iteration_key(number), "estimates")).digest
    ):
        yield f"{credit.key}: its last parent is not {StageKey.of(iteration_key(number), 'estimates')}"
    finished = {name for rollouts, _ in pairs for name in _names(run, rollouts.shards[0])}
    names = _names(run, credit.shards[0])
    if len({*names}) < len(names) or not finished.issuperset(names):
        yield f"{credit.key}: a completion is repeated or is none of the iteration's"
    yield from _check_seal(
        run, derived, number, [run.require(StageKey.of(iteration_key(number), "credit")), credit], None
    )


def _check_seal(
    run: Run, derived: Derived, number: int, parts: list[Manifest], expected: dict[str, float] | None
) -> Iterator[str]:
    sealed = run.require(derived.key(number, "seal"))
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
