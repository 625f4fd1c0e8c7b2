"""Consistency checks of a run's records: whether prompts, completions, scores, samples and policies belong together.
Digests only show that data is unchanged. Only the store is read."""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from math import isclose

from rheostat.infra.errors import Damaged
from rheostat.infra.store.bundles import BundleRef, has_bundle
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.infra.store.tombstones import FORGOTTEN, Tombstone, find_tombstone, tombstones
from rheostat.infra.store.verify import stray_files, verify_store
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.credit.comparison import compare_rewards, read_total_rewards
from rheostat.models.data.curriculum import DynamicSamplingState, give_back, take_rows
from rheostat.models.records.versions import AVERAGE, policy_of
from rheostat.tasks.run.batch import Batch, iterations_without_rollouts
from rheostat.tasks.run.dependencies import relayout_iteration
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey, iteration_key, reward_model_role
from rheostat.tasks.run.ordered_reverts import recorded_revert_alarms, required_revert
from rheostat.tasks.run.references import recorded_rule
from rheostat.tasks.run.rescorings import (
    DerivedResult,
    list_derived_results,
    recredit_terms,
    rescored_batches,
    rescored_shards,
    rescoring_terms,
)
from rheostat.tasks.run.reverts import policy_after, restored_version, revert_key
from rheostat.tasks.run.solve_rates import SolveRateHistory, prompt_order
from rheostat.tasks.run.states import changed_model, is_due, possibly_missing_states, state_every, states_of
from rheostat.tasks.verification.samples import check_credit, check_rollouts, check_samples, finished_completions
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.runs import open_known_run


def verify_run(store: str, name: str) -> list[str]:
    """Check a run for damaged data and for records that contradict each other. Return one line per problem that names
    the faulty object, or an empty list."""
    run = open_known_run(store, name)
    return verify_store(run, deferred=partial(_promised_states, run)) or check_invariants(run)


def _promised_states(run: Run, manifests: list[Manifest]) -> list[BundleRef]:
    try:
        moved = relayout_iteration(run)
    except Damaged:  # the check of the journal reports the damage
        moved = 0
    return possibly_missing_states(manifests, relayout_iteration=moved)


def ignored_files(store: str, name: str) -> list[str]:
    """Return files in a run's directory that do not belong to the run, for example files that a user put there."""
    return stray_files(open_known_run(store, name))


def deletions(store: str, name: str) -> list[Tombstone]:
    """Return records of data that was deleted on purpose (tombstones). Deleted files of old policies are left out,
    because every run deletes them."""
    return [
        stone for stone in tombstones(open_known_run(store, name)) if not stone.is_bundle and stone.what != FORGOTTEN
    ]


def missing_states(store: str, name: str) -> list[str]:
    """Return the keys of optimizer states that the run's records name but the store does not contain, for example
    because the run was interrupted while it wrote them."""
    run = open_known_run(store, name)
    if find_tombstone(run) is not None:
        return []
    return [state.key for state in possibly_missing_states(run.manifests()) if not has_bundle(run.store, state)]


def check_invariants(run: Run) -> list[str]:
    """Check whether the records of each completed iteration are consistent. Return one line per problem that names the
    faulty object."""
    digests = {manifest.digest for manifest in run.manifests()}
    problems: list[str] = []
    seals = sealed_iterations(run)
    deleted = iterations_without_rollouts(run, range(1, len(seals) + 1))
    check_prompts = partial(_check_prompts, history=SolveRateHistory(run))
    for number, seal in enumerate(seals, start=1):
        expected = StageKey.of(iteration_key(number), "seal")
        if seal.key != expected:
            return [*problems, f"{seal.key}: a sealed iteration is missing, expected {expected}"]
        iteration = Iteration(run, number)
        if not iteration.batches:
            problems.append(f"{seal.key}: the plan of the iteration is missing")
            continue
        problems += [f"{seal.key}: no manifest has the parent digest {p}" for p in seal.parents if p not in digests]
        row_by_row = () if number in deleted else (check_rollouts, check_samples, check_credit)
        of_policies = (_check_state, _check_average, _check_return)
        for check in (check_prompts, _check_carry_over, _check_sampling, *row_by_row, *of_policies):
            problems += check(iteration)
    return [*problems, *check_derived(run)]


