"""Current progress of a run, read from its store only. Works for the process that trains the run and for other
machines."""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import psutil

from rheostat.infra.config import read_recorded
from rheostat.infra.store.chain import linked_parts
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.progress import newest_goal, newest_note
from rheostat.infra.store.runs import LOCK, Run, open_run
from rheostat.models.config.rewards import ScoringConfig
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.keys import BASE, StageKey, evaluation_key, iteration_key, iteration_numbers
from rheostat.tasks.views.metrics import Accuracy, IterationReport, accuracy_of, evaluation_temperature, read_report
from rheostat.tasks.views.runs import detect_deletion

RECENT_ITERATIONS = 5
"""Number of recent iterations whose mean duration predicts the remaining time."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Current activity of a run, such as generating rollouts, and how much of it is done."""

    description: str
    done: int = 0
    total: int = 0
    """Total amount of work, counted in `unit`. 0 if it cannot be counted."""
    unit: str = ""
    note: str = ""
    """Further information for the user, such as tokens per second or the loss."""


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of a run at one moment."""

    run: str
    iterations: int | None
    """Target number of iterations, or None if it is unknown."""
    reports: Sequence[IterationReport]
    """Statistics of the completed iterations, in order."""
    evaluations: Sequence[Accuracy]
    activity: Activity
    eta_seconds: float | None
    """Predicted time for the remaining iterations in seconds, or None before the first iteration is complete."""
    is_finished: bool
    """Whether the run has computed everything that was requested."""


@dataclass(slots=True)
class ProgressReader:
    """Reader for showing the progress of a run again and again. Each call reads only what is new in the store."""

    store: str
    name: str
    iterations: int | None = None
    """Target number of iterations. If None, the goal recorded in the store is used."""
    _run: Run | None = None
    _first: Manifest | None = None
    _reports: list[IterationReport] = field(default_factory=list)
    _evaluations: dict[int, Accuracy] = field(default_factory=dict)
    _folders: list[str] = field(default_factory=list)
    """Folders of the run's records at the time of the last read."""

    def read_progress(self, now: datetime | None = None) -> RunProgress:
        """Read what is new in the store and return the current progress.

        Raises BadInput while the run does not exist, and Damaged once the run is deleted.
        """
        self._run = run = self._run or open_run(self.store, self.name)
        with detect_deletion(run, known=self._folders) as folders:
            self._folders = folders
            return self._read_progress(run, folders, now or datetime.now(UTC))

    def _read_progress(self, run: Run, folders: list[str], now: datetime) -> RunProgress:
        started, total = iteration_numbers(folders), self.iterations or newest_goal(run.store)
        term = read_recorded(ScoringConfig, run.record.config["scoring"]).terms[0]
        for number in started[len(self._reports) :]:
            if (sealed := run.find(StageKey.of(iteration_key(number), "seal"))) is None:
                break
            self._first = self._first or sealed
            self._reports.append(read_report(sealed, term=term, first=self._first))
        evaluated = [int(folder.removeprefix("eval-")) for folder in folders if folder.startswith("eval-")]
        for number in evaluated:
            if number not in self._evaluations and (
                summary := run.find(StageKey.of(evaluation_key(number), "summary"))
            ):
                self._evaluations[number] = accuracy_of(summary, temperature=evaluation_temperature(run, number))
        open_evaluations = [number for number in evaluated if number not in self._evaluations]
        sealed_count = len(self._reports)
        return RunProgress(
            run=self.name,
            iterations=total,
            reports=tuple(self._reports),
            evaluations=tuple(self._evaluations[number] for number in sorted(self._evaluations)),
            activity=self._find_activity(run, started[sealed_count:], open_evaluations, now),
            eta_seconds=None if total is None else self._predict_seconds(total),
            is_finished=total is not None and evaluation_key(total) in linked_parts(run),
        )

    def find_lock_holder(self) -> str | None:
        """Return the live process that has locked the run, or None if there is none."""
        return None if self._run is None else find_lock_holder(self._run)

    def _predict_seconds(self, total: int) -> float | None:
        totals = [report.seconds["total"] for report in self._reports[-RECENT_ITERATIONS:]]
        return sum(totals) / len(totals) * max(0, total - len(self._reports)) if totals else None

    def _find_activity(self, run: Run, started: list[int], evaluations: list[int], now: datetime) -> Activity:
        """Return what the run is doing now: the first activity that is not finished."""
        if evaluations and (activity := _describe_batch(run, evaluation_key(evaluations[-1]), now)) is not None:
            return Activity("held-out evaluation", activity.done, activity.total, activity.unit, activity.note)
        if started:
            return _describe_iteration(run, started[0], now)
        note = newest_note(run.store)
        if note is not None:
            return Activity("training on data", note.step, note.steps, "steps", f"loss {note.loss:.3f}")
        if self._reports or run.has(StageKey.policy(0)):
            return Activity("evaluation and start of workers" if not self._reports else "next iteration")
        return Activity("training on data" if run.has(BASE) else "preparation of policy and prompts")


