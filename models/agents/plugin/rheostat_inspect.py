"""Samples and episodes of tasks of Inspect. This module runs in the Python environment of Inspect, and imports no
module of Rheostat.

An object of `Episodes` is created once in each process from which agents are started. Each episode evaluates one sample
in a process that is forked from it. As a program, this module prints the samples of a task as JSON lines.
"""

from __future__ import annotations

import glob
import importlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import inspect_ai
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import get_model
from inspect_ai.scorer import Score
from rheostat_tasks import describe, print_tasks

VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Numbers for the values that scorers of Inspect return instead of numbers."""


class Episodes:
    """Task of Inspect, which is loaded once. Each call evaluates one sample."""

    def __init__(self, task: str, options: Mapping[str, Any], scorer: str | None) -> None:
        """Load the task. Raises ValueError if this fails."""
        self.scorer = scorer
        try:
            self.task = load_task(task, options)
        except Exception as error:
            raise ValueError(f"environment.task {task!r}: {describe(error)}") from error

    def __call__(self, problem: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
        """Evaluate the sample in the column `task`, and return its score as the reward. Raises RuntimeError if the
        evaluation fails."""
        model = get_model("openai-api/rheostat/policy", base_url=base_url, api_key=api_key)
        number = problem["task"]["number"]
        [sample] = itertools.islice(self.task.dataset, number, number + 1)
        if str(sample.input)[:1000] != problem["task"]["input"]:
            raise RuntimeError("the sample has changed since the problems of the run were read")
        [log] = inspect_ai.eval(
            self.task,
            model=model,
            sample_id=glob.escape(str(_find_id(sample, number))),
            epochs=1,
            display="none",
            log_dir="logs",
            log_format="json",
            ctl_server=False,
        )
        return {"reward": self._read_score(log)}

    def _read_score(self, log: EvalLog) -> float:
        """Return the score of the only sample of a log."""
        if log.status != "success":
            raise RuntimeError(log.error.message if log.error else f"the evaluation has the status {log.status}")
        scores = (log.samples or [])[0].scores or {}
        name = self.scorer or next(iter(scores), "")
        if name not in scores:
            raise RuntimeError(f"the task has no scorer {name!r}. It has {', '.join(scores) or 'none'}")
        return read_value(scores[name], name)


def read_value(score: Score, name: str) -> float:
    """Return the value of a score as a number. Raises RuntimeError if it is none."""
    value = score.value
    if isinstance(value, str) and value in VALUES:
        return VALUES[value]
    if isinstance(value, int | float):
        return float(value)
    raise RuntimeError(
        f"the value of the scorer {name!r} must be a number or one of C, P, I and N, found {value!r:.60}"
    )


def load_task(target: str, options: Mapping[str, Any]) -> Task:
    """Call the function `pkg.mod:function` of a task. Raises ValueError if it returns no task."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise ValueError(f"the module {module!r} has no function {name!r}")
    task = function(**options)
    if not isinstance(task, Task):
        raise ValueError(f"the function must return a task of Inspect, but it returned {type(task).__name__}")
    return task


def list_samples(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the text and the number of each sample of a task."""
    task = load_task(order["task"], order["options"])
    for number, sample in enumerate(itertools.islice(task.dataset, order["limit"])):
        is_text = isinstance(sample.input, str)
        text = sample.input if is_text else "\n".join(message.text for message in sample.input)
        yield {"prompt": text or f"sample {number}", "task": {"number": number, "input": str(sample.input)[:1000]}}


def _find_id(sample: Sample, number: int) -> int | str:
    """Return the ID of a sample. Inspect numbers samples without an ID from 1."""
    return number + 1 if sample.id is None else sample.id


if __name__ == "__main__":
    print_tasks(list_samples)
