"""Stored optimizer states: the policy versions that have one, and the updates to repeat if one is missing.

At least every `update.state_every`-th update stores one. A version names its state before the state is stored: it is
written during the next rollouts and is complete before the next update commits. If a state is missing, the updates
since the previous stored state are repeated.
"""

from collections.abc import Iterable, Mapping

from infra.store.bundles import BundleRef, has_bundle
from infra.store.manifests import Manifest
from infra.store.runs import Run
from tasks.run.keys import StageKey
from tasks.run.returns import policy_after, version_before

STATES = ("state", "critic_state")
"""Names under which manifests store the optimizer states of a policy and of its critic."""


def states_of(version: Manifest) -> list[BundleRef]:
    """Return the optimizer states that a version names: of policy and critic, or of the one model that was trained."""
    return [version.bundles[name] for name in STATES if name in version.bundles]


def took_steps(update: Manifest) -> bool:
    """Return whether an update changed the model. An update without training tokens or one that was discarded changes
    nothing."""
    return update.metrics.get("steps", 0) > 0


def newest_with_state(run: Run, number: int) -> int:
    """Return the newest version up to `number` that names an optimizer state, or 0 if there is none."""
    while number and not states_of(policy_after(run, number)):
        number = version_before(run, number)
    return number


def is_due(run: Run, number: int, *, every: int) -> bool:
    """Return whether the update of an iteration must store its optimizer state, provided that it takes steps."""
    return number - newest_with_state(run, number - 1) >= every


def way_to(run: Run, number: int) -> tuple[int, list[int]]:
    """Return the newest version whose optimizer state is stored, and the iterations whose updates lead from there to
    version `number`."""
    way: list[int] = []
    while number:
        version = policy_after(run, number)
        states = states_of(version)
        if states and all(has_bundle(run.store, state) for state in states):
            break
        if took_steps(version):
            way.append(number)
        number = version_before(run, number)
    return number, way[::-1]


def coming_states(manifests: Iterable[Manifest], *, moved: int = 0) -> list[BundleRef]:
    """Return the optimizer states that may not be stored yet: those of the newest version and of versions that an alarm
    reverted.

    If the run `moved` to another number of ranks in an iteration, the last state before it may be missing too. If it
    was lost then, the updates were repeated on other ranks with a slightly different result and another digest.
    """
    made = list(manifests)
    updates = {
        StageKey.parse(manifest.key).iteration: manifest
        for manifest in made
        if manifest.key.startswith("it-") and manifest.key.endswith("/update")
    }
    named = {number: states for number, update in updates.items() if (states := states_of(update))}
    before = max((number for number in named if number < moved), default=0)
    returned = [StageKey.parse(each.key).iteration for each in made if _is_return(each)]
    uncertain = [*returned, *([max(updates)] if updates else []), before]
    return [state for number in uncertain for state in named.get(number, [])]


def _is_return(manifest: Manifest) -> bool:
    return manifest.key.startswith("it-") and manifest.key.endswith("/return")


def state_every(run: Run) -> int:
    """Return the recorded setting `update.state_every` of the run."""
    update = run.record.config.get("update")
    every = update.get("state_every", 1) if isinstance(update, Mapping) else 1
    assert isinstance(every, int)
    return every