def _check_prompts(iteration: Iteration, *, history: SolveRateHistory) -> Iterator[str]:
    """Check that the batches of an iteration use the next prompts of the stream, or those that the curriculum chooses,
    without gaps and without repeating a prompt."""
    cursor, taken_rows, num_prompts = (
        iteration.start_state.cursor,
        iteration.start_state.rows(),
        iteration.prompts.shards[0].rows,
    )
    fork, excluded_rows = iteration.run.fork, iteration.run.excluded_rows(iteration.number)
    never = {row for each in (fork.excluded if fork is not None else ()) for row in each.rows}
    if used := never & {*taken_rows, *(row for batch in iteration.batches for row in batch.plan.rows)}:
        yield f"{iteration.key}: uses row {min(used)} of the training prompts, which this fork excludes"
    if len(set(taken_rows)) < len(taken_rows):
        yield f"{iteration.key}/seal: the previous iteration passed on the same prompt twice"
    order = prompt_order(iteration, iteration.rollout, history)
    for plan in (batch.plan for batch in iteration.batches):
        if len(plan.rows) > num_prompts - len(set(taken_rows) | excluded_rows):
            yield (
                f"{plan.plan_key}: the batch uses {len(plan.rows)} new prompts next to {len(taken_rows)} that the "
                f"iteration already uses, but there are only {num_prompts} prompts"
            )
            return
        rows, cursor = take_rows(cursor, len(plan.rows), order, taken={*taken_rows}, excluded=excluded_rows)
        if plan.rows != rows or plan.cursor != cursor:
            name = "the run's random order" if order.choice is None else "the curriculum"
            yield f"{plan.plan_key}: the prompts are not the next {len(rows)} of {name}"
            return
        taken_rows += rows


def _check_carry_over(iteration: Iteration) -> Iterator[str]:
    """Check that each group that was left over is used exactly once by the next iteration, and that partial completions
    continue in its first shards."""
    key, after = iteration.stage_key("seal"), iteration.end_state
    expected = tuple(groups.rollouts for groups in iteration.start_state.partial_groups)
    for plan in (batch.plan for batch in iteration.batches):
        if plan.carried != (expected if plan.wave == 1 else ()):
            yield f"{plan.plan_key}: the first shards do not continue the unfinished groups of the previous iteration"
    rollouts, scores = iteration.shard_manifests("rollout"), iteration.shard_manifests("scoring")
    surplus_rows = {
        (rollouts[index].key, scores[index].key): surplus.rows
        for surplus in iteration.surplus_groups
        if (index := surplus.shard - len(iteration.start_state.leftover_groups))
        >= 0  # surplus groups are kept only once
    }
    kept = {(groups.rollouts, groups.scores): groups.rows for groups in after.leftover_groups}
    for pair, rows in kept.items():
        if surplus_rows.get(pair) != rows:
            yield f"{key}: keeps groups of {pair[0]} that are not surplus groups of this iteration"
    waiting = {row for rows in kept.values() for row in rows}
    returned_rows = [row for surplus in iteration.surplus_groups for row in surplus.rows if row not in waiting]
    last = iteration.batches[-1].plan.cursor
    if last is None or after.cursor != give_back(last, returned_rows):
        yield (
            f"{key}: the position in the order of prompts is not the one after the last batch and "
            f"{len(returned_rows)} unused prompts"
        )
    cut_manifests = [m for m in rollouts if "carried_rows" in m.detail]
    if [groups.rollouts for groups in after.partial_groups] != [m.key for m in cut_manifests]:
        yield f"{key}: the unfinished groups for the next iteration are not the groups that the rollouts cut off"


