"""Stored optimizer states: which policy versions have a stored state, and which updates must be repeated if a state is
missing.

At least every `update.state_every`-th update stores its optimizer state. The state is written during the next rollouts
and is complete before the next update commits, so the manifest of a version may name a state that is not stored yet. If
a state is missing, the updates since the previous stored state are repeated.
"""

from collections.abc import Iterable, Mapping

from rheostat.infra.store.bundles import BundleRef, has_bundle
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.reverts import policy_after, version_before

STATES = ("state", "critic_state")
"""Names under which a stored result lists the optimizer states of the policy and of the critic."""


def states_of(version: Manifest) -> list[BundleRef]:
    """Return references to the optimizer states of a policy version: the policy's state and, if a critic was trained,
    the critic's state. The states may not be stored yet."""
    return [version.bundles[name] for name in STATES if name in version.bundles]


def changed_model(update: Manifest) -> bool:
    """Return whether an update changed the model. An update that was discarded, or that had no tokens to train on, did
    not."""
    return update.metrics.get("steps", 0) > 0


def newest_with_state(run: Run, number: int) -> int:
    """Return the newest version up to `number` whose record names an optimizer state, or 0 if there is none. The state
    may not be stored yet."""
    while number and not states_of(policy_after(run, number)):
        number = version_before(run, number)
    return number


def is_due(run: Run, number: int, *, every: int) -> bool:
    """Return whether the update of an iteration must store its optimizer state, so that at most `every` versions are
    between two stored states. Updates without optimizer steps never store a state."""
    return number - newest_with_state(run, number - 1) >= every


def updates_since_state(run: Run, number: int) -> tuple[int, list[int]]:
    """Find out where to resume training: return the newest version whose optimizer state is stored, and the iterations
    whose updates must be repeated to reach version `number`."""
    way: list[int] = []
    while number:
        version = policy_after(run, number)
        states = states_of(version)
        if states and all(has_bundle(run.store, state) for state in states):
            break
        if changed_model(version):
            way.append(number)
        number = version_before(run, number)
    return number, way[::-1]


def possibly_missing_states(manifests: Iterable[Manifest], *, relayout_iteration: int = 0) -> list[BundleRef]:
    """Return the optimizer states whose absence is no error: the states of the newest version and of versions that an
    alarm reverted.

    If the number of ranks changed at `relayout_iteration`, the last state before this iteration may be missing too. If
    that state was lost, the updates were repeated on a different number of ranks, and the new state has slightly
    different values and another digest. The same holds before each update that repeated earlier updates on GPUs, which
    its metric `repeated_difference` shows.
    """
    all_manifests = list(manifests)
    updates = {
        StageKey.parse(manifest.key).iteration: manifest
        for manifest in all_manifests
        if manifest.key.startswith("it-") and manifest.key.endswith("/update")
    }
    states_by_version = {number: states for number, update in updates.items() if (states := states_of(update))}
    inexact = [number for number, update in updates.items() if "repeated_difference" in update.metrics]
    before = [
        max((number for number in states_by_version if number < limit), default=0)
        for limit in (relayout_iteration, *inexact)
    ]
    reverted = [StageKey.parse(each.key).iteration for each in all_manifests if _is_revert(each)]
    uncertain = [*reverted, *([max(updates)] if updates else []), *before]
    return [state for number in uncertain for state in states_by_version.get(number, [])]


def _is_revert(manifest: Manifest) -> bool:
    return manifest.key.startswith("it-") and manifest.key.endswith("/return")


def state_every(run: Run, number: int) -> int:
    """Return the recorded setting `update.state_every` of an iteration: the number of updates per stored optimizer
    state."""
    update = run.config_at(number).get("update")
    every = update.get("state_every", 1) if isinstance(update, Mapping) else 1
    assert isinstance(every, int)
    return every