def _describe_iteration(run: Run, number: int, now: datetime) -> Activity:
    key, wave, last_activity = iteration_key(number), 1, None
    while (activity := _describe_batch(run, iteration_key(number, wave), now)) is not None:
        last_activity, wave = activity, wave + 1
    if last_activity is None:
        return Activity(f"iteration {number}: plan")
    if run.has(StageKey.of(key, "update")):
        return Activity(f"iteration {number}: seal")
    if run.has(StageKey.of(key, "credit")):
        return Activity(f"iteration {number}: update")
    # dynamic sampling adds batches until enough groups are informative
    of_wave = f", batch {wave - 1}" if wave > 2 else ""
    return Activity(
        f"iteration {number}: {last_activity.description}{of_wave}",
        last_activity.done,
        last_activity.total,
        last_activity.unit,
        last_activity.note,
    )


def _describe_batch(run: Run, key: str, now: datetime) -> Activity | None:
    """Return what is happening to a batch: how many shards are generated, or how many are scored once all are
    generated. Return None before the batch is planned."""
    if (planned := run.find(StageKey.of(key, "plan"))) is None:
        return None
    batch = Batch.read(run, key)
    generated, scored = (len(run.folders(f"{key}/{stage}")) for stage in ("rollout", "scoring"))
    if generated < batch.plan.num_shards:
        manifests = [run.find(StageKey.of(key, "rollout", shard)) for shard in batch.shards] if generated else []
        tokens = sum(shard.metrics["tokens"] for shard in manifests if shard is not None)
        seconds = (now - datetime.fromisoformat(planned.provenance.created)).total_seconds()
        rate = f"{tokens / seconds:,.0f} tokens/s" if tokens and seconds > 0 else ""
        return Activity("rollout", generated, batch.plan.num_shards, "shards", rate)
    return Activity("scoring" if scored < batch.plan.num_shards else "credit", scored, batch.plan.num_shards, "shards")


def find_lock_holder(run: Run) -> str | None:
    """Return the live process that has locked a run, or None if there is none. The lock itself is not touched.

    The calling process does not count. A process on another machine with a shared disk always counts as alive, because
    its lock does not show whether it died. On a remote store, the process counts as alive until its lease expires.
    """
    content = run.store.find(LOCK)
    try:
        lock_content = json.loads(content or b"{}")
        pid, host = int(lock_content["pid"]), str(lock_content["host"])
    except (ValueError, KeyError, TypeError):
        return None
    if run.store.traits.expires_locks:  # a live process renews its lease before the lease expires
        [lock] = run.store.entries(LOCK)
        alive = (run.store.now() - lock.modified).total_seconds() < float(lock_content.get("seconds", 0))
        return f"process {pid} on {host}" if alive else None
    alive = host != socket.gethostname() or (pid != os.getpid() and psutil.pid_exists(pid))
    return f"process {pid} on {host}" if alive else None
