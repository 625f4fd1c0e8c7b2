"""Problems from tasks that another package defines. The package loads them in its own Python environment."""

import json
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.processes.child import user_folders
from rheostat.models.config.data import PackageData
from rheostat.models.config.tasksets import PLUGIN
from rheostat.models.data.problems import Message, Problem, Prompt, encode_columns, is_heldout

LIST_SECONDS: Final = 1800.0
"""Maximum seconds for loading a taskset, which may download its data."""


def list_problems(data: PackageData, split: str, seed: int) -> list[Problem]:
    """Return the tasks of a split ("train" or "heldout") in their order. An episode finds its task by the column
    `task`. Raises BadInput if the tasks cannot be loaded, or if the split is empty."""
    order = json.dumps({**data.tasks, "limit": data.limit})
    lines = _run_plugin(data.find_python(), order, data.package, data.title, user_folders())
    problems = [_build_problem(json.loads(line), f"{data.title} {number}") for number, line in enumerate(lines)]
    if data.is_evaluation_only and split == "train":
        return problems[:1]
    in_heldout = split == "heldout"
    chosen = [each for each in problems if is_heldout(_split_key(each), data.heldout_share) == in_heldout]
    if not chosen:
        raise BadInput(
            f"data.{data.title} has {format_count(len(lines), 'task')}, of which a share of {data.heldout_share:g} is "
            f"held out. This leaves no {split} problem. Change data.heldout_fraction, data.limit or the task."
        )
    return chosen


def _build_problem(task: dict[str, Any], source: str) -> Problem:
    """Return the problem for a line of the plugin. Without the key `system`, the prompt is a plain text."""
    prompt: Prompt = task["prompt"]
    if "system" in task:
        system = (Message("system", task["system"]),) if task["system"] else ()
        prompt = (*system, Message("user", task["prompt"]))
    return Problem(source=source, prompt=prompt, answer="", columns={"task": task["task"]})


def _split_key(problem: Problem) -> str:
    """Return the task without its number, so that equal tasks are in the same split."""
    task = problem.columns["task"]
    assert isinstance(task, dict), "the plugin returns the fields of a task"
    return encode_columns({name: value for name, value in task.items() if name != "idx"})


@cache
def _run_plugin(python: Path, order: str, package: str, title: str, folders: Sequence[str]) -> tuple[str, ...]:
    """Return the lines with tasks that the plugin of a package prints. `folders` are searched for modules first."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((*folders, str(PLUGIN)))}
    command = [str(python), "-P", str(PLUGIN / f"rheostat_{package}.py"), order]
    try:
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIST_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise BadInput(f"data.{title}: loading took over {LIST_SECONDS:g} s. Set data.limit.") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise BadInput(f"data.{title}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return tuple(done.stdout.splitlines())
