"""The ways to split worker slots between the roles, and to share those of scoring among several reward models.

Reward models: fixed allocations first, then whole replicas, largest first.
"""

from collections.abc import Mapping

from infra.errors import BadInput
from infra.plugins import nearest_name
from placement.records import Plan, PlanInputs

MOST = 512
"""Splits that are compared; finer steps than 1/500 of the workers are below what predictions can tell apart."""


def splits(inputs: PlanInputs) -> tuple[Plan, ...]:
    """Every split that makes whole workers and leaves no slot over; where there is none, those that waste slots."""
    rollout, scoring, workers = inputs.rollout, inputs.scoring, inputs.workers
    least = max(scoring.slots, scoring.least_slots)
    first = -(-max(rollout.slots, rollout.least_slots) // rollout.slots) * rollout.slots
    counts = range(first, workers - least + 1, rollout.slots)
    whole = [count for count in counts if (workers - count) % scoring.slots == 0]
    return tuple(Plan(mode="split", rollout=count, scoring=workers - count) for count in whole or counts)


def turns(inputs: PlanInputs) -> Plan:
    """Roles one after the other, each on all slots."""
    return Plan(mode="colocated", rollout=inputs.workers, scoring=inputs.workers)


def standing(inputs: PlanInputs) -> Plan | None:
    """The plan that may be kept: none at the start, where the number of slots has changed since, or where a handover
    has left a role without any."""
    current = inputs.current
    if current is None or current == turns(inputs):
        return current
    usable = current.mode == "split" and min(current.rollout, current.scoring) > 0
    return current if usable and current.rollout + current.scoring == inputs.workers else None


def candidates(inputs: PlanInputs) -> tuple[Plan, ...]:
    """What may be done: in turns first, then every split, or `MOST` of them evenly; the plan that stands is there."""
    every, current = splits(inputs), standing(inputs)
    thinned = [every[number * (len(every) - 1) // (MOST - 1)] for number in range(MOST)] if len(every) > MOST else every
    plans = (turns(inputs), *thinned)
    return plans if current is None or current in plans else (*plans, current)


def nearest_split(inputs: PlanInputs, rollout: float) -> Plan:
    """The split whose rollout is nearest to so many slots; of two as near, the one with more.

    Raises `BadInput` where the slots are too few for both roles.
    """
    found = splits(inputs)
    if not found:
        raise BadInput(
            f"placement: expected at least {inputs.rollout.slots} + {inputs.scoring.least_slots} worker slots to run"
            f" rollout and scoring side by side, found {inputs.workers}: set pools.workers, or placement.kind=colocated"
        )
    return min(found, key=lambda plan: (abs(plan.rollout - rollout), -plan.rollout))


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
