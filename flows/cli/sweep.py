"""Command that trains a configuration at several points, each as a separate run in a separate process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, TextIO

from cyclopts import Parameter

from rheostat.flows.child_process import build_prefect_environment
from rheostat.flows.cli.options import Config, Named, StoredIn
from rheostat.flows.cli.prefect_api import prefect_api
from rheostat.flows.cli.train import AcceptChange, JobArguments
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, RheostatError, RunsFailed
from rheostat.infra.processes.guard import guarded_directory
from rheostat.infra.terminal import Json, parse_whole_number, table, wrap_text, write
from rheostat.infra.untrusted_text import make_visible

if TYPE_CHECKING:
    from rheostat.tasks.config.run import RunConfig

LOOK_SECONDS: Final = 0.2
END_SECONDS: Final = 8.0
"""Seconds that the runs of a sweep have to stop after an interrupt. Then they are killed. Killed runs can be resumed
too."""

Grid = Annotated[
    str,
    Parameter(
        name="KEY=V1,V2", help="keys of the configuration with their values; a key with a single value is an override"
    ),
]
Listed = Annotated[
    Path | None,
    Parameter(
        name="--list", metavar="FILE", show_default="none", help="file of points: JSON Lines, or TOML with [[points]]"
    ),
]
Limit = Annotated[int, Parameter(converter=parse_whole_number, metavar="N", help="maximum number of parallel runs")]
Shown = Annotated[bool, Parameter(name="--table", help="only show the progress of the runs, without starting any")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Options of a sweep: the file that lists its configurations, the number of parallel runs, and whether to train or
    only show the results."""

    listed: Listed = None
    limit: Limit = 1
    accept_change: AcceptChange = False
    shown: Shown = False


DEFAULT_OPTIONS = SweepOptions()


@dataclass(frozen=True, slots=True)
class _Reporter:
    """Printer of the output of several runs. Each line starts with the name of its run."""

    stream: TextIO

    def tell(self, name: str, line: str) -> None:
        """Print one line of the output of a run, after the run's name."""
        self.stream.write(f"{wrap_text(make_visible(f'{name}: {line}'))}\n")
        self.stream.flush()


def sweep(
    config: Config,
    /,
    *grid: Grid,
    course: SweepOptions = DEFAULT_OPTIONS,
    run: Named = None,
    store: StoredIn = None,
    as_json: Json = False,
) -> None:
    """Train a configuration at every point of a grid or a list, several runs at a time, or continue a sweep."""
    from rheostat.tasks.config.sweep import read_points, sweep_points, varied_keys
    from rheostat.tasks.views.sweep import swept_run

    if course.limit < 1:
        raise BadInput(f"--limit is {course.limit}, but it must be at least 1.")
    base = JobArguments(config, (), run, store).load()
    points = sweep_points(base.name, grid, [] if course.listed is None else read_points(course.listed))
    jobs = [
        JobArguments(config, (*point.overrides, f"tags={json.dumps([*base.tags, base.name])}"), point.name, store)
        for point in points
    ]
    loaded = [job.load() for job in jobs]  # errors of any point are raised before the first run starts
    reporter = _Reporter(sys.stderr if as_json else sys.stdout)
    errors = {} if course.shown else _train_runs(jobs, loaded, course, reporter)
    runs = [
        swept_run(each, point.values, error=errors.get(point.name, ""))
        for each, point in zip(loaded, points, strict=True)
    ]
    if as_json:
        write(json.dumps([each.model_dump(mode="json") for each in runs], indent=2))
    else:
        write(table([each.row(varied_keys([point.values for point in points])) for each in runs]))
    if errors:
        failures = "; ".join(f"{name}: {error}" for name, error in errors.items())
        raise RunsFailed(
            f"{len(errors)} of {format_count(len(points), 'run')} of the sweep failed. Run the same command again to "
            f"continue them. Errors: {failures}"
        )


