"""Reports on how the files of a job are read: the recognized shapes, and the numbers of rows that are left out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from rheostat.infra.plugins import find_target
from rheostat.models.config.data import DataSource
from rheostat.models.config.preferences import Preferences


@dataclass(frozen=True, slots=True)
class ReadingReport:
    """Report on how the files of a data source were read for one or more splits."""

    notes: tuple[str, ...] = ()
    """Sentences for `rheostat plan` about the shapes that were recognized in the files."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of rows that are left out because of `drop`, by reason. Rows that are too long for a model are not
    included."""

    def __add__(self, other: "ReadingReport") -> "ReadingReport":
        """Return the report on the files of both reports."""
        notes = tuple(dict.fromkeys((*self.notes, *other.notes)))
        return ReadingReport(notes, Counter(self.dropped) + Counter(other.dropped))


class ReadingReporter(Protocol):
    """Function that reports how one kind of data source or preferences reads its files, called by `report_reading`."""

    def __call__(self, settings: Any, split: str, /) -> ReadingReport:  # noqa: ANN401 -- own settings class
        """Return the report on the files that only this split reads: the training file for "train" if both splits read
        one file."""
        ...


def report_reading(settings: DataSource | Preferences, *splits: str) -> ReadingReport:
    """Return the report on how a data source or preferences reads the files of some splits. Empty if it reads no
    files."""
    report = ReadingReport()
    if not settings.reading_reporter:
        return report
    reporter = cast(ReadingReporter, find_target(settings.reading_reporter, where=settings.label))
    for split in splits:
        report += reporter(settings, split)
    return report
