"""Items and episodes of tasks of lm-eval. This module runs in the Python environment of lm-eval, and imports no module
of Rheostat.

An object of `Episodes` is created once in each process from which agents are started. Each episode evaluates one item
in a process that is forked from it. As a program, this module prints the items of a task as JSON lines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_eval import tasks
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.manager import TaskDict
from lm_eval.utils import handle_non_serializable, hash_string
from rheostat_tasks import check_choice, describe, print_tasks

BATCH = 16
"""Maximum number of prompts in one request, such as the choices of a question."""
SECONDS = 7 * 24 * 3600
"""Time limit of a request. Rheostat limits the time of an episode."""


class Episodes:
    """Task of lm-eval or group of tasks, which is loaded once. Each call evaluates one item."""

    def __init__(
        self,
        task: str,
        file: str | None,
        options: Mapping[str, Any],
        metric: str | None,
        filter: str | None,  # noqa: A002 -- the name of the setting
        apply_chat_template: bool,
    ) -> None:
        """Load the task. Raises ValueError if this fails."""
        self.metric, self.filter, self.apply_chat_template = metric, filter, apply_chat_template
        try:
            self.tasks = load_tasks(task, file, options)
            for member in self.tasks.values():
                check_choice("metric", metric, [*member.aggregation()])
                check_choice(
                    "filter", filter, [each["name"] for each in member.config.filter_list or [{"name": "none"}]]
                )
        except Exception as error:
            raise ValueError(f"environment.task {task!r}: {describe(error)}") from error

    def __call__(self, problem: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
        """Evaluate the item in the column `task`, and return its score as the reward. Raises RuntimeError if the policy
        refuses a request or the item has changed."""
        item = problem["task"]
        name = item.get("member", next(iter(self.tasks)))
        # Prompts are not shortened, because the policy refuses those that are too long.
        model = LocalCompletionsAPI(
            model="policy",
            base_url=f"{base_url}/completions",
            tokenizer=problem["tokenizer"],
            tokenizer_backend="huggingface",
            header={"Authorization": f"Bearer {api_key}"},
            batch_size=BATCH,
            max_retries=1,
            max_length=1 << 30,
            timeout=SECONDS,
        )
        with _keep_warnings() as warnings:
            try:
                results = evaluate(
                    model,
                    {name: self.tasks[name]},
                    samples={name: [item["number"]]},
                    bootstrap_iters=0,
                    apply_chat_template=self.apply_chat_template,
                )
            except Exception as error:
                raise RuntimeError("; ".join((describe(error), *warnings[-1:]))) from error
        return {"reward": self._read_score(results["samples"][name], item["digest"])}

    def _read_score(self, samples: list[dict[str, Any]], digest: str) -> float:
        """Return the score of the only item. `samples` contains one object for each filter."""
        [sample] = [each for each in samples if each["filter"] == (self.filter or samples[0]["filter"])]
        if sample["doc_hash"] != digest:
            raise RuntimeError(
                "the item has changed since the problems of the run were read. Restore the data of the task"
            )
        metric = self.metric or sample["metrics"][0]
        try:
            return float(sample[metric])
        except (KeyError, TypeError, ValueError):
            raise RuntimeError(f"the metric {metric!r} is not a number for each item. Choose another metric") from None


def load_tasks(name: str, file: str | None, options: Mapping[str, Any]) -> dict[str, Task]:
    """Load a task, or the tasks of a group or tag in their order, with their data. Relative paths in their files start
    in the folder of `file`. Raises ValueError if there is none with this name, or if a group has options."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    path = _find_file(name) if file is None else file
    fields = {} if path is None else load_yaml(path)
    if file is not None:
        os.chdir(Path(file).parent)
    if fields.get("task") == name:
        loaded = TaskManager(include_defaults=False).load([{**fields, **options}])
    else:
        loaded = _load_group(name, file, options)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=1234)  # the default of lm-eval
    return dict(loaded["tasks"])


def _load_group(name: str, file: str | None, options: Mapping[str, Any]) -> TaskDict:
    """Load the tasks of a group or tag, which are defined in the YAML files in the folder of `file`. Without `file`,
    all 14,000 YAML files of lm-eval are read, which takes 17 seconds."""
    folder = None if file is None else Path(file).parent
    manager = TaskManager(include_path=folder, include_defaults=file is None)
    if name not in manager.all_tasks:
        where = "" if file is None else f" in {Path(file).name}"
        raise ValueError(f"there is no task or group with this name{where}")
    if options:
        raise ValueError("options can be set only for a single task, but this is a group")
    return manager.load(name)


def _find_file(name: str) -> Path | None:
    """Return the YAML file of a task that is installed with lm-eval, or None if there is none. This takes one
    second."""
    key = re.compile(rf"""^["']?task["']?\s*:\s*["']?{re.escape(name)}["']?\s*(#.*)?$""", re.MULTILINE)
    files = sorted(Path(tasks.__file__).parent.glob("**/*.yaml"))
    return next((path for path in files if key.search(path.read_text(encoding="utf-8"))), None)


def list_items(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the text, the number and the digest of each item, whether the item needs the log-probs of given answers,
    and the name of its task if this is a member of a group. The items of a group's tasks are interleaved. `order` has
    the keys `task`, `file`, `options` and `limit`."""
    tasks = load_tasks(order["task"], order["file"], order["options"])
    rows = itertools.zip_longest(*([(name, *each) for each in enumerate(tasks[name].eval_docs)] for name in tasks))
    items = (item for row in rows for item in row if item is not None)
    for name, number, item in itertools.islice(items, order["limit"]):
        text = json.dumps(item, indent=2, default=handle_non_serializable, ensure_ascii=False)
        prompt = str(tasks[name].doc_to_text(item)) or f"item {number}"
        needs_logprobs = tasks[name].OUTPUT_TYPE != "generate_until"
        fields = {"number": number, "digest": hash_string(text), "needs_logprobs": needs_logprobs}
        yield {"prompt": prompt, "task": fields if name == order["task"] else {**fields, "member": name}}


@contextlib.contextmanager
def _keep_warnings() -> Iterator[list[str]]:
    """Yield a list to which the warnings of lm-eval about refused requests are added."""
    warnings: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(" ".join(record.getMessage().split())[:500])

    logger, handler = logging.getLogger("lm_eval.models.api_models"), Keep(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield warnings
    finally:
        logger.removeHandler(handler)


if __name__ == "__main__":
    print_tasks(list_items)
