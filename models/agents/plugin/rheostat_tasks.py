"""Functions common to the modules that load tasks of other packages. This module imports no module of Rheostat."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def describe(error: Exception) -> str:
    """Format an error as one line: its class and message, or only the message of a ValueError."""
    name = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())


def check_choice(what: str, name: str | None, names: Sequence[str]) -> None:
    """Raise ValueError if a task does not have the metric, filter or scorer that the setting `what` names."""
    if name is not None and name not in names:
        raise ValueError(f"the task has no {what} {name!r}. Use one of {', '.join(names) or 'none'}")


def print_tasks(
    list_tasks: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]],
    describe: Callable[[Exception], str] = describe,
) -> None:
    """Print tasks as JSON lines. The first argument of the program is the JSON object that is passed to `list_tasks`.
    After an error, exit with its description as the last line of stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)  # packages may print
        try:
            for task in list_tasks(json.loads(sys.argv[1])):
                output.write(json.dumps(task) + "\n")
        except Exception as error:
            sys.exit(describe(error))
