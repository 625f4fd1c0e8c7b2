"""Rows of data files that `drop` leaves out instead of refusing the file."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import ClassVar

from infra.errors import BadInput, InputErrors
from models.config.file_rules import DropReason


class UnusableRow(BadInput):
    """Raised when a row cannot be used for a reason for which `drop` can leave rows out."""

    reason: ClassVar[DropReason]


class EmptyRow(UnusableRow):
    """Raised when a prompt, an answer, a completion or a message is blank, null or NaN."""

    reason = "empty"


class TiedRow(UnusableRow):
    """Raised when neither completion of a preference pair is better."""

    reason = "ties"


class MismatchedRow(UnusableRow):
    """Raised when the two completions of a preference pair answer different prompts."""

    reason = "mismatched"


class RowErrors(InputErrors):
    """Collector of the input errors in rows that counts the rows that `drop` leaves out, and does not report them."""

    def __init__(self, drop: Collection[DropReason] = ()) -> None:
        super().__init__()
        self._drop = frozenset(drop)
        self.dropped: Counter[str] = Counter()
        """Number of rows that were left out, by reason."""

    @contextmanager
    def collect(self, place: str) -> Iterator[None]:
        """Run the block that reads one row. Errors are kept, except if `drop` leaves the row out."""
        with super().collect(place):
            try:
                yield
            except UnusableRow as error:
                if error.reason not in self._drop:
                    raise
                self.dropped[error.reason] += 1
