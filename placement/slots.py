"""Possible splits of the worker slots between rollout and scoring, and distribution of scoring slots to reward models.

A slot is a reserved place for one worker. A split assigns some slots to rollout and the others to scoring. Reward
models with a configured number of replicas get their slots first. The remaining slots are used for whole replicas of
the other reward models, which get slots in rounds. In each round, the models with the largest replicas come first.
"""

from collections.abc import Mapping

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import nearest_name
from rheostat.placement.records import Plan, PlanInputs

MAX_SPLITS = 512
"""Maximum number of splits that are compared. Predictions are not accurate enough to distinguish splits that differ by
less than 1/500 of the workers."""


def list_splits(inputs: PlanInputs) -> tuple[Plan, ...]:
    """Return all splits into whole workers that use all slots.

    If there is no such split, return the splits that leave some slots unused. Return an empty tuple if there are too
    few slots for both roles.
    """
    rollout, scoring, workers = inputs.rollout, inputs.scoring, inputs.workers
    min_scoring = max(scoring.slots, scoring.least_slots)
    first = -(-max(rollout.slots, rollout.least_slots) // rollout.slots) * rollout.slots
    counts = range(first, workers - min_scoring + 1, rollout.slots)
    exact = [count for count in counts if (workers - count) % scoring.slots == 0]
    return tuple(Plan(mode="split", rollout=count, scoring=workers - count) for count in exact or counts)


def build_turns_plan(inputs: PlanInputs) -> Plan:
    """Return the plan in which rollout and scoring take turns, each on all slots."""
    return Plan(mode="colocated", rollout=inputs.workers, scoring=inputs.workers)


def find_current_plan(inputs: PlanInputs) -> Plan | None:
    """Return the current plan, or None if there is no plan or it cannot be kept.

    A plan cannot be kept if the number of slots has changed, or if all slots of a role were moved to the other role.
    Before the first stage there is no plan.
    """
    current = inputs.current
    if current is None or current == build_turns_plan(inputs):
        return current
    usable = current.mode == "split" and min(current.rollout, current.scoring) > 0
    return current if usable and current.rollout + current.scoring == inputs.workers else None


def list_candidates(inputs: PlanInputs) -> tuple[Plan, ...]:
    """Return the candidate plans: taking turns first, then the splits.

    If there are more than `MAX_SPLITS` splits, only `MAX_SPLITS` evenly spaced splits are returned. The current plan is
    always included if it can be kept.
    """
    every, current = list_splits(inputs), find_current_plan(inputs)
    thinned = (
        [every[number * (len(every) - 1) // (MAX_SPLITS - 1)] for number in range(MAX_SPLITS)]
        if len(every) > MAX_SPLITS
        else every
    )
    plans = (build_turns_plan(inputs), *thinned)
    return plans if current is None or current in plans else (*plans, current)


def nearest_split(inputs: PlanInputs, rollout: float) -> Plan:
    """Return the split whose number of rollout slots is closest to `rollout`.

    If two splits are equally close, the split with more rollout slots is returned. Raises `BadInput` if there are too
    few slots for both roles.
    """
    plans = list_splits(inputs)
    if not plans:
        raise BadInput(
            f"there are {inputs.workers} worker slots, but if rollout and scoring run at the same time, rollout needs "
            f"at least {inputs.rollout.slots} and scoring at least {inputs.scoring.least_slots}. Increase "
            "pools.workers, or set placement.kind = 'colocated'."
        )
    return min(plans, key=lambda plan: (abs(plan.rollout - rollout), -plan.rollout))


def assign_replicas(scoring_slots: int, slots: Mapping[str, int], *, fixed: Mapping[str, int]) -> dict[str, int]:
    """Return the number of replicas of each reward term.

    `slots` contains the number of worker slots that one replica needs, and `fixed` the configured number of replicas,
    both by reward term. The slots that remain after the fixed replicas are assigned in rounds. In each round every
    other term gets one more replica if it fits, starting with the terms that have the largest replicas. Raises
    `BadInput` if a term would get no replica, or if `fixed` contains an unknown term.

    >>> assign_replicas(8, {"big": 3, "small": 1}, fixed={})
    {'big': 2, 'small': 2}
    """
    _check_terms(slots, fixed)
    needed = count_min_slots(slots, fixed=fixed)
    if needed > scoring_slots:
        needs = f"{_describe_replicas(slots, fixed)} need {format_count(needed, 'worker slot')}"
        raise BadInput(
            f"{needs}, but only {scoring_slots} are available for scoring. Increase pools.workers, or lower "
            "placement.replicas."
        )
    replicas = {term: fixed.get(term, 0) for term in slots}
    free = scoring_slots - sum(slots[term] * count for term, count in replicas.items())
    sharing = sorted((term for term in slots if term not in fixed), key=lambda term: (-slots[term], term))
    while any(slots[term] <= free for term in sharing):
        for term in sharing:
            if slots[term] <= free:
                replicas[term] += 1
                free -= slots[term]
    return replicas


def count_min_slots(slots: Mapping[str, int], *, fixed: Mapping[str, int]) -> int:
    """Return the minimum number of slots with which every reward term gets its fixed number of replicas, or at least
    one replica."""
    return sum(size * fixed.get(term, 1) for term, size in slots.items())


def _check_terms(slots: Mapping[str, int], fixed: Mapping[str, int]) -> None:
    for term in fixed:
        if term not in slots:
            raise BadInput(
                f"placement.replicas contains {term!r}, which is not a reward whose model runs in worker "
                f"slots{nearest_name(term, slots)}"
            )


def _describe_replicas(slots: Mapping[str, int], fixed: Mapping[str, int]) -> str:
    return " and ".join(
        f"{fixed.get(term, 1)} × {term!r} of {format_count(size, 'slot')}" for term, size in slots.items()
    )
