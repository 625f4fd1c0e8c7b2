"""The states of `rheostat train` from start to end, and how each is reached and interrupted."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.jobs import GO_ON, PAUSE, SMALLEST, Fault, Job, list_running, process_tree, wait_for
from tests.support.judged import JUDGE

JOB = ("iterations=1", *SMALLEST)

Reached = Callable[[Job, psutil.Process], object]


def has_struck(job: Job, process: psutil.Process) -> bool:
    """Return whether the planted fault has happened."""
    return job.struck() > 0


def has_child(words: str, *, cpu_seconds: float = 0.0) -> Reached:
    """Return a condition: a child with these words in its command line has used this number of CPU seconds."""

    def reached(job: Job, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            for child in process.children():
                if words in " ".join(child.cmdline()):
                    return sum(child.cpu_times()[:2]) >= cpu_seconds
        return False

    return reached


def file_exists(name: str) -> Reached:
    """Return a condition: a file of this name is in the job's directory."""
    return lambda job, process: (job.home / name).exists()


@dataclass(frozen=True)
class State:
    """State of the command in the worst case, with a worker or a server that makes no progress."""

    reached: Reached = has_struck
    fault: Fault | None = None
    overrides: tuple[str, ...] = ()
    own_server: bool = False
    """Whether the job starts Prefect's server itself."""


STATES = {
    "Python starts": State(file_exists("output")),
    "a reward's module is imported to be checked": State(
        file_exists("importing"),
        overrides=("scoring.rewards=[{kind='target',target='tests.support.slow_module:reward'}]",),
    ),
    "Prefect's server starts": State(has_child("rheostat.flows.cli.server"), own_server=True),
    "the job waits for Prefect's API": State(has_child("rheostat.flows.cli.server", cpu_seconds=1), own_server=True),
    "Ray's control server starts": State(has_child("gcs_server")),
    "the raylet starts": State(has_child("raylet/raylet")),
    "workers start": State(fault=Fault("update", "start", "", signal=PAUSE)),
    "warm-up": State(fault=Fault("update-0", "begin", "warmup", signal=PAUSE)),
    "rollout": State(fault=Fault("rollout", "begin", "generate", signal=PAUSE)),
    "a user's reward sleeps": State(
        file_exists("asleep"),
        overrides=(
            "scoring.rewards=[{kind='target',target='tests.support.rewards:never',options={told='HOME/asleep'}}]",
            "scoring.timeout_seconds=3600",
        ),
    ),
    "a judge judges": State(fault=Fault("judge-judge", "begin", "judge", signal=PAUSE), overrides=(JUDGE,)),
    "update, one rank of two waits in a collective": State(
        fault=Fault("update-1", "begin", "^update", signal=PAUSE), overrides=("pools.update_ranks=2",)
    ),
    "evaluation": State(fault=Fault("rollout", "begin", "generate .*iteration=0,", signal=PAUSE)),
    "the driver itself hangs in a write to the store": State(
        fault=Fault("driver", "before", "/it-0001/credit.json", signal=PAUSE)
    ),
    "the report is written": State(fault=Fault("driver", "before", "[.]png", signal=GO_ON)),
    "the job closes": State(fault=Fault("driver", "after", "/summary.json", signal=GO_ON), own_server=True),
}


@dataclass(frozen=True)
class Interrupted:
    """End of a command that got a signal."""

    code: int
    output: str
    seconds: float
    """Seconds from the signal to the end of the command."""
    gone_seconds: float
    """Seconds from the signal until all processes that the command started had ended."""
    left: list[str]


def interrupt(name: str, number: int, home: Path, api: str, *, ignores: tuple[int, ...] = ()) -> Interrupted:
    """Start the smallest job, send the signal when the state is reached, and measure the end."""
    state = STATES[name]
    job = Job(home, None if state.own_server else api, ignores=ignores)
    overrides = [override.replace("HOME", str(home)) for override in state.overrides]
    with job.started(*JOB, *overrides, faults=[] if state.fault is None else [state.fault]) as process:
        here = psutil.Process(process.pid)
        reached = wait_for(lambda: state.reached(job, here) or process.poll() is not None)
        assert reached and process.poll() is None, (home / "output").read_text()
        family = process_tree(process.pid)
        began = time.monotonic()
        process.send_signal(number)
        ended = job.ended(process)
        seconds = time.monotonic() - began
        wait_for(lambda: not list_running(family), seconds=60)
        return Interrupted(ended.code, ended.output, seconds, time.monotonic() - began, list_running(family))


SIGNALS = (signal.SIGINT, signal.SIGTERM)
