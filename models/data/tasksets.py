"""Problems from the tasks of a taskset of the package verifiers, which is loaded in its own Python environment."""

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
from rheostat.models.config.data import VerifiersData
from rheostat.models.config.tasksets import PLUGIN
from rheostat.models.data.problems import Message, Problem, encode_columns, is_heldout

LIST_SECONDS: Final = 1800.0
"""Maximum seconds for loading a taskset, which may download its data."""


def list_problems(data: VerifiersData, split: str, seed: int) -> list[Problem]:
    """Return the tasks of a split ("train" or "heldout") in the order of the taskset. An episode rebuilds its task from
    the column `task`. Raises BadInput if the taskset cannot be loaded, or if the split is empty."""
    order = json.dumps({"taskset": data.taskset.fields, "limit": data.limit})
    lines = _run_plugin(data.find_python(), order, data.taskset.id, user_folders())
    problems = [
        _build_problem(json.loads(line), f"taskset {data.taskset.id!r} task {number}")
        for number, line in enumerate(lines)
    ]
    in_heldout = split == "heldout"
    chosen = [each for each in problems if is_heldout(_split_key(each), data.heldout_fraction) == in_heldout]
    if not chosen:
        raise BadInput(
            f"data.taskset {data.taskset.id!r} has {format_count(len(lines), 'task')}, and data.heldout_fraction is "
            f"{data.heldout_fraction}, which leaves no {split} problem. Change the fraction or data.limit."
        )
    return chosen


def _build_problem(task: dict[str, Any], source: str) -> Problem:
    system = (Message("system", task["system"]),) if task["system"] else ()
    prompt = (*system, Message("user", task["prompt"]))
    return Problem(source=source, prompt=prompt, answer="", columns={"task": task["task"]})


def _split_key(problem: Problem) -> str:
    """Return the task without its number, so that equal tasks are in the same split."""
    task = problem.columns["task"]
    assert isinstance(task, dict), "the plugin returns the fields of a task"
    return encode_columns({name: value for name, value in task.items() if name != "idx"})


@cache
def _run_plugin(python: Path, order: str, name: str, folders: Sequence[str]) -> tuple[str, ...]:
    """Return the lines with tasks that the plugin prints. `folders` are searched for the taskset first."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [str(python), "-P", str(PLUGIN / "rheostat_verifiers.py"), order]
    try:
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIST_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise BadInput(f"data.taskset {name!r}: loading took over {LIST_SECONDS:g} s. Set data.limit.") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise BadInput(f"data.taskset {name!r}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return tuple(done.stdout.splitlines())
