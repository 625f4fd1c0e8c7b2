"""The installed `rheostat` command as users run it, with real processes, its own store and its own Prefect home."""

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

import rheostat
from rheostat.infra.demos import DEMOS, EXAMPLES, demo_names
from rheostat.infra.plugins import TARGETS, register_target_folder
from tests.support.processes import die_with_parent


def demo_folders() -> list[Path]:
    """Return the folders of the data and rewards that jobs of tests use."""
    return [EXAMPLES, *(DEMOS / name for name in demo_names())]


for folder in demo_folders():
    register_target_folder(folder)


ROOT = Path(__file__).parents[2]


def search_path(folder: Path = ROOT) -> str:
    """Return the PYTHONPATH with which processes find the modules in a folder, and Rheostat if this process found it in
    a folder of links instead of an editable installation."""
    package = Path(rheostat.__file__).parent
    links = [package.parent] if package.name == "rheostat" else []
    return os.pathsep.join(map(str, [*links, folder]))


SEARCH_PATH = search_path()
"""PYTHONPATH of processes that use the tests' modules."""

RHEOSTAT = str(Path(sys.executable).with_name("rheostat"))

PATIENCE = 600.0
"""Seconds for a whole job, which takes 20 on an idle machine with two cores."""

SCRATCH = """
[data]
kind = "target"
target = "arithmetic:ArithmeticData"
[data.options]
train_problems = 64
heldout_problems = 8
[policy]
kind = "scratch"
"""
"""Problems of small jobs, and the beginning of their policy section."""

UPDATE = """
[update]
learning_rate = 1e-3
minibatches = 2
"""
"""Optimizer steps of small jobs."""

TINY = f"""
name = "tiny"
iterations = 3
report = false
{SCRATCH}
hidden_size = 16
intermediate_size = 32
[warmup]
steps = 10
[rollout]
prompts = 6
group_size = 4
shard_prompts = 2
[rollout.sampling]
max_new_tokens = 24
[scoring]
rewards = [{{kind = "target", target = "tests.support.rewards:even"}}]
{UPDATE}
[evaluation]
problems = 8
"""

PASSWORD = ("tests", "of-the-shared-server")
"""Name and password of the Prefect API that jobs share."""

AUTH = {"PREFECT_API_AUTH_STRING": ":".join(PASSWORD)}
"""Environment variables of a client of that API."""

RAISE = 0

KILL_SERVER = -1

LOSE_MACHINE = -2

PAUSE = -3

GO_ON = -4

KILL_DRIVER = -5


@dataclass(frozen=True)
class Fault:
    """A signal that a process of the job sends itself, once: see tests/support/faults.py."""

    role: str
    """`driver`, a pool's role, or `update-N` for one rank."""
    moment: str
    """Moment of the fault.

    A write of a file has the moments `before`, `during` and `after`. A method of a worker has `begin`, and `progress`
    at each step. A worker has `start`.
    """
    at: str
    """Regular expression for the file's path, or for the method with its work."""
    count: int = 1
    """Number of the moment among those that match, counted in the process from 1."""
    signal: int = signal.SIGKILL
    """Signal that the process sends itself.

    `RAISE` makes the worker's method raise, `KILL_SERVER` kills the worker's vLLM server, and `LOSE_MACHINE` its raylet
    with all descendants. `PAUSE` makes the process sleep for longer than any test, and `GO_ON` only records that the
    process was at the moment. With `KILL_DRIVER` a worker sends SIGKILL to the driver of the job.
    """


@dataclass(frozen=True)
class CommandResult:
    """A command that has ended."""

    code: int
    output: str


