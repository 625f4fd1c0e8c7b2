"""Optimizer states that may be missing from a store without an error."""

import pytest

from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.manifests import Manifest
from rheostat.tasks.run.states import possibly_missing_states


def build_updates(*repeated: int) -> list[Manifest]:
    """Return the records of five updates. The updates in `repeated` had to repeat earlier ones on GPUs."""
    return [
        Manifest(
            key=f"it-{number:04d}/update",
            bundles={"state": BundleRef(key=f"states/{number}", digest=f"{number}" * 64, bytes=1)},
            metrics={"steps": 2.0} | ({"repeated_difference": 1e-6} if number in repeated else {}),
        )
        for number in range(1, 6)
    ]


@pytest.mark.parametrize(
    ("repeated", "relayout", "expected"),
    [((), 0, {5}), ((3,), 0, {2, 5}), ((2, 3), 0, {1, 2, 5}), ((), 4, {3, 5}), ((3,), 5, {2, 4, 5}), ((1,), 0, {5})],
)
def test_states_may_be_missing_before_inexact_repetitions_and_at_the_end(repeated, relayout, expected):
    missing = possibly_missing_states(build_updates(*repeated), relayout_iteration=relayout)
    assert {state.key for state in missing} == {f"states/{number}" for number in expected}
