"""Rows of data files that `drop` leaves out instead of refusing the file."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.store.inputs import format_path
from rheostat.models.config.file_rules import DropReason


def describe_empty_file(path: Path, noun: str, *, dropped: int = 0, key: str = "") -> BadInput:
    """Return the error for a file without usable rows. `noun` names one row, such as "problem". `dropped` is the number
    of rows that the configuration key `key` left out."""
    name = format_path(path)
    if dropped:
        return BadInput(f"{name}: {key} leaves out every row ({dropped:,}). Expected at least one {noun}.")
    return BadInput(
        f"{name}: the file is empty, but it must contain at least one {noun}. Check that the file was written "
        "completely, or set the path of another file."
    )


class UnusableRow(BadInput):
    """Base class of errors for rows that the configuration key `drop` can leave out. `reason` is the value in
    `drop`."""

    reason: ClassVar[DropReason]


class EmptyRow(UnusableRow):
    """Raised when a prompt, an answer, a completion or a message in a row is blank, null or NaN."""

    reason = "empty"


class TiedRow(UnusableRow):
    """Raised when the two completions of a preference pair are equal or have equal scores, so that neither is
    better."""

    reason = "ties"


class MismatchedRow(UnusableRow):
    """Raised when the two completions of a preference pair belong to different prompts."""

    reason = "mismatched"


class RowErrors(InputErrors):
    """Collector of errors in the rows of a file. Rows that the configuration key `drop` leaves out are counted instead
    of reported."""

    def __init__(self, drop: Collection[DropReason] = ()) -> None:
        super().__init__()
        self._drop = frozenset(drop)
        self.dropped: Counter[str] = Counter()
        """Number of rows that were left out, by reason."""

    @contextmanager
    def collect(self, place: str) -> Iterator[None]:
        """Run the block that reads the row at `place`. An error is collected, except if `drop` leaves the row out for
        this reason."""
        with super().collect(place):
            try:
                yield
            except UnusableRow as error:
                if error.reason not in self._drop:
                    raise
                self.dropped[error.reason] += 1
