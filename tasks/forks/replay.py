"""Plans and checks of what-if runs: forks that train other policies on the stored rollouts of a run, instead of
generating new ones."""

from collections.abc import Iterable, Sequence
from typing import Final

from rheostat.infra.config import changed_keys, read_recorded
from rheostat.infra.errors import BadInput
from rheostat.infra.store.dependencies import Dependencies, dependency_records
from rheostat.infra.store.runs import MAX_NAME, Run
from rheostat.models.config.corrections import TruncatedImportance
from rheostat.models.config.rewards import ScoringConfig
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.forks.sharing import Sharing
from rheostat.tasks.run.batch import iterations_without_rollouts
from rheostat.tasks.run.dependencies import REWARD_CODE
from rheostat.tasks.run.keys import reward_model_role

CONTINUED: Final = "-continued"
"""Suffix of the name of the fork that continues a what-if run."""
FIXED_BY_ROLLOUTS: Final = {
    "rollout": "the stored rollouts were generated with these settings. Use `rheostat fork` to change them"
}
"""Settings that a what-if run cannot change, each with the reason."""


def with_correction(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration with an importance correction. Without one, updates from rollouts of another policy
    would be biased. If none is configured, importance weights are truncated, unless the loss itself corrects. Raises
    BadInput if an override switches the correction off."""
    update = config.update
    if update.loss.corrects_importance:
        return config
    kinds = {name: getattr(update, name) for name in ("correction", "stale_correction")}
    off = {name for name, kind in kinds.items() if kind is not None and not kind.compares_with_trainer}
    for name in sorted(off):
        if any(override.strip().startswith(f"update.{name}") for override in overrides):
            raise BadInput(
                f"update.{name} cannot be 'none', because a what-if run trains on rollouts of another policy. Choose "
                "'truncated' or 'masked'."
            )
    return config.model_copy(
        update={"update": update.model_copy(update=dict.fromkeys(off, TruncatedImportance()))} if off else {}
    )


def check_continuation(config: RunConfig) -> None:
    """Raise BadInput if a what-if run with this configuration could not be continued by a fork."""
    if len(config.name) + len(CONTINUED) > MAX_NAME:
        raise BadInput(
            f"the name {config.name!r} is too long to continue the what-if run as {config.name + CONTINUED!r}. Choose "
            f"a name with at most {MAX_NAME - len(CONTINUED)} characters."
        )
    if config.update.state_every > 1:
        raise BadInput(
            f"update.state_every is {config.update.state_every}, so the optimizer state that is needed to continue may "
            "not be stored. Set update.state_every to 1."
        )


def with_kept_policies(config: RunConfig) -> RunConfig:
    """Return the configuration with at least three kept policies. After the last trusted iteration one more is trained,
    and a fork with alarms that revert also needs the policy before."""
    keep = max(3, config.retention.keep_last)
    return config.model_copy(update={"retention": config.retention.model_copy(update={"keep_last": keep})})


def has_new_scores(run: Run, after: RunConfig, dependencies: Dependencies, iterations: Iterable[int]) -> bool:
    """Return whether settings or code of the rewards differ between a fork and one of these iterations of a run.
    `after` is the configuration of the fork, and `dependencies` is the present code."""
    records, code = dependency_records(run), _reward_code(dependencies)
    for number in iterations:
        keys = changed_keys(*run.settings_beside(after, number))
        in_force = [each.dependencies for each in records if each.iteration <= max(number, 1)][-1:]
        if any(f"{key}.".startswith("scoring.") for key in keys) or any(
            _reward_code(each) != code for each in in_force
        ):
            return True
    return False


def _reward_code(dependencies: Dependencies) -> dict[str, dict[str, str]]:
    return {name: modules for name, modules in dependencies.code.items() if name.startswith(REWARD_CODE)}


def check_replay(run: Run, iterations: range, after: RunConfig, dependencies: Dependencies) -> None:
    """Raise BadInput if the rollouts of these iterations cannot be used with the configuration `after` and the present
    code, `dependencies`."""
    changed = changed_keys(*run.settings_beside(after))
    deleted = iterations_without_rollouts(run, iterations)
    reason = None
    is_rescored = has_new_scores(run, after, dependencies, iterations)
    if deleted:
        reason = (
            f"the rollouts of iteration {max(deleted)} were deleted, so it can begin at {run.name}@{max(deleted)} or "
            "later, if the policy is stored"
        )
    elif after.rollout.dynamic is not None and (is_rescored or any(key.startswith("algorithm.") for key in changed)):
        reason = (
            "rewards and algorithm cannot change, because with rollout.dynamic they decided how many completions were "
            "generated. Change settings of the update"
        )
    elif after.rollout.curriculum is not None and is_rescored:
        reason = (
            "rewards cannot change, because with rollout.curriculum they decided which prompts were used. Change "
            "settings of the algorithm or the update"
        )
    elif after.algorithm.reward_kl is not None:
        reason = (
            "algorithm.kl is computed from the log-probs of the policies that generated the rollouts, so it would not "
            "penalize the what-if policy. Remove it (`algorithm.kl=`), or use update.kl"
        )
    elif after.update.router_replay is not None and "update.router_replay" in changed:
        reason = "update.router_replay cannot be set, because the stored rollouts contain no choices of experts"
    for iteration in iterations:
        if run.config_at(iteration)["rollout"] != run.record.config["rollout"]:
            reason = (
                f"iteration {iteration}, which {run.name!r} shares with an earlier run, was generated with other "
                f"settings of the rollout. Write {run.name}@{iteration} or later, or use the earlier run"
            )
    if reason is not None:
        raise BadInput(f"run {run.name!r} cannot be used for this what-if run: {reason}.")


def plan_replay(run: Run, number: int, last: int, after: RunConfig, dependencies: Dependencies) -> Sharing:
    """Return the results of a run that a what-if run shares. The what-if run begins after iteration `number` and uses
    rollouts up to iteration `last`.

    `after` is the configuration of the what-if run, and `dependencies` is the present code.
    """
    stages = {"plan", *shared_stages(run, range(number + 1, last + 1), after, dependencies)}
    return Sharing(
        number, rescores=must_rescore_evaluation(run, number, after, dependencies), last=last, stages=frozenset(stages)
    )


def shared_stages(run: Run, iterations: range, after: RunConfig, dependencies: Dependencies) -> set[str]:
    """Return the stages whose results for rollout shards of these iterations a fork can share: the rollouts, the scores
    if neither settings nor code of the rewards differ, and the outputs of judges with equal settings. `after` is the
    configuration of the fork, and `dependencies` is the present code."""
    stages = {"rollout"} if has_new_scores(run, after, dependencies, iterations) else {"rollout", "scoring"}
    before = [read_recorded(ScoringConfig, run.config_at(each)["scoring"]).model_rewards for each in iterations]
    for term, reward in after.scoring.model_rewards.items():
        if all(rewards.get(term) == reward for rewards in before):
            stages |= {reward_model_role(term)}
    return stages


def must_rescore_evaluation(run: Run, number: int, after: RunConfig, dependencies: Dependencies) -> bool:
    """Return whether a fork after iteration `number` scores the evaluation after this iteration again."""
    return after.evaluation.is_due(number) and has_new_scores(run, after, dependencies, [number])


def find_replayed(run: Run, sharing: Sharing) -> tuple[int, ...]:
    """Return the iterations of a fork of a run that train on rollouts of another run's policies."""
    before = () if run.fork is None else run.fork.replayed
    return (*(each for each in before if each <= sharing.iteration), *sharing.replayed)