def _check_sampling(iteration: Iteration) -> Iterator[str]:
    """Check that an iteration has no more batches than allowed, and that the recorded state of dynamic sampling matches
    the generated groups."""
    dynamic, after = iteration.rollout.dynamic, iteration.end_state
    max_batches = 1 if dynamic is None else 1 + dynamic.max_extra_waves
    if len(iteration.batches) > max_batches:
        yield f"{iteration.key}/seal: {len(iteration.batches)} batches, expected at most {max_batches}"
    expected = None
    if dynamic is not None:
        num_issued = sum(int(manifest.metrics["groups"]) for manifest in iteration.shard_manifests("rollout"))
        informative = sum(
            int(manifest.metrics["informative_groups"]) for manifest in iteration.shard_manifests("scoring")
        )
        expected = (iteration.start_state.sampling or DynamicSamplingState()).after(num_issued, informative)
    if after.sampling != expected:
        yield f"{iteration.key}/seal: the state of dynamic sampling is {after.sampling}, expected {expected}"
    if iteration.surplus_groups and dynamic is None:
        yield f"{iteration.key}/credit: has surplus groups without dynamic sampling"
    keeps = dynamic is not None and dynamic.surplus == "keep"
    if after.leftover_groups and not keeps:
        yield f"{iteration.key}/seal: keeps surplus groups although rollout.dynamic.surplus is not 'keep'"
    if after.partial_groups and iteration.rollout.partial is None:
        yield f"{iteration.key}/seal: passes on unfinished groups although rollout.partial is not set"


def _check_state(iteration: Iteration) -> Iterator[str]:
    """Check that each update names an optimizer state if one must be stored. An update without optimizer steps must
    name the state of the version before."""
    run, update, every = iteration.run, iteration.update, state_every(iteration.run, iteration.number)
    if not changed_model(update):
        if states_of(update) != states_of(iteration.policy):
            yield f"{update.key}: took no step but names another optimizer state than the previous version"
    elif bool(states_of(update)) != is_due(run, iteration.number, every=every):
        statement = "names an optimizer state" if states_of(update) else "names no optimizer state"
        yield f"{update.key}: {statement}, with update.state_every {every} after version {iteration.number - 1}"


def _check_average(iteration: Iteration) -> Iterator[str]:
    """Check that each update names the moving average of the policies exactly if the next reference is one."""
    update, is_average = iteration.update, recorded_rule(iteration.run, iteration.number).ema_decay is not None
    if (AVERAGE in update.bundles) != is_average:
        statement = "names no moving average" if is_average else "names a moving average"
        yield f"{update.key}: {statement}, with ema_decay {'set' if is_average else 'not set'}"


def _check_return(iteration: Iteration) -> Iterator[str]:
    """Check that the run reverted to an earlier policy exactly when an alarm requires it, and to the right version."""
    run, key = iteration.run, revert_key(iteration.number)
    expected, manifest = required_revert(iteration, recorded_revert_alarms(run, iteration.number)), run.find(key)
    if (None if manifest is None else manifest.detail) != expected:
        actual = "none" if manifest is None else manifest.detail
        yield f"{key}: expected {'none' if expected is None else expected}, found {actual}"
    elif (
        manifest is not None
        and policy_of(manifest).digest != policy_of(policy_after(run, restored_version(manifest))).digest
    ):
        yield f"{key}: the weights are not those of policy {restored_version(manifest)}"


def check_derived(run: Run) -> Iterator[str]:
    """Check every iteration that was scored again (rescored) or whose advantages were computed again (recredited).
    Yield one line per problem that names the faulty object."""
    digests = {manifest.digest for manifest in run.manifests()}
    for line in list_derived_results(run):
        derived = DerivedResult(line.kind, line.name)
        for manifest in run.manifests(derived.prefix):
            for parent in manifest.parents:
                if parent not in digests:
                    yield f"{manifest.key}: no manifest has the parent digest {parent}"
        check = _check_rescored if line.kind == "rescore" else _check_recredited
        deleted = iterations_without_rollouts(run, line.iterations)
        for number in line.iterations:
            yield from () if number in deleted else check(Iteration(run, number), derived)


def _check_rescored(iteration: Iteration, derived: DerivedResult) -> Iterator[str]:
    """Check that the new scores of an iteration cover its stored rollouts and were computed with the
    recorded rewards."""
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
        read_total_rewards(run.store, [stored.shards[0] for _, stored, _ in shards]),
        read_total_rewards(run.store, [scores.shards[0] for _, _, scores in shards]),
    )
    yield from _check_seal(iteration, derived, [part for parts in shards for part in parts], expected)


