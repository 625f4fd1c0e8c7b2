"""Records that are sent to trackers, and the interface that all trackers implement."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import JsonValue

from rheostat.infra.trackers.config import Tracker

Series = Literal["iteration", "evaluation"]
"""Kind of a recorded step: an iteration or an evaluation. Each kind is a separate series of numbered steps."""
Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Subject:
    """Description of a run for trackers: its name, identifier and configuration."""

    name: str
    """Name of the run, which is shown to users."""
    identity: str
    """Unique identifier of the run (letters, digits and dashes). Another run with the same name has another
    identifier."""
    config: Mapping[str, JsonValue]
    """Configuration of the run."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Table of texts for display in a tracker, such as completions with their prompts."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def markdown(self) -> str:
        """Return the table as Markdown, one line per row. Characters in the texts that have a meaning in Markdown are
        escaped."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(map(_quoted, line))} |" for line in lines)


def _quoted(cell: Cell) -> str:
    """Escape the text of a Markdown table cell, so that it cannot begin an HTML tag, a link, code or another cell."""
    text = "" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)
    for mark, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "[": "&#91;", "`": "&#96;"}.items():
        text = text.replace(mark, entity)
    return text.replace("\r", " ").replace("\n", "<br>")


@dataclass(frozen=True, slots=True)
class Point:
    """Metrics of one iteration or evaluation, in the form in which they are sent to trackers."""

    series: Series
    step: int
    scalars: Mapping[str, float]
    """Metrics of the iteration or evaluation, by name. Iterations and evaluations have different metric names."""
    samples: Callable[[], TextTable | None] | None = None
    """Function that reads the table of samples (prompts and completions) of this step. It returns None if the samples
    were deleted. The field is None if the step has no samples."""


@dataclass(frozen=True, slots=True)
class Product:
    """Final policy of a finished run, for trackers that register models."""

    step: int
    digest: str
    place: str
    """Path or address of the directory that contains the policy's files."""


class Mirror(Protocol):
    """Connection of one run to one tracker, to which its metrics are copied. Each tracker implements this interface. If
    a method raises an error, the connection is opened again."""

    def lacks(self, point: Point) -> bool:
        """Return whether the tracker lacks some data of an iteration or evaluation. When the connection was opened,
        this is called for all iterations and evaluations in order."""
        ...

    def write(self, point: Point, table: TextTable | None) -> None:
        """Send the metrics of an iteration or evaluation that the tracker lacks. `table` contains its samples, if there
        are any."""
        ...

    def close(self, product: Product | None) -> None:
        """Wait until all data has arrived at the tracker, and close the connection. `product` is the final policy, or
        None if the run is not finished."""
        ...


OpenMirror = Callable[[Subject, Tracker], Mirror]
"""Function that connects a run to a tracker. The field `implementation` of a tracker names a function of this type."""

Follow = Callable[[], Iterator[Point]]
"""Function that yields the iterations and evaluations that are new since its previous call."""


def flatten_config(config: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value as text) for each value of a nested configuration. `prefix` is put before each key."""
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
