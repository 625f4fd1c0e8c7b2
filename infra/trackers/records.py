"""Records that are sent to trackers, and the interface that every tracker implements."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import JsonValue

from infra.trackers.config import Tracker

Series = Literal["iteration", "evaluation"]
"""Kind of step: an iteration or an evaluation."""
Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Subject:
    """Run that is mirrored."""

    name: str
    """Name of the run for people."""
    identity: str
    """Unique identifier of letters, digits and dashes. It distinguishes runs with the same name."""
    config: Mapping[str, JsonValue]
    """Configuration of the run."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Table of texts for people."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def markdown(self) -> str:
        """Encode the table as Markdown, one line per row. Texts are shown literally."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(map(_quoted, line))} |" for line in lines)


def _quoted(cell: Cell) -> str:
    """Encode a cell so that its text cannot start a tag, link, code or cell."""
    text = "" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)
    for mark, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "[": "&#91;", "`": "&#96;"}.items():
        text = text.replace(mark, entity)
    return text.replace("\r", " ").replace("\n", "<br>")


@dataclass(frozen=True, slots=True)
class Point:
    """Data of one step."""

    series: Series
    step: int
    scalars: Mapping[str, float]
    """Values by name. A name belongs to only one series."""
    samples: Callable[[], TextTable | None] | None = None
    """Function that reads the table of samples of this step, or returns None if the table was deleted. None without
    samples."""


@dataclass(frozen=True, slots=True)
class Product:
    """Final model of a run."""

    step: int
    digest: str
    place: str
    """Path or address of the model's files."""


class Mirror(Protocol):
    """Tracker that is open for one subject. Any method may raise an error, after which the tracker is opened again."""

    def lacks(self, point: Point) -> bool:
        """Return whether the tracker lacks some data of a point. After each opening, all points come in order from the
        first."""
        ...

    def write(self, point: Point, table: TextTable | None) -> None:
        """Add the missing data of a point."""
        ...

    def close(self, product: Product | None) -> None:
        """Wait until all data has arrived. `product` is the final model, or None if the run is not finished."""
        ...


OpenMirror = Callable[[Subject, Tracker], Mirror]
"""Type of the function that a tracker's `implementation` names."""

Follow = Callable[[], Iterator[Point]]
"""Function that yields the points since its last call."""


def flatten_config(config: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a configuration as texts, with their dotted keys."""
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