@dataclass(frozen=True)
class Job:
    """Working directory of one run, and the commands that run there."""

    home: Path
    api: str | None = None
    """Prefect API to use. If None, the job starts its own server."""
    counts_works: bool = False
    """Log every piece of work that workers begin, and every write of the driver."""
    document: str = TINY
    """The configuration."""
    ignores: tuple[int, ...] = ()
    """Signals that the job ignores from its start on."""
    path: Path = ROOT
    """Directory of modules that are not installed: rewards of tests, and modules of users."""
    address: str = ""
    """Address of the store. If not set, the store is in the home."""

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def run(self) -> Path:
        """Directory of the run."""
        return self.store / "tiny"

    def train(self, *overrides: str, faults: Sequence[Fault] = ()) -> CommandResult:
        """Run the job to its end, or to the end that a planted fault causes."""
        with self.started(*overrides, faults=faults) as process:
            return self.ended(process)

    @contextmanager
    def started(self, *overrides: str, faults: Sequence[Fault] = ()) -> Iterator["subprocess.Popen[bytes]"]:
        """Start the job in a separate process group, which is killed afterwards."""
        configured = self.configured()
        self.plant(faults)
        command = [sys.executable, "-m", "tests.support.faults"] if faults or self.counts_works else [RHEOSTAT]
        command += ["train", str(configured), *overrides, "--store", self.address or str(self.store)]
        with (self.home / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment(),
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=self._prepare,
            )
        try:
            yield process
        finally:
            kill(process)

    def _prepare(self) -> None:
        """Prepare the process of a command before it starts."""
        die_with_parent()
        for number in self.ignores:
            signal.signal(number, signal.SIG_IGN)

    def ended(self, process: "subprocess.Popen[bytes]") -> CommandResult:
        """Wait for a started job's end."""
        code = process.wait(PATIENCE)
        return CommandResult(code, (self.home / "output").read_text(errors="replace"))

    def part(self, command: str, *overrides: str) -> CommandResult:
        """Run one stage of the job: `sft`, `dpo` or `reward-model`."""
        return self._call(command, str(self.configured()), *overrides)

    def configured(self) -> Path:
        """Write the configuration file; return its path."""
        self.home.mkdir(parents=True, exist_ok=True)
        path = self.home / "tiny.toml"
        path.write_text(self.document)
        return path

    def command(self, name: str, *arguments: str, faults: Sequence[Fault] = ()) -> CommandResult:
        """Run a command about the run."""
        self.plant(faults)
        return self._call(
            name, "tiny", *arguments, program=[sys.executable, "-m", "tests.support.faults"] if faults else None
        )

    def plant(self, faults: Sequence[Fault]) -> None:
        """Plant these faults in the next start of the job or in the next command."""
        for struck in self.home.glob("struck-*"):
            struck.unlink()
        (self.home / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))

    def _call(self, *arguments: str, program: Sequence[str] | None = None) -> CommandResult:
        command = [*(program or [RHEOSTAT]), *arguments, "--store", self.address or str(self.store)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            preexec_fn=die_with_parent,
        )
        return CommandResult(done.returncode, done.stdout + done.stderr)

    def struck(self) -> int:
        """Count the planted faults of the last start that happened."""
        return len(list(self.home.glob("struck-*")))

    def works(self) -> Counter[str]:
        """Return how often each piece of work was begun by any worker, over all starts."""
        return works_of(self.home)

    def repeats(self) -> int:
        """Return how many pieces of work were begun again, over all starts."""
        return sum(count - 1 for count in self.works().values())

    def puts(self) -> list[str]:
        """Return the names of the files that drivers wrote, in order, over all starts."""
        return [line.removeprefix("put ") for line in log_of(self.home) if line.startswith("put ")]

    def environment(self) -> dict[str, str]:
        """Return the environment of the job's commands, and of machines that its workers run on."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        api = {} if self.api is None else {"PREFECT_API_URL": self.api, **AUTH}
        planted = {"RHEOSTAT_FAULTS": str(self.home), "PYTHONPATH": search_path(self.path)}
        folders = [*filter(None, kept.get(TARGETS, "").split(os.pathsep)), *map(str, demo_folders())]
        planted[TARGETS] = os.pathsep.join(dict.fromkeys(folders))
        return kept | api | planted | {"PREFECT_HOME": str(self.home / "prefect"), "DO_NOT_TRACK": "1"}


def log_of(home: Path) -> list[str]:
    """Return the log of tests/support/faults.py for a job."""
    log = home / "log"
    return log.read_text().splitlines() if log.exists() else []


def works_of(home: Path) -> Counter[str]:
    """Return how often each piece of work of a job was begun."""
    return Counter(line for line in log_of(home) if not line.startswith("put "))


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGKILL, and wait until the process is dead."""
    if process.poll() is None:
        process.kill()
    process.wait()


