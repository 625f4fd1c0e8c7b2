"""What goes to a tracker, and what a tracker is to whoever feeds it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import JsonValue

from infra.trackers.config import Tracker

Series = Literal["iteration", "evaluation"]
"""What a step counts."""
Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Subject:
    """The run that is mirrored."""

    name: str
    """As people call it."""
    identity: str
    """Tells it from all others, those of the same name too: letters, digits and dashes."""
    config: Mapping[str, JsonValue]
    """What it was made from."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows for people to read."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def markdown(self) -> str:
        """Spell it as Markdown: one line a row, in which a text is shown as it was written."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(map(_quoted, line))} |" for line in lines)


def _quoted(cell: Cell) -> str:
    """What a policy wrote opens no tag, link or cell."""
    text = "" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)
    for mark, entity in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "&#124;", "[": "&#91;", "`": "&#96;"}.items():
        text = text.replace(mark, entity)
    return text.replace("\r", " ").replace("\n", "<br>")


@dataclass(frozen=True, slots=True)
class Point:
    """What there is to say of one step."""

    series: Series
    step: int
    scalars: Mapping[str, float]
    """By names that no other series has."""
    samples: Callable[[], TextTable | None] | None = None
    """Reads the table of this step, if it has one that is still there."""


@dataclass(frozen=True, slots=True)
class Product:
    """The model that a run ended with."""

    step: int
    digest: str
    place: str
    """Where its files lie."""


class Mirror(Protocol):
    """A tracker that is open for one subject. Whatever it cannot do it raises; it is then opened anew."""

    def lacks(self, point: Point) -> bool:
        """Whether some of a point is not there yet; points come in order, at each opening from the first on."""
        ...

    def write(self, point: Point, table: TextTable | None) -> None:
        """Add what is not there yet of a point."""
        ...

    def close(self, product: Product | None) -> None:
        """Have all that was written arrive; `product` is what the subject ended with, once it has."""
        ...


OpenMirror = Callable[[Subject, Tracker], Mirror]
"""What a tracker's `implementation` names."""

Follow = Callable[[], Iterator[Point]]
"""Yields the points that have come since it was called last."""


def flattened(config: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Spell a configuration as texts by dotted key."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        elif (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and any(isinstance(each, Mapping) for each in value)
        ):
            yield from flattened({str(place): each for place, each in enumerate(value)}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
