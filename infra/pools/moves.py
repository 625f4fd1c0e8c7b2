"""Records on which placement decisions are based: the load of a role, and the changes in worker slots with their
duration."""

from collections.abc import Set
from dataclasses import dataclass

from rheostat.infra.pools.slot import Assignment, Change


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """Load of one role (such as rollout), for placement decisions. It only counts work units of this process."""

    role: str
    slots: int
    workers: int
    """Number of awake workers."""
    idle: int
    waiting: int
    """Number of work units that wait for a worker."""
    in_flight: tuple[tuple[float, object], ...]
    """Running work units, as pairs (seconds since the work unit began, work unit), one for each busy worker."""
    done: int
    """Number of work units finished since the fleet was opened."""
    busy_seconds: float
    """Total seconds that workers have spent on work units since the fleet was opened, including units in progress."""


@dataclass(frozen=True, slots=True)
class Move:
    """Record of a change in one slot of a fleet: a worker was started, woken or put to sleep."""

    slot: int
    before: str | None
    """Role of the worker that was awake in the slot before the change, or None if there was none."""
    after: str | None
    how: str
    """Kind of change: `start` for a new worker process, `wake` for a sleeping worker that was woken, or `sleep`."""
    seconds: float
    """Duration of the whole change in seconds: putting the old worker to sleep, then starting or waking the new worker,
    including its method `take`."""
    drain_seconds: float
    """Seconds that the change waited for the old worker to finish its current work unit."""
    error: str | None
    """Message of the error that caused the change to be undone, or None if the change succeeded."""


def list_moves(
    change: Change, woken: Set[Assignment], took_seconds: tuple[float, float], error: str | None
) -> list[Move]:
    """Describe a change of workers as one `Move` per slot. `woken` are the assignments whose worker was woken and not
    newly started. `took_seconds` contains the duration of the change, and the seconds spent waiting for current work
    before it."""
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