def wait_for(predicate: Callable[[], object], *, seconds: float = PATIENCE, every: float = 0.005) -> bool:
    """Wait until a condition holds, and return whether it does. Use a longer interval if it queries a server."""
    deadline = time.monotonic() + seconds
    while not (holds := predicate()) and time.monotonic() < deadline:
        time.sleep(every)
    return bool(holds)


def manifests_of(run: Path) -> dict[str, str]:
    """Read key and digest of every manifest, without code of the product."""
    root = run / "manifests"
    paths = [path for path in sorted(root.rglob("*.json")) if not path.name.startswith(".")]
    return {str(path.relative_to(root).with_suffix("")): json.loads(path.read_text())["digest"] for path in paths}


def manifest_of(run: Path, key: str) -> dict[str, Any]:
    """Return a manifest of a run as JSON, read without code of the product."""
    return json.loads((run / f"manifests/{key}.json").read_text())


def bundles_of(run: Path, key: str) -> dict[str, Path]:
    """Return the directory of each bundle that a manifest names, such as `weights` and `state`."""
    return {name: run / bundle["key"] for name, bundle in manifest_of(run, key)["bundles"].items()}


def digest_of(run: Path, key: str, bundle: str = "weights") -> str:
    """Return the digest of a bundle that a manifest names."""
    return manifest_of(run, key)["bundles"][bundle]["digest"]


def shards_of(run: Path) -> set[str]:
    """Return the names of all shards in a run, committed or not."""
    return {path.name for path in run.glob("shards/**/*") if path.is_file()}


def leftovers_of(run: Path) -> list[Path]:
    """Temporary files below a run."""
    return [path for path in run.rglob("*") if path.name.startswith(".tmp-")]


def files_of(run: Path) -> dict[str, bytes]:
    """Return every file of a run except its lock, which names the last holder, and files derived from its seals."""
    paths = (path for path in sorted(run.rglob("*")) if path.is_file() and path.name not in ("lock", "metrics.jsonl"))
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


def workers_of(run: Path, role: str) -> set[int]:
    """Return the process ids of a role's workers that committed something in this run."""
    found = (
        re.search(rf'"worker":"{role}-\d+-\d+ pid (\d+)"', p.read_text()) for p in run.rglob("manifests/**/*.json")
    )
    return {int(match[1]) for match in found if match}


