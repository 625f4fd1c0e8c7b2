"""Which versions have their optimizer's state in the store: by every `update.state_every`-th update at the latest.

A version names its state before the state is there: it is written during the next rollouts, and there when the next
update is committed. Where it is missing, the updates since the one before are taken again.
"""

from collections.abc import Iterable, Mapping

from infra.store.bundles import BundleRef, has_bundle
from infra.store.manifests import Manifest
from infra.store.runs import Run
from tasks.run.keys import StageKey
from tasks.run.returns import policy_after, version_before

STATES = ("state", "critic_state")
"""How manifests name the states of a policy and of its critic."""


def states_of(version: Manifest) -> list[BundleRef]:
    """States that a version names: both, or where one of the models learns alone, its own."""
    return [version.bundles[name] for name in STATES if name in version.bundles]


def took_steps(update: Manifest) -> bool:
    """Whether an update changed anything: one without a token to learn from does not, nor one that was discarded."""
    return update.metrics.get("steps", 0) > 0


def newest_with_state(run: Run, number: int) -> int:
    """The newest version up to a number that names a state; 0 if there is none."""
    while number and not states_of(policy_after(run, number)):
        number = version_before(run, number)
    return number


def is_due(run: Run, number: int, *, every: int) -> bool:
    """Whether the update of an iteration is to keep its state, if it takes steps."""
    return number - newest_with_state(run, number - 1) >= every


def way_to(run: Run, number: int) -> tuple[int, list[int]]:
    """The newest version whose state is in the store, and the iterations whose updates lead from there to a number."""
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
    """States that may not be there: those of the newest version, and of those that an alarm had the run return from.

    Where the run was `moved` to other ranks in an iteration, those of the one before, too: if they were lost then,
    what was learnt again in their place is near them, and has another digest.
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
    """How the run was made: `update.state_every`."""
    update = run.record.config.get("update")
    every = update.get("state_every", 1) if isinstance(update, Mapping) else 1
    assert isinstance(every, int)
    return every
