"""Reference model of each iteration, from which a KL penalty measures the divergence of the policy: the initial policy,
or the policy of the last reset. It depends only on stored results, so a resumed run uses the same one."""

from collections.abc import Mapping
from typing import Final

from pydantic import JsonValue

from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.tasks.run.reverts import has_reverted, policy_after, updating_iteration

ESTIMATORS: Final = ("k1", "k2", "k3")
"""Values of `kind` with which recorded settings are those of a KL penalty."""


def recorded_reset_every(run: Run, number: int) -> int | None:
    """Return the recorded number of iterations between two resets of the reference, or None if the reference of an
    iteration is always the initial policy."""
    config = run.config_at(number)
    found = (_find_reset_every(config.get(table)) for table in ("update", "algorithm"))
    return next((every for every in found if every is not None), None)


def _find_reset_every(settings: JsonValue) -> int | None:
    """Return the first value of a key `reset_every` of a KL penalty in recorded settings. All tables are searched,
    because an algorithm of the user may have its KL penalty at any key."""
    if not isinstance(settings, Mapping):
        return None
    every = settings.get("reset_every")
    if settings.get("kind") in ESTIMATORS and isinstance(every, int):
        return every
    found = map(_find_reset_every, settings.values())
    return next((inner for inner in found if inner is not None), None)


def reference_iteration(run: Run, number: int, reset_every: int | None) -> int:
    """Return the iteration after which the current policy was the reference of iteration `number`, or 0 for the initial
    policy.

    With n = `reset_every`, this is n x floor((number - 1) / n) (reference reset, ProRL, arXiv 2505.24864). If an alarm
    has reverted to a policy that is older than this reference, the restored policy is the reference until the next
    reset, because the alarm rejected the policies after it.
    """
    if reset_every is None:
        return 0
    reference = (number - 1) // reset_every * reset_every
    if not run.config_at(number).get("alarms"):  # only alarms that revert are recorded
        return reference
    for later in range(reference + 1, number):
        if has_reverted(run, later) and updating_iteration(run, later) < updating_iteration(run, reference):
            reference = later
    return reference


def reference_of(run: Run, number: int) -> Manifest:
    """Return the stored record of the reference model of an iteration."""
    return policy_after(run, reference_iteration(run, number, recorded_reset_every(run, number)))