def process_tree(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def is_alive(pid: int) -> bool:
    """Return whether a process runs. An ended process that nobody has waited for does not run."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def servers_of(home: Path) -> list[psutil.Process]:
    """Return all vLLM processes that workers of a job started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "vllm.entrypoints" in " ".join(process.cmdline()) and _is_of(process, home):
                found += [process, *process.children(recursive=True)]
    return found


def _is_of(process: psutil.Process, home: Path) -> bool:
    return process.environ().get("RHEOSTAT_FAULTS") == str(home)


def child_of(pid: int, name: str) -> psutil.Process | None:
    """Return the child of a process that has this name, or this word in its command line. Return None if none has."""
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            if child.name() == name or name in child.cmdline():
                return child
    return None


def list_running(family: Sequence[psutil.Process]) -> list[str]:
    """Return the command lines of the processes that still run."""
    lines = []
    for process in family:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                lines.append(f"{process.pid}: {' '.join(process.cmdline())}")
        except psutil.NoSuchProcess:
            continue
    return lines


SMALLEST = (
    "policy.layers=1",
    "warmup.steps=2",
    "rollout.prompts=2",
    "rollout.shard_prompts=1",
    "rollout.sampling.max_new_tokens=6",
    "evaluation.problems=1",
    "controllers.count=1",
)
"""Overrides of the tiny job for tests that start it dozens of times."""

SMALLEST_SWEEP = (
    *(
        "iterations=2",
        "pools.cluster=threads",
        "warmup.steps=2",
        "evaluation.problems=1",
        "policy.context=96",
        "policy.layers=1",
    ),
    *("rollout.sampling.max_new_tokens=6", "controllers.count=1"),
)
"""Overrides of the tiny job for the runs of a sweep."""

KEEPS_EVENTS = ("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED", "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED")
FRUGAL = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", **dict.fromkeys(KEEPS_EVENTS, "false")}
"""Settings of the tests' server: no analytics and no stored events. Workers still receive events that cancel a run."""


MADE_DATABASE = ROOT / "build" / f"prefect-{version('prefect')}.db"
"""Database of this checkout's first server, which takes 13 CPU seconds to create. Later servers start from copies."""


@contextmanager
def prefect_server(home: Path, *, keeps_tasks: bool = True, keeps_events: bool = False, port: int = 0) -> Iterator[str]:
    """Serve a Prefect API that several jobs share: starting one takes as long as a small job. It ends by SIGKILL.

    Keeping task runs is two fifths of the server's work for a small job. With `keeps_events` there are automations.
    """
    database = home / "prefect.db"
    if MADE_DATABASE.exists() and not database.exists():
        _copy_database(MADE_DATABASE, database)
    environment = os.environ | {"PREFECT_HOME": str(home)} | FRUGAL
    environment |= {"PREFECT_SERVER_API_AUTH_STRING": ":".join(PASSWORD)}
    environment |= {"PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_ENABLED": str(keeps_tasks).lower()}
    environment |= dict.fromkeys(KEEPS_EVENTS, str(keeps_events).lower())
    with socket.create_server(("127.0.0.1", port)) as listener, (home / "output").open("wb") as output:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        server = subprocess.Popen(
            [sys.executable, "-m", "rheostat.flows.cli.server", str(listener.fileno()), str(os.getpid())],
            pass_fds=[listener.fileno()],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        ended = wait_for(lambda: answers(f"{url}/health") or server.poll() is not None, every=0.1)
        assert ended and server.poll() is None, (home / "output").read_text(errors="replace")
        if not MADE_DATABASE.exists():
            _copy_database(database, MADE_DATABASE)
        yield url
    finally:
        kill(server)


def copy_prefect_database(home: Path, other: Path) -> None:
    """Start a Prefect home with the database of a running server."""
    other.mkdir(parents=True, mode=0o700)
    _copy_database(home / "prefect.db", other / "prefect.db")


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database that may be in use. Other processes only see the complete copy."""
    target.parent.mkdir(exist_ok=True)
    half = target.with_suffix(f".{os.getpid()}")
    with sqlite3.connect(source) as made, sqlite3.connect(half) as copy:
        made.backup(copy)
    half.chmod(0o600)
    half.replace(target)


def answers(url: str) -> bool:
    """Return whether a server answers a request to this address."""
    try:
        with urllib.request.urlopen(url, timeout=30):
            return True
    except (urllib.error.URLError, OSError):
        return False


def demo(home: Path, *overrides: str, config: str = "configs/demo.toml") -> dict[str, object]:
    """Run a configuration with overrides and return its summary."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [RHEOSTAT, "train", config, *overrides, "--store", str(home / "runs"), "--json"]
    environment = kept | {"PREFECT_HOME": str(home / "prefect")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "eta" in done.stderr, "progress goes to stderr where JSON goes to stdout"
    return json.loads(done.stdout)
