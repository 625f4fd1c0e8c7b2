"""Points of a sweep: configurations that differ in some keys, each for a run named after the sweep and its values."""

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from blake3 import blake3

from rheostat.infra.errors import BadInput
from rheostat.infra.user_files import read_text_file
from rheostat.tasks.config.documents import toml_value

LONGEST: Final = 64
"""Maximum number of characters in the name of a run."""
OWN: Final = ("name", "store")
"""Keys that a point must not set, because the sweep names the runs and all runs share one store."""
_QUOTES: Final = "\"'"
MAX_POINTS: Final = 4096
"""Maximum number of points of a sweep. A larger number is most likely a mistake, because every point is a whole run."""
DIGITS: Final = 8
"""Number of digits of the digest that ends a run name, if the values of the point do not fit in the name or contain
characters that are not allowed."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One combination of settings in a sweep, for which one run is trained."""

    name: str
    """Name of the run."""
    values: dict[str, str]
    """Values of the varied settings, by dotted key, as written in an override."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides for `rheostat train`."""
        return tuple(f"{key}={value}" for key, value in self.values.items())


def sweep_points(sweep: str, grids: Sequence[str], listed: Sequence[Mapping[str, str]]) -> tuple[SweepPoint, ...]:
    """Combine the values in `grids` (each `KEY=V1,V2`) with the points in `listed`, and return one point for each
    combination. The values of the last key change fastest.

    Raises BadInput if no key varies, a key has values twice, two points are the same, or there are more than
    `MAX_POINTS` points.
    """
    axes = [_parse_axis(grid) for grid in grids]
    keys = [key for key, _ in axes]
    for key in keys:
        if keys.count(key) > 1 or any(key in point for point in listed):
            raise BadInput(f"sweep: the key {key!r} is listed twice. List all of its values once, separated by commas.")
    num_points = math.prod([len(listed) or 1, *(len(values) for _, values in axes)])
    if num_points > MAX_POINTS:
        raise BadInput(
            f"sweep: the product of these values has {num_points:,} runs, but at most {MAX_POINTS:,} are allowed. Use "
            "fewer values."
        )
    combinations = [
        {**point, **dict(zip(keys, values, strict=True))}
        for point in (listed or [{}])
        for values in product(*(values for _, values in axes))
    ]
    varied = varied_keys(combinations)
    if not varied:
        raise BadInput(
            "sweep needs more than one run. Set a key with several values, such as seed=0,1, or list different points "
            "in --list FILE."
        )
    points = tuple(SweepPoint(_build_name(sweep, point, varied), point) for point in combinations)
    counts = Counter(point.name for point in points)
    for point in points:
        if counts[point.name] > 1:
            raise BadInput(
                f"sweep: all runs must have different settings, but {', '.join(point.overrides)} is listed twice. "
                "Remove one."
            )
    return points


def varied_keys(points: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys that a sweep varies, in order. Keys with the same value in all points are left out, as run
    names do not need them."""
    keys = dict.fromkeys(key for point in points for key in point)
    return [key for key in keys if len({point.get(key) for point in points}) > 1]


def _parse_axis(grid: str) -> tuple[str, tuple[str, ...]]:
    key, equals, values_text = grid.partition("=")
    values = tuple(_split_values(values_text))
    if not equals or not all((*key.split("."), *values)):
        raise BadInput(
            f"sweep: {grid!r} must have the form dotted.key=value,value, such as update.learning_rate=1e-6,3e-6."
        )
    _check_key(key, where=f"sweep {grid!r}")
    return key, values


def _check_key(key: str, *, where: str) -> None:
    if key.partition(".")[0] in OWN:
        raise BadInput(
            f"{where}: {key} cannot be set, because the sweep names its runs and keeps all of them in one store. "
            "Remove it."
        )


def _split_values(text: str) -> Iterator[str]:
    """Split text at commas that are outside of quotes, lists and tables.

    >>> [*_split_values('1,{a = [2, 3]},"4,5"')]
    ['1', '{a = [2, 3]}', '"4,5"']
    """
    depth, quote, start = 0, "", 0
    for place, mark in enumerate(text):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in _QUOTES:
            quote = mark
        elif mark in "[{":
            depth += 1
        elif mark in "]}":
            depth -= 1
        elif mark == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _build_name(sweep: str, point: Mapping[str, str], varied: Sequence[str]) -> str:
    """Return the run name for a point, built from the varied values. If they do not fit in a name, it ends with a
    digest."""
    last = [key.rpartition(".")[2] for key in varied]
    labels = {key: key if last.count(short) > 1 else short for key, short in zip(varied, last, strict=True)}
    values_text = (
        ".".join(f"{label}-{point[key].strip(_QUOTES)}" for key, label in labels.items() if key in point) or "as-it-is"
    )
    safe_text = re.sub(r"[^a-z0-9]*\.[^a-z0-9]*", ".", re.sub(r"[^a-z0-9._-]+", "-", values_text.lower())).strip("-._")
    name = f"{sweep}.{safe_text}"
    if safe_text == values_text and len(name) <= LONGEST:
        return name
    digest = blake3(json.dumps(point, sort_keys=True).encode()).hexdigest()[:DIGITS]
    return f"{name[: LONGEST - DIGITS - 1].rstrip('-._')}-{digest}"


def read_points(path: Path) -> list[dict[str, str]]:
    """Read a list of points: JSON Lines with one object per point, or TOML with one `[[points]]` table per point.

    Keys are dotted or nested tables. Raises BadInput with the line or table that is wrong.
    """
    try:
        text = read_text_file(path, label=f"--list {path}")
        documents = tomllib.loads(text) if path.suffix == ".toml" else None
    except FileNotFoundError:
        raise BadInput(
            f"--list {path}: there is no such file. Name an existing file with one point per line, or with [[points]] "
            "in TOML."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"--list {path} is not valid TOML: {error}") from None
    if documents is None:
        located_points = [
            (f"{path}:{n}", _parse_json(f"{path}:{n}", line))
            for n, line in enumerate(text.splitlines(), 1)
            if line.strip()
        ]
    else:
        points = documents.pop("points", [])
        if documents or not isinstance(points, list):
            raise BadInput(
                f"--list {path} must contain only [[points]], found {', '.join(documents) or 'points of another type'}"
            )
        located_points = [(f"{path}: points[{n}]", point) for n, point in enumerate(points)]
    if not located_points:
        raise BadInput(f"--list {path} contains no points. Write one JSON object per line, or [[points]] in TOML.")
    return [_parse_point(place, point) for place, point in located_points]


def _parse_json(place: str, line: str) -> object:
    try:
        return json.loads(line)
    except ValueError as error:
        raise BadInput(
            f"{place} is not valid JSON: {error}. Each line must be one JSON object of keys and values."
        ) from error


def _parse_point(place: str, point: object) -> dict[str, str]:
    if not isinstance(point, dict) or not point:
        raise BadInput(
            f"{place}: each point must be a table of configuration keys and their values, found {point!r:.60}"
        )
    values = dict(_flatten(point))
    for key in values:
        _check_key(key, where=place)
    return values


def _flatten(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "" if value is None else toml_value(value)
