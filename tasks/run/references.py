"""Reference model of each iteration, from which a KL penalty measures the divergence of the policy: the initial policy,
or the policy of the last reset. It depends only on stored results, so a resumed run uses the same one."""

from collections.abc import Mapping

from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.tasks.run.reverts import has_reverted, policy_after, updating_iteration


def recorded_reset_every(run: Run, number: int) -> int | None:
    """Return the recorded number of iterations between two resets of the reference, or None if the reference of an
    iteration is always the initial policy."""
    config = run.config_at(number)
    update, algorithm = config.get("update"), config.get("algorithm")
    options = algorithm.get("options") if isinstance(algorithm, Mapping) else None  # of a user's algorithm
    for table in (update, algorithm, options):
        penalty = table.get("kl") if isinstance(table, Mapping) else None
        every = penalty.get("reset_every") if isinstance(penalty, Mapping) else None
        if isinstance(every, int):
            return every
    return None


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
    for later in range(reference + 1, number):
        if has_reverted(run, later) and updating_iteration(run, later) < updating_iteration(run, reference):
            reference = later
    return reference


def reference_of(run: Run, number: int) -> Manifest:
    """Return the stored record of the reference model of an iteration."""
    return policy_after(run, reference_iteration(run, number, recorded_reset_every(run, number)))
