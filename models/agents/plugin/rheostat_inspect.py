"""Samples and episodes of tasks of Inspect. This module runs in the Python environment of Inspect, and imports no
module of Rheostat.

An object of `Episodes` is created once in each process from which agents are started. Each episode evaluates one sample
in a process that is forked from it. As a program, this module prints the samples of a task as JSON lines.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import inspect_ai
from inspect_ai import Task
from inspect_ai._eval.loader import create_file_tasks, load_file_tasks
from inspect_ai._eval.registry import task_create
from inspect_ai._util.registry import registry_lookup
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import Model, get_model
from inspect_ai.scorer import Score
from inspect_ai.scorer._scorer import unique_scorer_name
from rheostat_tasks import check_choice, describe, print_tasks

VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Numbers for the values that scorers of Inspect return instead of numbers."""


class Episodes:
    """Task of Inspect, which is loaded once. Each call evaluates one sample."""

    def __init__(self, task: str, file: str | None, options: Mapping[str, Any], scorer: str | None) -> None:
        """Load the task. Raises ValueError if this fails."""
        self.scorer = scorer
        try:
            self.task = load_task(task, file, options)
            names: list[str] = []
            for each in self.task.scorer or []:
                names.append(unique_scorer_name(each, names))
            check_choice("scorer", scorer, names)
        except Exception as error:
            raise ValueError(f"environment.task {task!r}: {describe(error)}") from error
        # An empty evaluation imports modules for 4 seconds, which the forked processes then share.
        unused = get_model("openai-api/rheostat/policy", base_url="http://127.0.0.1", api_key="-", memoize=False)
        with tempfile.TemporaryDirectory() as folder:
            _evaluate(Task(dataset=[Sample(input="-")], solver=[]), unused, 0, folder)

    def __call__(self, problem: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
        """Evaluate the sample in the column `task`, and return its score as the reward. Raises RuntimeError if the
        evaluation fails."""
        model = get_model("openai-api/rheostat/policy", base_url=base_url, api_key=api_key)
        number = problem["task"]["number"]
        if _digest(self.task.dataset[number]) != problem["task"]["digest"]:
            raise RuntimeError(
                "the sample has changed since the problems of the run were read. Restore the data of the task"
            )
        log = _evaluate(self.task, model, number, "logs")
        return {"reward": self._read_score(log)}

    def _read_score(self, log: EvalLog) -> float:
        """Return the score of the only sample of a log."""
        if log.status != "success":
            raise RuntimeError(log.error.message if log.error else f"the evaluation has the status {log.status}")
        scores = (log.samples or [])[0].scores or {}
        name = self.scorer or next(iter(scores), "")
        if name not in scores:
            raise RuntimeError(f"the task returned no score of the scorer {name!r}")
        return read_value(scores[name], name)


def read_value(score: Score, name: str) -> float:
    """Return the value of a score as a number. Raises RuntimeError if the value is not a number."""
    value = score.value
    if isinstance(value, str) and value in VALUES:
        return VALUES[value]
    if isinstance(value, int | float):
        return float(value)
    raise RuntimeError(
        f"the value of the scorer {name!r} must be a number or one of C, P, I and N, found {value!r:.60}"
    )


def load_task(name: str, file: str | None, options: Mapping[str, Any]) -> Task:
    """Load a task as the command `inspect eval` does. Relative paths in its file start in the folder of the file.
    Raises ValueError if there is no task with this name, and TypeError if it has no such options."""
    if file is not None:
        load_file_tasks(Path(file))
    function = registry_lookup("task", name)
    if function is None:
        where = "an installed package. Set `file` for a task of your own" if file is None else Path(file).name
        raise ValueError(f"there is no task with this name in {where}")
    assert callable(function), "a task is registered as a function"
    inspect.signature(function).bind(**options)
    if file is None:
        return task_create(name, **options)
    [task] = create_file_tasks(Path(file), [name], {**options})
    return task


def list_samples(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the text, the number and the digest of each sample of a task. `order` has the keys `task`, `file`,
    `options` and `limit`."""
    task = load_task(order["task"], order["file"], order["options"])
    for number, sample in enumerate(itertools.islice(task.dataset, order["limit"])):
        text = _read_text(sample) or f"sample {number}"
        yield {"prompt": text, "task": {"number": number, "digest": _digest(sample)}}


def _evaluate(task: Task, model: Model, number: int, folder: str) -> EvalLog:
    """Evaluate the sample with a number. The log is also written to a folder."""
    [log] = inspect_ai.eval(
        task,
        model=model,
        limit=(number, number + 1),
        epochs=1,
        display="none",
        log_dir=folder,
        log_format="json",
        ctl_server=False,
    )
    return log


def _read_text(sample: Sample) -> str:
    """Return the input of a sample as one text. Messages have random IDs, which it does not contain."""
    return sample.input if isinstance(sample.input, str) else "\n".join(message.text for message in sample.input)


def _digest(sample: Sample) -> str:
    """Return a digest of the input and of the expected answer of a sample."""
    return hashlib.sha256(json.dumps([_read_text(sample), sample.target]).encode()).hexdigest()[:16]


if __name__ == "__main__":
    print_tasks(list_samples)
