"""Rollout shards of the iterations after the start of a fork that the fork can share with its parent.

The policies that generate the first iterations of a fork are policies of the parent, too. A shard of such an iteration
is equal in both runs if it contains none of the prompts that the fork excludes.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rheostat.infra.config import changed_keys
from rheostat.infra.store.dependencies import Dependencies, dependency_records
from rheostat.infra.store.forks import ExcludedPrompts, Fork
from rheostat.infra.store.runs import MANIFESTS, Run
from rheostat.models.data.curriculum import take_rows
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.forks.replay import shared_stages
from rheostat.tasks.run.batch import BatchPlan, iterations_without_rollouts, rollouts_of
from rheostat.tasks.run.dependencies import REWARD_CODE
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.solve_rates import SolveRateHistory, prompt_order
from rheostat.tasks.views.metrics import sealed_iterations

_ROLLOUT_SETTINGS = ("rollout.", "update.router_replay.")


def find_unaffected_shards(
    run: Run,
    number: int,
    config: RunConfig,
    dependencies: Dependencies,
    excluded: Sequence[ExcludedPrompts],
) -> frozenset[str]:
    """Return the keys of the results for rollout shards that a fork of a run at iteration `number` would compute again
    with equal content, because they are from a shared policy and contain no excluded prompt.

    `config` and `dependencies` are the settings and the present code of the fork. Empty if the fork generates rollouts
    with other settings, code or libraries.
    """
    last = min(len(sealed_iterations(run)), number + 1 + config.rollout.staleness, config.iterations)
    iterations = [*_iterations_like(run, range(number + 1, last + 1), config, dependencies)]
    if not iterations:
        return frozenset()
    stages = shared_stages(run, range(number + 1, iterations[-1].number + 1), config, dependencies)
    keys = set[str]()
    for plan, rows in _pair_plans(iterations, frozenset(row for each in excluded for row in each.rows)):
        carried = len(plan.carried)
        ours = plan.model_copy(update={"rows": rows})
        keys |= {
            plan.shard_key(stage, shard)
            for shard in range(min(plan.num_shards, ours.num_shards))
            if shard < carried or plan.shard_rows(shard) == ours.shard_rows(shard)
            for stage in stages
        }
        if config.rollout.dynamic is not None and (rows != plan.rows or "scoring" not in stages):
            break  # the next batch depends on the new scores
    return frozenset(keys)


def _iterations_like(run: Run, numbers: range, config: RunConfig, dependencies: Dependencies) -> Iterator[Iteration]:
    """Yield the iterations of a run in order. Stop before the first iteration whose rollouts were deleted, were
    generated with other settings, code or libraries than those of the fork, or are from another run's policies."""
    deleted, records = iterations_without_rollouts(run, numbers), dependency_records(run)
    for number in numbers:
        changed = changed_keys(*run.settings_beside(config, number))
        recorded = [each.dependencies for each in records if each.iteration <= number][-1:]
        is_equal = recorded and _generating(recorded[0]) == _generating(dependencies)
        if not is_equal or number in deleted or run.replays(number):
            return
        if any(f"{key}.".startswith(_ROLLOUT_SETTINGS) for key in changed):
            return
        yield Iteration(run, number)


def _generating(dependencies: Dependencies) -> object:
    """Return the code and library versions on which rollouts depend."""
    code = {name: modules for name, modules in dependencies.code.items() if not name.startswith(REWARD_CODE)}
    return code, dependencies.libraries


def _pair_plans(
    iterations: Sequence[Iteration], excluded: frozenset[int]
) -> Iterator[tuple[BatchPlan, tuple[int, ...]]]:
    """Yield each stored plan of the iterations with the rows that the plan has without the excluded prompts."""
    history = SolveRateHistory(iterations[0].run)
    cursor = iterations[0].start_state.cursor
    for iteration in iterations:
        order = prompt_order(iteration, iteration.rollout, history)
        taken = {*iteration.start_state.rows()}
        for plan in (batch.plan for batch in iteration.batches):
            count = min(len(plan.rows), order.num_prompts - len(taken | excluded))
            rows, cursor = take_rows(cursor, count, order, taken=taken, excluded=excluded)
            taken |= {*rows}
            yield plan, rows


@dataclass(frozen=True, slots=True)
class ReusedRollouts:
    """Rollouts of the iterations after the start of a fork that the fork shares with its parent."""

    shards: int
    """Number of rollout shards."""
    iterations: float
    """Sum of the shares of shared shards over all iterations, for example 0.5 for 2 of the 4 shards of one
    iteration."""


def count_unaffected_shards(run: Run, fork: Fork) -> ReusedRollouts:
    """Count the rollout shards that a fork of a run shares because they contain no excluded prompt. Rollouts of what-if
    runs are not counted."""
    names = (key.removeprefix(MANIFESTS).removesuffix(".json") for some in fork.shared.values() for key in some)
    keys = [StageKey.parse(name) for name in names if name.startswith("it-") and "/rollout/" in name]
    counts = Counter(key.iteration for key in keys if key.iteration > fork.iteration and not fork.replayed)
    whole = sum(count / len(rollouts_of(run, number)) for number, count in counts.items())
    return ReusedRollouts(counts.total(), whole)
