"""Records that are sent to trackers, and the interface that all trackers implement."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import JsonValue

from infra.trackers.config import Tracker

Series = Literal["iteration", "evaluation"]
"""Kind of step at which data is recorded: an iteration or an evaluation."""
Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Subject:
    """Run of Rheostat as trackers show it: name, identifier and configuration."""

    name: str
    """Name of the run, which is shown to users."""
    identity: str
    """Unique identifier of the run, consisting of letters, digits and dashes. Runs with the same name have different
    identifiers."""
    config: Mapping[str, JsonValue]
    """Configuration of the run."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Table of texts that a tracker shows to users."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def markdown(self) -> str:
        """Return the table as Markdown, one line per row. Markup inside the texts is escaped."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(map(_quoted, line))} |" for line in lines)


def _quoted(cell: Cell) -> str:
    """Escape the text of a table cell, so that it cannot start a tag, a link, code or another cell."""
    text = "" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)
    for mark, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "[": "&#91;", "`": "&#96;"}.items():
        text = text.replace(mark, entity)
    return text.replace("\r", " ").replace("\n", "<br>")


@dataclass(frozen=True, slots=True)
class Point:
    """Metrics of one iteration or evaluation of a run, as sent to trackers."""

    series: Series
    step: int
    scalars: Mapping[str, float]
    """Metrics of the step by name. The same name is not used in both series."""
    samples: Callable[[], TextTable | None] | None = None
    """Function that reads the table of samples of this step, or returns None if the samples were deleted. None if the
    step has no samples."""


@dataclass(frozen=True, slots=True)
class Product:
    """Final policy of a finished run, which trackers can register."""

    step: int
    digest: str
    place: str
    """Path or address of the files of the model."""


class Mirror(Protocol):
    """Connection of one run to one tracker. Implemented by each tracker, and used by the process that copies metrics to
    it. If a method raises an error, the connection is opened again."""

    def lacks(self, point: Point) -> bool:
        """Return whether the tracker lacks some data of an iteration or evaluation. After the connection was opened,
        this is called for all points in order, starting with the first."""
        ...

    def write(self, point: Point, table: TextTable | None) -> None:
        """Send the data of an iteration or evaluation that the tracker lacks."""
        ...

    def close(self, product: Product | None) -> None:
        """Wait until all data has arrived, and close the connection. `product` is the final policy, or None if the run
        is not finished."""
        ...


OpenMirror = Callable[[Subject, Tracker], Mirror]
"""Function that connects a run to a tracker. The field `implementation` of a tracker names a function of this type."""

Follow = Callable[[], Iterator[Point]]
"""Function that yields the iterations and evaluations that are new since it was last called."""


def flatten_config(config: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as text) for each value of a configuration."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_config(value, f"{prefix}{key}.")
        elif (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and any(isinstance(each, Mapping) for each in value)
        ):
            yield from flatten_config({str(place): each for place, each in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
