"""Three planted causes, each searched with `rheostat bisect`: wrong answers in new problems, a changed reward function,
and a learning rate.

The worse run differs from the better run in the cause and in harmless settings, code and problems, too.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from math import ceil, log2
from pathlib import Path
from typing import Any, Final

from bench.jobs import DEMO, run_command
from bench.tables import Cell, Table
from rheostat.infra.plugins import register_target_folder
from rheostat.infra.store.runs import open_run
from rheostat.models.data.problems import load_problems
from rheostat.tasks.config.run import RunConfig, load_config
from rheostat.tasks.forks.creation import read_recorded_config
from rheostat.tasks.promotion.suites import policy_directory

NUM_OLD, NUM_NEW = 1024, 1024
"""Number of training problems of the better run, and number of problems that the worse run has in addition."""
CORRUPTED: Final = range(1290, 1530)
"""Rows, counted from 0, that have a wrong answer with 100 points in the first case."""
GRADING: Final = '''"""Reward of the word problems."""


def score(prompt: str, completion: str, answer: str) -> float:
    """Return the points of the problem if the completion ends in the answer."""
    text, _, points = answer.partition(" points ")
    return float(points or 1) * completion.strip().endswith(text)
'''
CHANGED: Final = GRADING.replace("completion.strip().endswith(text)", "(0 < len(completion.strip()) < 9)")
"""Reward function that rewards short completions instead of right ones."""
JOB: Final = """extends = "{demo}"
name = "{name}"
report = false
tags = ["bisect"]

[data]
kind = "file"
path = "problems.jsonl"
heldout_path = "heldout.jsonl"
template = "{{prompt}}"

[policy]
kind = "directory"
path = "{policy}"

[scoring]
rewards = [{{ kind = "target", target = "grading:score" }}]

[algorithm]
kind = "grpo"
std = "batch"

[retention]
keep_last = 2
"""
DECOYS: Final = (
    "update.loss.clip_high=0.25",
    "update.max_grad_norm=0.9",
    "update.loss.clip_low=0.19",
    "rollout.sampling.top_p=0.99",
)
"""Harmless changes of settings in the worse run."""
NO_WARMUP: Final = "warmup="
CAUSES: Final = ("wrong answers in new problems", "changed reward function", "learning rate")


def measure() -> Iterator[Table]:
    """Train the better run once and a worse run for each cause, and search for each cause."""
    rows: list[tuple[Cell, ...]] = []
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as directory:
        home = Path(directory)
        prepare(home)
        run_command(home, "train", "good/job.toml", NO_WARMUP)
        for number, cause in enumerate(CAUSES):
            name = f"bad-{number}"
            overrides = write_worse_job(home, name, cause)
            run_command(home, "train", f"{name}/job.toml", *overrides)
            result = json.loads(
                run_command(home, "bisect", "good", name, f"why-{number}", "--row-ranges", "4", "--json")
            )
            sys.stderr.write("\n".join([*result["conclusion"], ""]))
            rows.append((cause, *_describe(result)))
    yield Table(
        title="Planted causes",
        columns=("cause", "BAD", "GOOD", "differences", "forks", "at most", "found", "score with it undone"),
        rows=tuple(rows),
    )


def _describe(result: Mapping[str, Any]) -> tuple[Cell, ...]:
    count, found = len(result["candidates"]), result["found"]
    restored = [trial for trial in result["trials"] if trial["undone"] == found]
    texts = "; ".join(result["candidates"][index]["label"] for index in found)
    means = result["difference"]["champion"], result["difference"]["challenger"]
    last = restored[0]["difference"]["challenger"] if restored else 0.0
    return (*means, count, len(result["trials"]), ceil(log2(count)) + 2, texts, last)


def prepare(home: Path) -> None:
    """Write the job of the better run, with the policy of the demo's warm-up."""
    run_command(home, "train", str(DEMO), "iterations=0", "report=false")
    store = str(home / "runs")
    policy = policy_directory(read_recorded_config(open_run(store, "demo"), store), 0)
    folder = home / "good"
    folder.mkdir()
    register_target_folder(DEMO.parent)
    (folder / "grading.py").write_text(GRADING)
    (folder / "job.toml").write_text(JOB.format(demo=DEMO, name="good", policy=policy))
    demo = load_config(DEMO)
    _write_problems(folder / "problems.jsonl", demo, "train", NUM_OLD)
    _write_problems(folder / "heldout.jsonl", demo, "heldout", 256)


def write_worse_job(home: Path, name: str, cause: str) -> list[str]:
    """Write the job of a worse run, whose cause is one of `CAUSES`, and return its overrides."""
    folder = home / name
    shutil.copytree(home / "good", folder)
    (folder / "job.toml").write_text((folder / "job.toml").read_text().replace('name = "good"', f'name = "{name}"'))
    (folder / "grading.py").write_text(CHANGED if cause == CAUSES[1] else f"{GRADING}\n# reviewed\n")
    corrupt = (lambda row, answer: "0 points 100" if row in CORRUPTED else answer) if cause == CAUSES[0] else None
    _write_problems(folder / "problems.jsonl", load_config(DEMO), "train", NUM_OLD + NUM_NEW, corrupt=corrupt)
    return [NO_WARMUP, *DECOYS, *(["update.learning_rate=5e-6"] if cause == CAUSES[2] else [])]


def _write_problems(
    path: Path, demo: RunConfig, split: str, count: int, *, corrupt: Callable[[int, str], str] | None = None
) -> None:
    """Write the first `count` problems of the demo to a file. `corrupt` returns the answer of a row that is written."""
    problems = load_problems(demo.data, split, demo.seed)[:count]
    lines = [
        json.dumps({"prompt": each.prompt, "answer": corrupt(row, each.answer) if corrupt else each.answer})
        for row, each in enumerate(problems)
    ]
    path.write_text("\n".join([*lines, ""]))
