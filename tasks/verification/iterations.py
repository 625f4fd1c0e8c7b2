"""The promises that a run makes beyond its digests, checked from the store alone."""

from collections.abc import Iterator

from infra.store.runs import Run
from infra.store.verify import verify_store
from models.data.curriculum import give_back, take
from models.rollouts.dynamic_sampling import DynamicSamplingState
from tasks.run.iteration import Iteration
from tasks.run.keys import StageKey, iteration_key
from tasks.verification.rescorings import check_derived
from tasks.verification.samples import check_credit, check_rollouts, check_samples
from tasks.views.metrics import sealed_iterations
from tasks.views.runs import open_known_run


def check_invariants(run: Run) -> list[str]:
    """Check every sealed iteration; return one line per broken promise, naming the offender."""
    digests = {manifest.digest for manifest in run.manifests()}
    problems: list[str] = []
    for number, seal in enumerate(sealed_iterations(run), start=1):
        expected = StageKey.of(iteration_key(number), "seal")
        if seal.key != expected:
            return [*problems, f"{seal.key}: expected {expected}, a sealed iteration is missing"]
        iteration = Iteration(run, number)
        if not iteration.batches:
            problems.append(f"{seal.key}: its plan is missing")
            continue
        problems += [f"{seal.key}: no manifest has the parent digest {p}" for p in seal.parents if p not in digests]
        for check in (_check_prompts, _check_carry_over, _check_sampling, check_rollouts, check_samples, check_credit):
            problems += check(iteration)
    return [*problems, *check_derived(run)]


def _check_prompts(iteration: Iteration) -> Iterator[str]:
    """Each batch has the prompts that follow, none skipped, and none that the iteration has already."""
    cursor, taken, num_prompts = iteration.before.cursor, iteration.before.rows(), iteration.prompts.shards[0].rows
    if len(set(taken)) < len(taken):
        yield f"{iteration.key}/seal: a prompt was both kept and carried into it, or twice"
    for plan in (batch.plan for batch in iteration.batches):
        if len(plan.rows) > num_prompts - len(set(taken)):
            yield f"{plan.plan_key}: {len(plan.rows)} prompts beside {len(taken)} are more than there are"
            return
        rows, cursor = take(cursor, len(plan.rows), taken=set(taken), num_prompts=num_prompts, seed=iteration.seed)
        if plan.rows != rows or plan.cursor != cursor:
            yield f"{plan.plan_key}: its prompts are not the {len(rows)} that follow those issued before"
            return
        taken += rows


def _check_carry_over(iteration: Iteration) -> Iterator[str]:
    """What the iteration did not use is left to the next: nothing lost, nothing twice; what was cut goes on first."""
    key, after = iteration.stage_key("seal"), iteration.after
    expected = tuple(groups.rollouts for groups in iteration.before.partial_groups)
    for plan in (batch.plan for batch in iteration.batches):
        if plan.carried != (expected if plan.wave == 1 else ()):
            yield f"{plan.plan_key}: the groups that were cut before are not its first shards"
    rollouts, scores = iteration.stage("rollout"), iteration.stage("scoring")
    offered = {
        (rollouts[index].key, scores[index].key): surplus.rows
        for surplus in iteration.surplus
        if (index := surplus.shard - len(iteration.before.leftover_groups)) >= 0  # what was kept once is not kept again
    }
    kept = {(groups.rollouts, groups.scores): groups.rows for groups in after.leftover_groups}
    for pair, rows in kept.items():
        if offered.get(pair) != rows:
            yield f"{key}: keeps groups of {pair[0]} that are not this iteration's surplus"
    waiting = {row for rows in kept.values() for row in rows}
    returned = [row for surplus in iteration.surplus for row in surplus.rows if row not in waiting]
    last = iteration.batches[-1].plan.cursor
    if last is None or after.cursor != give_back(last, returned):
        yield f"{key}: its cursor is not where the last batch left it with {len(returned)} prompts given back"
    cut = [m for m in rollouts if len(m.shards) > 1]
    if [groups.rollouts for groups in after.partial_groups] != [m.key for m in cut]:
        yield f"{key}: the groups that it leaves to be continued are not those that its rollouts cut"


def _check_sampling(iteration: Iteration) -> Iterator[str]:
    """Waves are as many as dynamic sampling allows, and what it learnt follows from what was issued."""
    dynamic, after = iteration.rollout.dynamic, iteration.after
    most = 1 if dynamic is None else 1 + dynamic.max_extra_waves
    if len(iteration.batches) > most:
        yield f"{iteration.key}/seal: {len(iteration.batches)} batches, expected at most {most}"
    expected = None
    if dynamic is not None:
        issued = sum(int(manifest.metrics["groups"]) for manifest in iteration.stage("rollout"))
        informative = sum(int(manifest.metrics["informative_groups"]) for manifest in iteration.stage("scoring"))
        expected = (iteration.before.sampling or DynamicSamplingState()).after(issued, informative)
    if after.sampling != expected:
        yield f"{iteration.key}/seal: its sampling is {after.sampling}, expected {expected}"
    if iteration.surplus and dynamic is None:
        yield f"{iteration.key}/credit: has surplus groups without dynamic sampling"
    keeps = dynamic is not None and dynamic.surplus == "keep"
    if after.leftover_groups and not keeps:
        yield f"{iteration.key}/seal: keeps groups although the configuration returns them"
    if after.partial_groups and iteration.rollout.partial is None:
        yield f"{iteration.key}/seal: carries groups without partial rollout"


def verify_run(store: str, name: str) -> list[str]:
    """Check every digest and every invariant of a run; one line per problem, naming the offender."""
    run = open_known_run(store, name)
    return verify_store(run) or check_invariants(run)
