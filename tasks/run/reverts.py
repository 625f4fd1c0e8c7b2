"""Current policy of a run after each iteration: the updated policy, or an earlier one that an alarm reverted to."""

from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.tasks.run.keys import StageKey, iteration_key


def revert_key(number: int) -> StageKey:
    """Return the key under which a revert after an iteration is recorded. The record makes an earlier policy the
    current policy."""
    return StageKey.of(iteration_key(number), "return")


def has_reverted(run: Run, number: int) -> bool:
    """Return whether the run reverted to an earlier policy after an iteration. If no alarm of the run can cause a
    revert, the store is not queried."""
    return number > 0 and "alarms" in run.record.config and run.has(revert_key(number))


def policy_key(run: Run, number: int) -> StageKey:
    """Return the key of the policy that is current after `number` iterations."""
    return revert_key(number) if has_reverted(run, number) else StageKey.policy(number)


def policy_after(run: Run, number: int) -> Manifest:
    """Return the stored record of the policy that is current after `number` iterations. It also names the policy's
    critic and optimizer state."""
    return run.require(policy_key(run, number))


def critic_after(run: Run, number: int) -> Manifest:
    """Return the stored record that names the critic of the policy after `number` iterations."""
    return policy_after(run, number) if number else run.require(StageKey.critic(0))


def updating_iteration(run: Run, number: int) -> int:
    """Return the iteration whose update produced the current policy after `number` iterations, or 0 for the initial
    policy."""
    while has_reverted(run, number):
        number = restored_version(run.require(revert_key(number)))
    return number


def version_before(run: Run, number: int) -> int:
    """Return the version from which version `number` was trained, or to which the run reverted: usually the previous
    version."""
    return restored_version(run.require(revert_key(number))) if has_reverted(run, number) else number - 1


def restored_version(revert: Manifest) -> int:
    """Return the policy version that a recorded revert restored."""
    version = revert.detail["to"]
    assert isinstance(version, int), f"{revert.key}: expected the number of a version"
    return version
