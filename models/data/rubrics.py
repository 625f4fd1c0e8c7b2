"""Rubrics in the rows of data files: criteria with weights, by which a judge rates the completions of a problem."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from pydantic import JsonValue

RUBRIC: Final = "rubric"
"""Name under which a problem's rubric is stored in its columns."""
_TEXTS: Final = ("criterion", "description", "text", "title")
_WEIGHTS: Final = ("weight", "points")
MAX_CRITERIA: Final = 100
"""Maximum number of criteria in a rubric. For each criterion, one question is sent to the judge."""


class Criterion(NamedTuple):
    """One criterion of a rubric, by which a judge rates a completion."""

    text: str
    weight: float
    """Weight of the criterion in the reward. Negative if the criterion describes a mistake."""


Rubric = tuple[Criterion, ...]


def parse_rubric(value: object) -> Rubric:
    """Return the rubric that a column contains as a list of objects, or as JSON text of such a list.

    The text of a criterion is in `criterion`, `description`, `text` or `title`, its weight in `weight` or `points` (1
    if neither is present). Raises ValueError if the value is no rubric, or no weight is positive.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, Mapping) and len(value) == 1:
        [value] = value.values()
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of criteria, such as {{criterion, weight}}, found {value!r:.60}")
    if len(value) > MAX_CRITERIA:
        raise ValueError(f"a rubric may have at most {MAX_CRITERIA} criteria, found {len(value)}")
    rubric = tuple(_parse_criterion(each, number) for number, each in enumerate(value))
    if not any(criterion.weight > 0 for criterion in rubric):
        raise ValueError("at least one criterion must have a positive weight, or every completion would get 0")
    return rubric


def _parse_criterion(value: object, number: int) -> Criterion:
    if not isinstance(value, Mapping):
        raise ValueError(f"[{number}]: expected an object such as {{criterion, weight}}, found {value!r:.60}")
    text = next((value[name] for name in _TEXTS if value.get(name)), None)
    weight = next((value[name] for name in _WEIGHTS if value.get(name) is not None), 1)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"[{number}]: expected the text of the criterion in one of {', '.join(_TEXTS)}, found none")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"[{number}]: expected a number as weight, found {weight!r:.40}")
    return Criterion(text.strip(), float(weight))


def encode_rubric(rubric: Rubric) -> JsonValue:
    """Return a rubric as JSON that does not depend on the format of the data file."""
    return [{"criterion": criterion.text, "weight": criterion.weight} for criterion in rubric]