def _check_scores(run: Run, rollouts: Manifest, scores: Manifest, scoring: ScoringConfig) -> Iterator[str]:
    """Check that the scores of one shard belong to its rollouts row by row, and include all reward terms."""
    if scores.parents[:1] != (rollouts.digest,):
        yield f"{scores.key}: the first parent is not {rollouts.key}"
    table = read_shard(run.store, scores.shards[0])
    if table.schema.metadata[b"rollouts"].decode() != rollouts.shards[0].digest:
        yield f"{scores.key}: the scores are of other rollouts than {rollouts.key}"
    if _read_names(run, scores.shards[0]) != _read_names(run, rollouts.shards[0]):
        yield f"{scores.key}: the rows are not those of {rollouts.key}"
    if any(f"reward_{term}" not in table.column_names for term in scoring.terms):
        yield f"{scores.key}: expected the terms {', '.join(scoring.terms)}, found {', '.join(table.column_names)}"


def _check_verdicts(batch: Batch, scoring: ScoringConfig) -> Iterator[str]:
    """Check that the verdicts of judges and reward models belong to the batch's rollouts."""
    for term in scoring.model_rewards:
        for rollouts, verdicts in zip(
            batch.rollout_manifests, batch.stage_manifests(reward_model_role(term)), strict=True
        ):
            if rollouts.digest not in verdicts.parents:
                yield f"{verdicts.key}: {rollouts.key} is not among the parents"


def _check_recredited(iteration: Iteration, derived: DerivedResult) -> Iterator[str]:
    """Check that new advantages of an iteration were computed from the recorded completions and scores."""
    run = iteration.run
    terms = recredit_terms(run, derived.name)
    if terms is None:
        yield f"{derived.terms_key}: the manifest is missing"
        return
    credit = derived.stage_manifest(run, iteration.number, "credit")
    scored = iteration.scored_rollouts(
        prefix="" if terms.scores is None else DerivedResult("rescore", terms.scores).prefix
    )
    parents = [manifest.digest for manifest in scored.manifests]
    if list(credit.parents[: len(parents)]) != parents:
        yield f"{credit.key}: the parents are not the iteration's rollouts and their scores"
    if len(credit.parents) > len(parents) and credit.parents[-1] != iteration.stage_manifest("estimates").digest:
        yield f"{credit.key}: the last parent is not {iteration.stage_key('estimates')}"
    finished = {
        name: each.samples for part in scored.rollouts for name, each in finished_completions(run, part).items()
    }
    if any(count != finished.get(name) for name, count in Counter(_read_names(run, credit.shards[0])).items()):
        yield f"{credit.key}: a completion is repeated, incomplete or not from this iteration"
    yield from _check_seal(iteration, derived, [iteration.credit, credit], None)


def _check_seal(
    iteration: Iteration, derived: DerivedResult, parts: list[Manifest], expected: dict[str, float] | None
) -> Iterator[str]:
    sealed = derived.stage_manifest(iteration.run, iteration.number, "seal")
    if sealed.parents != tuple(part.digest for part in parts):
        yield f"{sealed.key}: the parents are not exactly the manifests from which it was computed"
    if expected is not None and not _are_close(sealed.metrics, expected):
        yield f"{sealed.key}: the stored metrics differ from those that follow from the shards"


def _are_close(metrics: Mapping[str, float], expected: Mapping[str, float]) -> bool:
    """Return whether metrics are equal up to rounding, because float sums may differ in their last digits on another
    machine."""
    return metrics.keys() == expected.keys() and all(
        isclose(metrics[name], expected[name], abs_tol=1e-12) for name in expected
    )


def _read_names(run: Run, ref: ShardRef) -> list[tuple[int, int]]:
    table = read_shard(run.store, ref, columns=["prompt_row", "sample"])
    return list(zip(table["prompt_row"].to_pylist(), table["sample"].to_pylist(), strict=True))
