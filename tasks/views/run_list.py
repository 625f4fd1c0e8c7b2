"""List of the runs in a store with their status. Only few records of each run are read, because a store may have
thousands of runs."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Literal

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.contracts import LockState, is_key
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.run_record import RECORD
from rheostat.infra.store.runs import Run, list_runs, open_run
from rheostat.infra.store.storage import open_store
from rheostat.tasks.run.keys import StageKey, iteration_key, iteration_numbers
from rheostat.tasks.views.metrics import format_number

RunStatus = Literal["running", "done", "crashed", "stopped", "damaged"]
"""Status of a run.

running: a live process has locked the run. done: the last evaluation follows the last iteration. crashed: the process
that had locked the run died. stopped: the run ended before its last iteration without a crash (cancelled, failed or
over its budget). damaged: records of the run cannot be read.
"""


class RunLine(Settings):
    """One run in the list of runs, with its status and results."""

    run: str
    """Name of the run."""
    created: str | None
    """Time of creation, UTC."""
    iterations: int
    """Number of completed iterations."""
    before: float | None
    """Held-out accuracy of the initial policy, or None if it was not measured yet."""
    after: float | None
    """Held-out accuracy of the last evaluated policy, or None if only the initial policy was evaluated."""
    best: float | None = None
    """Highest held-out accuracy of all evaluations, or None if there is none yet."""
    status: RunStatus = "stopped"
    """Status of the run, as described at `RunStatus`."""
    held_by: str = ""
    """Process that has locked the run. For a crashed run, the process that had locked it when it died."""
    algorithm: str | None = None
    """Kind of the algorithm, such as "grpo"."""
    seconds: float | None = None
    """Seconds from the creation of the run to its last completed iteration or evaluation, including pauses. None
    before."""
    fingerprint: str | None
    """Digest of the configuration that results depend on, or None if the run is damaged."""
    damage: str | None = None
    """Reason why the run cannot be read, or None."""

    def row(self) -> dict[str, str]:
        """Return the cells of the run in the list of runs, by column heading."""
        status: str = "damaged: see `rheostat verify`" if self.damage else self.status
        if self.status == "running" and self.held_by:
            status = f"running in {self.held_by}"
        return {
            "run": self.run,
            "status": status,
            "algorithm": self.algorithm or "-",
            "iterations": str(self.iterations),
            "accuracy before": format_number(self.before),
            "after": format_number(self.after),
            "best": format_number(self.best),
            "took": "-" if self.seconds is None else str(timedelta(seconds=round(self.seconds))),
            "created": self.created or "-",
        }


def has_run(store: str, name: str) -> bool:
    """Return whether a store has a run of this name."""
    return is_key(name) and open_store(store).exists(f"{name}/{RECORD}")


def list_run_lines(store: str, *, limit: int | None = None) -> tuple[list[RunLine], int]:
    """Return the status and results of the newest `limit` runs, sorted by name, and the total number of runs.

    Damaged runs are included and count as new. Runs that are deleted during the call are left out. Only the last seal
    and the evaluations of a run are read.
    """
    names = list_runs(store)
    opened: Iterable[Run | RunLine] = (run for name in names if (run := _open_if_there(store, name)) is not None)
    if limit is not None and limit < len(names):
        opened = sorted(opened, key=_creation_time, reverse=True)[:limit]
    lines = [each if isinstance(each, RunLine) else _read_line(each) for each in opened]
    present = [line for line in lines if line.damage is None or has_run(store, line.run)]
    return sorted(present, key=attrgetter("run")), len(names)


def _open_if_there(store: str, name: str) -> Run | RunLine | None:
    """Open a run. If its records are damaged, return a `RunLine` that describes the damage. Return None if the run was
    deleted after it was listed."""
    try:
        opened = _open_or_report(store, name)
    except BadInput:
        return None
    return opened if isinstance(opened, Run) or has_run(store, name) else None


def read_run_line(store: str, name: str) -> RunLine:
    """Return the status and results of one run, as shown in the list of runs. Raises BadInput if the store has no such
    run."""
    opened = _open_or_report(store, name)
    return opened if isinstance(opened, RunLine) else _read_line(opened)


def _open_or_report(store: str, name: str) -> Run | RunLine:
    try:
        return open_run(store, name)
    except Damaged as error:
        return _report_damage(name, error)


def _report_damage(name: str, error: Damaged) -> RunLine:
    return RunLine(
        run=name, created=None, iterations=0, before=None, after=None, fingerprint=None, damage=str(error),
        status="damaged",
    )  # fmt: skip


def _creation_time(opened: Run | RunLine) -> tuple[bool, str]:
    return (True, "") if isinstance(opened, RunLine) else (False, opened.record.created)


def _read_line(run: Run) -> RunLine:
    try:
        folders, holding = run.folders(), run.lock_state()
        sealed = [
            number for number in iteration_numbers(folders) if run.has(StageKey.of(iteration_key(number), "seal"))
        ]
        evaluations = _read_evaluations(run, folders)
        last = [run.require(StageKey.of(iteration_key(number), "seal")) for number in sealed[-1:]]
        means = [each.metrics["accuracy"] for each in evaluations]
    except Damaged as error:
        return _report_damage(run.name, error)
    is_done = _is_done(run, folders, len(sealed), evaluations)
    return RunLine(
        run=run.name,
        created=run.record.created,
        iterations=len(sealed),
        before=means[0] if means else None,
        after=means[-1] if len(means) > 1 else None,
        best=max(means, default=None),
        status=_find_status(holding, is_done=is_done and bool(sealed or holding.state == "free")),
        held_by=holding.who,
        algorithm=_find_algorithm(run),
        seconds=_measure_seconds(run, [*last, *evaluations[-1:]]),
        fingerprint=run.record.fingerprint,
    )


def _read_evaluations(run: Run, folders: list[str]) -> list[Manifest]:
    keys = (StageKey.of(folder, "summary") for folder in folders if folder.startswith("eval-"))
    return [summary for key in keys if (summary := run.find(key)) is not None]


def _find_status(holding: LockState, *, is_done: bool) -> RunStatus:
    if holding.state == "held":
        return "running"
    if is_done:
        return "done"
    return "crashed" if holding.state == "left" else "stopped"


def _is_done(run: Run, folders: list[str], sealed: int, evaluations: list[Manifest]) -> bool:
    """Return whether the last configured iteration is evaluated and no later iteration was begun.

    An iteration that a killed process had begun may have no manifest yet.
    """
    last = StageKey.parse(evaluations[-1].key).evaluation if evaluations else -1
    configured = run.record.config.get("iterations", sealed)
    return last == sealed == configured and iteration_key(sealed + 1) not in folders


def _find_algorithm(run: Run) -> str | None:
    algorithm = run.record.config.get("algorithm")
    return str(algorithm["kind"]) if isinstance(algorithm, dict) and "kind" in algorithm else None


def _measure_seconds(run: Run, ended: list[Manifest]) -> float | None:
    times = [datetime.fromisoformat(manifest.provenance.created) for manifest in ended]
    return (max(times) - datetime.fromisoformat(run.record.created)).total_seconds() if times else None
