"""Progress notes of a long training: small records in the run's store, for users who watch the run. The first rank
writes them.

Results do not depend on the notes. Each note replaces the previous note. The last note is deleted when the training
ends. If the process is killed, the next training deletes the note.
"""

import time
from collections.abc import Callable
from typing import Final

from pydantic import ValidationError

from rheostat.infra.config import Settings
from rheostat.infra.errors import RheostatError
from rheostat.infra.store.contracts import Objects

NOTES: Final = "report/steps/"
GOALS: Final = "report/goal/"
NOTE_SECONDS: Final = 3.0
"""Minimum time in seconds between two progress notes, because writing a note may require a request to a server."""


class StepsNote(Settings):
    """Progress note of supervised training that is running: the number of optimizer steps done, and the recent loss."""

    step: int
    """Number of optimizer steps done so far."""
    steps: int
    """Total number of optimizer steps."""
    loss: float
    """Mean training loss of the most recent steps."""


class StepNotes:
    """Writer of progress notes of a supervised training, for users who watch the run. A rank without a store writes
    nothing."""

    def __init__(self, store: Objects | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._written, self._key = clock(), ""
        if store is not None:
            clear_notes(store)

    def report(self, step: int, steps: int, loss: float) -> None:
        """Write a progress note that replaces the previous one. Do nothing if the previous note is younger than
        `NOTE_SECONDS`."""
        if self._store is None or self._clock() - self._written < NOTE_SECONDS:
            return
        before, self._key, self._written = self._key, f"{NOTES}{step:07d}.json", self._clock()
        note = StepsNote(step=step, steps=steps, loss=loss)
        self._store.put(self._key, note.model_dump_json().encode(), durable=False)
        if before:
            self._store.delete(before)

    def end(self) -> None:
        """Delete the progress note, because the training has ended."""
        if self._store is not None and self._key:
            self._store.delete(self._key)


def clear_notes(store: Objects) -> None:
    """Delete the progress notes that a killed training has left in the run."""
    for entry in store.entries(NOTES):
        store.delete(entry.key)


def newest_note(store: Objects) -> StepsNote | None:
    """Return the newest progress note of a supervised training that is running, or None if there is none."""
    try:
        entries = store.entries(NOTES)
        content = store.find(entries[-1].key) if entries else None
        return None if content is None else StepsNote.model_validate_json(content)
    except (RheostatError, ValidationError):  # the note was replaced meanwhile
        return None


class Goal(Settings):
    """Number of iterations that the user has requested for a run. It is stored for programs that show the run's
    progress."""

    iterations: int
    """Total number of iterations that the run should have at its end."""


def write_goal(store: Objects, iterations: int, *, epoch: int) -> None:
    """Store the number of iterations that the user has requested for a run. It is not in the run record, because
    results do not depend on it. `epoch` is the number of the run's present epoch (the period in which one process has
    locked it)."""
    store.put(f"{GOALS}{epoch:06d}.json", Goal(iterations=iterations).model_dump_json().encode(), durable=False)


def newest_goal(store: Objects) -> int | None:
    """Return the number of iterations that was requested when the run was last started, or None if it is not stored."""
    entries = store.entries(GOALS)
    return None if not entries else Goal.model_validate_json(store.read(entries[-1].key)).iterations