@dataclass(slots=True)
class _RunningProcess:
    """Process that trains one run of a sweep, with the file that contains its output."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: BinaryIO
    """Open file with the output of the process. The read position is the end of the output that was printed already."""
    last: str = ""
    """Last line of the output that was read so far."""

    def said(self, *, all_left: bool) -> list[str]:
        """Read the new lines of the process's output, and return them. An incomplete last line is returned only if
        `all_left` is true, which is set after the process has ended."""
        place, content = self.log.tell(), self.log.read()
        whole = len(content) if all_left else content.rfind(b"\n") + 1
        self.log.seek(place + whole)
        lines = [line for line in content[:whole].decode(errors="replace").splitlines() if line.strip()]
        self.last = lines[-1] if lines else self.last
        return lines

    def failure(self, code: int) -> str:
        """Return the reason why the process failed. This is the name of the signal that killed it, or else the last
        line of its output (usually the error message), or else its exit code. `code` is the return code of
        `Popen.poll`."""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return self.last.removeprefix("rheostat: ") or f"exit code {code}"


def _train_runs(
    jobs: Sequence[JobArguments], loaded: Sequence["RunConfig"], course: SweepOptions, reporter: _Reporter
) -> dict[str, str]:
    """Train the runs of a sweep that are not finished, up to `course.limit` at the same time. `loaded` are the
    configurations of `jobs`. Return the failure reason of each failed run, by run name."""
    from rheostat.tasks.run.preflight import is_run_complete

    errors, waiting = dict[str, str](), list[tuple[str, JobArguments]]()
    for job, config in zip(jobs, loaded, strict=True):
        try:
            if is_run_complete(config):
                reporter.tell(config.name, "already finished")
            else:
                waiting.append((config.name, job))
        except RheostatError as error:
            errors[config.name] = str(error)
    if not waiting:
        return errors
    running = list[_RunningProcess]()
    with prefect_api() as url, guarded_directory("rheostat-sweep-") as folder:
        reporter.tell(
            "sweep",
            f"{len(waiting)} of {format_count(len(jobs), 'run')} to train, Prefect's UI: {url.removesuffix('/api')}",
        )
        environment = build_prefect_environment()
        try:
            while waiting or running:
                while waiting and len(running) < course.limit:
                    name, job = waiting.pop(0)
                    reporter.tell(name, "started")
                    running.append(_start_run(name, job, folder, environment, accept_change=course.accept_change))
                time.sleep(LOOK_SECONDS)
                errors |= _collect_ended(running, reporter)
        finally:
            _stop_runs([training.process for training in running])
    return errors


def _collect_ended(running: list[_RunningProcess], reporter: _Reporter) -> dict[str, str]:
    """Print new output of the running processes, and remove processes that have ended from `running`. Return the
    failure reason of each process that has failed, by run name."""
    errors = dict[str, str]()
    for training in [*running]:
        code = training.process.poll()  # checked before reading, so that the read is complete
        for line in training.said(all_left=code is not None):
            reporter.tell(training.name, line)
        if code is not None:
            running.remove(training)
            errors |= {training.name: training.failure(code)} if code else {}
    return errors


def _start_run(
    name: str, job: JobArguments, folder: Path, environment: Mapping[str, str], *, accept_change: bool
) -> _RunningProcess:
    """Start a process that trains a run like `rheostat train` does, with its output in a file in `folder`.
    `environment` contains additional environment variables."""
    words = ["train", str(job.path), *job.overrides, "--run", name, "--json"]
    words += ["--store", job.store] if job.store is not None else []
    words += ["--accept-change"] if accept_change else []
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rheostat.flows.cli.sweep_run", str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C reaches only the sweep, which stops the run
        )
    return _RunningProcess(name, process, log.open("rb"))


def _stop_runs(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ask the processes of a sweep to stop, and kill processes that do not stop in time. Stored results of the runs are
    kept."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        process.kill()
