"""Policies that a run goes on with: what an update made, or an earlier one that an alarm had the run return to."""

from infra.store.manifests import Manifest
from infra.store.runs import Run
from tasks.run.keys import StageKey, iteration_key


def return_key(number: int) -> StageKey:
    """Key of the return after an iteration, where there is one: the policy that the run goes on with."""
    return StageKey.of(iteration_key(number), "return")


def has_returned(run: Run, number: int) -> bool:
    """Whether the policy after an iteration is an earlier one; a run whose alarms order no return is not looked at."""
    return number > 0 and "alarms" in run.record.config and run.has(return_key(number))


def policy_key(run: Run, number: int) -> StageKey:
    """Key of the policy that the run goes on with after `number` iterations."""
    return return_key(number) if has_returned(run, number) else StageKey.policy(number)


def policy_after(run: Run, number: int) -> Manifest:
    """The policy that the run goes on with after `number` iterations, with its critic and its state."""
    return run.require(policy_key(run, number))


def critic_after(run: Run, number: int) -> Manifest:
    """The critic beside it."""
    return policy_after(run, number) if number else run.require(StageKey.critic(0))


def made_in(run: Run, number: int) -> int:
    """The iteration whose update made the policy after `number` iterations; 0 for the first policy."""
    while has_returned(run, number):
        number = returned_to(run.require(return_key(number)))
    return number


def version_before(run: Run, number: int) -> int:
    """The version that a version followed from: the one before, or of a return the one that it has all of."""
    return returned_to(run.require(return_key(number))) if has_returned(run, number) else number - 1


def returned_to(returned: Manifest) -> int:
    """The version that a return has all of."""
    version = returned.detail["to"]
    assert isinstance(version, int), f"{returned.key}: expected the number of a version"
    return version
