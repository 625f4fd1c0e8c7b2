"""How far a long training has come: notes that its first rank leaves in the run for who watches, newest only.

No result depends on them. Each replaces the one before, and the last goes when the training ends; one that a killed
process left goes with the next training.
"""

import time
from collections.abc import Callable
from typing import Final

from pydantic import ValidationError

from infra.config import Settings
from infra.errors import RheostatError
from infra.store.storage import Objects

NOTES: Final = "report/steps/"
GOALS: Final = "report/goal/"
NOTE_SECONDS: Final = 3.0
"""Between two notes, which may be a request each."""


class StepsNote(Settings):
    """A training under way."""

    step: int
    """Steps taken."""
    steps: int
    """Steps in all."""
    loss: float
    """Mean over the last of them."""


class StepNotes:
    """The notes of one training, written by the rank that has a store to write to."""

    def __init__(self, store: Objects | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._written, self._key = clock(), ""
        if store is not None:
            clear_notes(store)

    def tell(self, step: int, steps: int, loss: float) -> None:
        """Replace the last note, some seconds after it was written."""
        if self._store is None or self._clock() - self._written < NOTE_SECONDS:
            return
        before, self._key, self._written = self._key, f"{NOTES}{step:07d}.json", self._clock()
        note = StepsNote(step=step, steps=steps, loss=loss)
        self._store.put(self._key, note.model_dump_json().encode(), durable=False)
        if before:
            self._store.delete(before)

    def end(self) -> None:
        """Leave none."""
        if self._store is not None and self._key:
            self._store.delete(self._key)


def clear_notes(store: Objects) -> None:
    """Delete what a training that was killed has left."""
    for entry in store.entries(NOTES):
        store.delete(entry.key)


def newest_note(store: Objects) -> StepsNote | None:
    """Return what a training has noted last, if one is under way."""
    try:
        entries = store.entries(NOTES)
        content = store.find(entries[-1].key) if entries else None
        return None if content is None else StepsNote.model_validate_json(content)
    except (RheostatError, ValidationError):  # it was replaced meanwhile
        return None


class Goal(Settings):
    """What a process that trains a run was asked for."""

    iterations: int
    """How many in all."""


def note_goal(store: Objects, iterations: int, *, epoch: int) -> None:
    """Say how far a run is to go: its record does not, where results do not depend on it."""
    store.put(f"{GOALS}{epoch:06d}.json", Goal(iterations=iterations).model_dump_json().encode(), durable=False)


def newest_goal(store: Objects) -> int | None:
    """Return how far a run was to go when it was last taken up."""
    entries = store.entries(GOALS)
    return None if not entries else Goal.model_validate_json(store.read(entries[-1].key)).iterations
