"""Reasons why a run cannot be forked at an iteration with other settings."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from rheostat.infra.config import changed_keys
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.runs import Run
from rheostat.models.records.versions import AVERAGE
from rheostat.tasks.auxiliary import find_stored_teachers
from rheostat.tasks.config.run import LAYOUT, RunConfig
from rheostat.tasks.forks.sharing import StoredBundles
from rheostat.tasks.run.iteration import CarryOver, carry_over_before
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.references import reference_iteration, select_reference
from rheostat.tasks.run.reverts import critic_after, has_reverted, policy_after
from rheostat.tasks.run.states import STATES, updates_since_state

FIXED: Final = {
    "seed": "it chose the prompts and random numbers of the shared iterations",
    "data": "the shared iterations used these problems, and the fork continues after the last one",
    "policy": "the shared iterations begin with this policy and its tokenizer",
    "warmup": "the shared iterations begin with the policy that it trained",
    "preferences": "the shared iterations begin with the models that it trained",
    "dpo": "the shared iterations begin with the policy that it trained",
    "rollout.environment": "the stored prompts are written for this environment",
}
"""Settings that a fork cannot change, each with the reason."""

_FIXED_BY_STATE: Final = {
    "update.lora": "the weights of the shared policy depend on it",
    "update.freeze": "the optimizer state of the shared policy depends on it",
    "update.dtype": "the optimizer state of the shared policy depends on it",
    "update.optimizer.kind": "the optimizer state of the shared policy depends on it",
}
"""Settings that a fork cannot change unless it begins at iteration 0, each with the reason."""


def fixed_settings(iteration: int) -> Mapping[str, str]:
    """Return the settings that a fork at an iteration cannot change, each with the reason."""
    return {**FIXED, **(_FIXED_BY_STATE if iteration else {})}


def find_fixed(key: str, fixed: Mapping[str, str] = FIXED) -> str | None:
    """Return a sentence that says why a setting cannot change, or None if it can. `fixed` are reasons by the dotted key
    of a setting or of a table."""
    reasons = (reason for table, reason in fixed.items() if f"{key}.".startswith(f"{table}."))
    return next((f"{key} cannot change, because {reason}" for reason in reasons), None)


def find_conflicts(
    run: Run, number: int, before: RunConfig, after: RunConfig, fixed: Mapping[str, str] = FIXED
) -> Iterator[str]:
    """Yield the reasons why a fork cannot share the results of a run up to iteration `number`. `before` and `after` are
    the configurations of the run and of the fork, and `fixed` are the settings that cannot change."""
    changed = [key for key in changed_keys(*run.settings_beside(after)) if key not in LAYOUT]
    fixed_now = {**fixed, **fixed_settings(number)}
    yield from filter(None, (find_fixed(key, fixed_now) for key in changed))
    if (longest := before.rollout.sampling.max_new_tokens) < after.rollout.sampling.max_new_tokens:
        yield (
            f"rollout.sampling.max_new_tokens cannot be above {longest}, because the stored prompts leave room for "
            "completions of this length only"
        )
    yield from _find_model_conflicts(run, number, before, after, changed)


def _find_model_conflicts(
    run: Run, number: int, before: RunConfig, after: RunConfig, changed: Sequence[str]
) -> Iterator[str]:
    """Yield the reasons why a fork cannot use the models that a run has stored in addition to the policy."""
    if number and after.algorithm.value_model is not None and before.algorithm.value_model is None:
        yield f"algorithm.kind cannot be {after.algorithm.label!r}, because the shared iterations trained no critic"
    if "algorithm.critic.path" in changed and run.has(StageKey.critic(0)):
        yield "algorithm.critic.path cannot change, because the critic is stored"
    stored, keys = find_stored_teachers(before), [*after.algorithm.all_teachers]
    for index, teacher in find_stored_teachers(after).items():
        if run.has(StageKey.teacher(index)) and teacher != stored.get(index):
            yield f"{keys[index]} cannot change, because the teacher is stored"
    rewards = before.scoring.model_rewards
    for term, reward in after.scoring.model_rewards.items():
        is_same = term in rewards and (rewards[term].label, rewards[term].model) == (reward.label, reward.model)
        if run.has(StageKey.reward_model(term)) and not is_same:
            yield f"the model of reward {term!r} cannot change, because it is stored. Give the new reward another name"


def find_carry_over_conflicts(run: Run, number: int, after: RunConfig) -> Iterator[str]:
    """Yield the reasons why a fork with the configuration `after` cannot continue from the state that an iteration
    leaves to the next one."""
    changed = changed_keys(*run.settings_beside(after))
    if not after.revert_alarms and any(has_reverted(run, each) for each in range(1, number + 1)):
        yield "alarms that revert cannot be removed, because an alarm has reverted a shared iteration"
    carry_over = carry_over_before(run, number + 1)
    if carry_over.num_leftover and after.rollout.dynamic is None:
        yield f"rollout.dynamic cannot be removed, because iteration {number} leaves groups to the next one"
    if carry_over.num_leftover and any(f"{key}.".startswith("scoring.") for key in changed):
        yield f"scoring cannot change, because iteration {number} leaves scored groups to the next one"
    if carry_over.num_partial and after.rollout.partial is None:
        yield f"rollout.partial cannot be removed, because iteration {number} leaves partial completions"
    shards = [shard.key for key in _keys_of(carry_over) for shard in run.require(key).shards]
    if not all(run.store.exist(shards)):
        yield f"the rollouts that iteration {number} leaves to the next one were deleted. Choose another iteration"


def _keys_of(carry_over: CarryOver) -> list[str]:
    scored = [key for groups in carry_over.leftover_groups for key in (groups.rollouts, groups.scores)]
    return [*scored, *(groups.rollouts for groups in carry_over.partial_groups)]


class IterationNotForkable(BadInput):
    """Raised if a run cannot be forked at an iteration, but perhaps at another one. For example, a policy is not stored
    any more."""


def iterations_with_policy(run: Run, name: str, last: int) -> Iterator[int]:
    """Yield the iterations from `last` down to 0 whose policies are stored, so that a fork `name` may begin there."""
    stored = StoredBundles(run, name)
    return (number for number in range(last, -1, -1) if _has_weights(run, number, stored))


def check_policies_stored(run: Run, number: int, config: RunConfig, *, num_sealed: int) -> None:
    """Raise IterationNotForkable if a policy that a fork at iteration `number` needs is not stored, with the nearest
    iterations that can be forked. `num_sealed` is the number of completed iterations of the run."""
    stored = StoredBundles(run, config.name)
    if (reason := _find_missing_policy(run, number, config, stored)) is None:
        return
    able = [each for each in range(num_sealed + 1) if _find_missing_policy(run, each, config, stored) is None]
    nearest = sorted(sorted(able, key=lambda each: abs(each - number))[:3])
    raise IterationNotForkable(
        f"run {run.name!r} cannot be forked at iteration {number}, because {reason}. The nearest iterations that can "
        f"be forked with these settings: {', '.join(map(str, nearest)) or 'none'}. For later runs, set "
        "retention.keep_every=1 to keep every policy."
    )


def _find_missing_policy(run: Run, number: int, config: RunConfig, stored: StoredBundles) -> str | None:
    """Return what is missing to fork a run at an iteration, or None. Rollouts of the first iterations need older
    policies if staleness is allowed, and a revert needs the policy before."""
    if not _has_weights(run, number, stored):
        return f"policy {number} is not stored (retention.keep_last keeps only the newest policies)"
    if updates_since_state(run, number)[1]:
        return f"the optimizer state of policy {number} is not stored"
    for older in range(max(0, number - config.rollout.staleness), number):
        if not _has_weights(run, older, stored):
            return f"policy {older} is not stored, which rollout.staleness = {config.rollout.staleness} needs"
    reference = reference_iteration(run, number + 1, config.reference_rule)
    if not stored.has(select_reference(policy_after(run, reference), config.reference_rule).weights):
        rule = config.reference_rule.rule_key
        return f"policy {reference} is not stored, which is the reference of the KL penalty or the teacher ({rule})"
    if config.revert_alarms and number:
        before = number - 1
        restored = select_reference(policy_after(run, before), config.reference_rule)
        has_all = _has_weights(run, before, stored) and stored.has(restored.weights)
        if not has_all or updates_since_state(run, before)[1]:
            return f"policy {before} is not stored, to which an alarm would revert"
    return None


def _has_weights(run: Run, number: int, stored: StoredBundles) -> bool:
    manifests = [policy_after(run, number)]
    with suppress(Damaged):  # there is no critic
        manifests.append(critic_after(run, number))
    others = (*STATES, AVERAGE)  # moving averages are checked where they are needed
    return all(stored.has(ref) for each in manifests for name, ref in each.bundles.items() if name not in others)
