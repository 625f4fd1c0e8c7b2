"""Several reward models share the slots of scoring: fixed allocations first, then whole replicas, largest first."""

from collections.abc import Mapping

from infra.errors import BadInput
from infra.plugins import nearest_name


def allot(scoring_slots: int, slots: Mapping[str, int], *, fixed: Mapping[str, int]) -> dict[str, int]:
    """Return replicas by term. `slots`: worker slots of one replica; `fixed`: replicas that are given.

    The rest goes round in turns, one whole replica per turn, largest replica first, until nothing fits.
    Raises `BadInput` where not every term gets a replica.

    >>> allot(8, {"big": 3, "small": 1}, fixed={})
    {'big': 2, 'small': 2}
    """
    _check_terms(slots, fixed)
    least = least_slots(slots, fixed=fixed)
    if least > scoring_slots:
        raise BadInput(f"placement: {_wishes(slots, fixed)} need {least} worker slots, found {scoring_slots}")
    replicas = {term: fixed.get(term, 0) for term in slots}
    left = scoring_slots - sum(slots[term] * count for term, count in replicas.items())
    sharing = sorted((term for term in slots if term not in fixed), key=lambda term: (-slots[term], term))
    while any(slots[term] <= left for term in sharing):
        for term in sharing:
            if slots[term] <= left:
                replicas[term] += 1
                left -= slots[term]
    return replicas


def least_slots(slots: Mapping[str, int], *, fixed: Mapping[str, int]) -> int:
    """Fewest slots with which every term has a replica, or as many as are fixed."""
    return sum(size * fixed.get(term, 1) for term, size in slots.items())


def _check_terms(slots: Mapping[str, int], fixed: Mapping[str, int]) -> None:
    for term in fixed:
        if term not in slots:
            raise BadInput(f"placement.replicas: no served reward is called {term!r}{nearest_name(term, slots)}")


def _wishes(slots: Mapping[str, int], fixed: Mapping[str, int]) -> str:
    return " and ".join(f"{fixed.get(term, 1)} × {term!r} of {size} slots" for term, size in slots.items())
