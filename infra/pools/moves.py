"""Records of the changes that a fleet makes to the workers in its slots."""

from collections.abc import Set
from dataclasses import dataclass

from infra.pools.slot import Assignment, Change


@dataclass(frozen=True, slots=True)
class Move:
    """Change of the worker in one slot: started, woken or put to sleep."""

    slot: int
    before: str | None
    """Role before the change, or None if the slot was asleep."""
    after: str | None
    how: str
    """`start` if the worker process is new, `wake` if it has worked in this role before, or `sleep`."""
    seconds: float
    """Seconds for putting the old worker to sleep, and for starting or waking the new worker including its `take`."""
    drain_seconds: float
    """Seconds until the old worker had finished its current work unit."""
    error: str | None
    """Error that caused the change to be undone, or None if the change succeeded."""


def list_moves(
    change: Change, woken: Set[Assignment], took_seconds: tuple[float, float], error: str | None
) -> list[Move]:
    """Return one `Move` per slot. `took_seconds` contains the seconds for the change, and for finishing old work."""
    before = {slot: assignment.role for assignment in change.out for slot in assignment.slots}
    after = {slot: assignment for assignment in change.into for slot in assignment.slots}
    seconds, drain_seconds = took_seconds
    return [
        Move(
            slot=slot,
            before=before.get(slot),
            after=after[slot].role if slot in after else None,
            how="sleep" if slot not in after else "wake" if after[slot] in woken else "start",
            seconds=seconds,
            drain_seconds=drain_seconds,
            error=error,
        )
        for slot in sorted({*before, *after})
    ]
