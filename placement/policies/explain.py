"""Decisions in words: one sentence that a person understands."""

from placement.records import Plan


def described(plan: Plan) -> str:
    """A plan as a clause: "8 workers generate and 4 score", or "roles take turns on all 8 workers"."""
    if plan.mode == "colocated":
        return f"roles take turns on all {plan.rollout} workers"
    return f"{plan.rollout}/{plan.scoring} between rollout and scoring"


def changed(current: Plan, plan: Plan) -> str:
    """What a change does to the workers."""
    if plan.mode == "colocated" or current.mode == "colocated":
        return f"changed from {short(current)} to {short(plan)}"
    moved = plan.rollout - current.rollout
    source, target = ("scoring", "rollout") if moved > 0 else ("rollout", "scoring")
    return f"moved {abs(moved)} of {plan.rollout + plan.scoring} workers from {source} to {target}"


def short(plan: Plan) -> str:
    """A plan in a word: "6/2", or "turns"."""
    return "turns" if plan.mode == "colocated" else f"{plan.rollout}/{plan.scoring}"
