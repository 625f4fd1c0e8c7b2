"""Faults at random moments of a small run, and what the run must equal at its end.

tests/support/chaos_command.py is the command `make chaos`, and tests/support/chaos_families.py has other kinds of runs.

Every seed is a schedule of faults. A fault kills a process, or fills the disk, before, during or after one of the run's
writes to the store. The same job is started again until it ends without a fault. The run must then have the manifests
and the shards of the undisturbed run and no other files, and pass a checker that shares no code with the product.

The run's workers are threads of one process, so a SIGKILL ends all of them. With `--on ray` the workers are processes,
and each start of the job has several faults: kills of workers during their work and around their writes, and a kill of
the driver, whose command is then run again. `--every` tests the moments of all writes instead of random ones.

The states that a first SIGKILL leaves are copied from a single run for all schedules. That run is suspended (SIGSTOP)
with all of its threads at each moment, its directory is copied, and it is resumed. Later faults strike the process of
the job itself.
"""

import errno
import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from typing import TypeVar

import rheostat.infra.store.local
from rheostat.flows.cli.app import main as command
from rheostat.infra.store.disk import open_temporary, publish_file
from rheostat.infra.store.garbage import collect_garbage
from rheostat.infra.store.runs import open_run
from rheostat.infra.store.shards import read_shard
from tests.support import checker, faults
from tests.support.in_process import InProcessJob
from tests.support.jobs import (
    PATIENCE,
    SMALLEST,
    Fault,
    Job,
    leftovers_of,
    manifest_of,
    manifests_of,
    shards_of,
    works_of,
)
from tests.support.processes import preload, process

ROLES = ("preparation", "rollout", "scoring", "update")
preload(
    __name__,
    "rheostat.flows.train",
    *(f"rheostat.models.workers.{role}" for role in ROLES),
    *("rheostat.models.engines.local.engine", "rheostat.models.algorithms.group_relative"),
    # What is imported where it is needed: once here, not at every start.
    *("deepspeed", "deepspeed.moe.layer", "matplotlib.pyplot", "matplotlib.backends.backend_agg", "pandas"),
    *("pyarrow.pandas_compat", "prefect.flow_engine", "prefect.task_engine", "fastapi"),
    *("transformers.models.llama.modeling_llama", "transformers.generation.utils"),
)

JOB = ("iterations=2", "policy.heads=1", "policy.kv_heads=1", *SMALLEST)
MOMENTS = ("before", "during", "after")
ATTEMPTS = 6
"""Minimum number of starts of a job before it counts as failed. A sampled schedule has fewer faults."""


@dataclass(frozen=True)
class Strike:
    """Fault at one write of an attempt."""

    write: int | str
    """Number of the process's write to the store, from 1, or the name in the run of the written file."""
    moment: str
    """`before` the write, `during` the write, when half of the file is written, or `after` the write."""
    full: bool = False
    """Whether the disk is full at this write, instead of a SIGKILL."""

    @property
    def code(self) -> int:
        """Exit code of a start in which this fault happens."""
        return 1 if self.full else -signal.SIGKILL

    def happen(self, path: Path, data: bytes | Path, *, root: Path) -> None:
        """Leave half of a temporary file if the moment is `during`.

        Then kill this process, or raise the error of a full disk.
        """
        if self.moment == "during":
            write_half(data, root=root)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.kill(os.getpid(), signal.SIGKILL)

    def __str__(self) -> str:
        return f"{'disk full' if self.full else 'killed'} {self.moment} write {self.write}"


def write_half(data: bytes | Path, *, root: Path) -> Path:
    """Leave the temporary file of a write that was half done."""
    whole = data if isinstance(data, bytes) else data.read_bytes()
    descriptor, half = open_temporary(root)
    os.write(descriptor, whole[: len(whole) // 2])
    os.close(descriptor)
    return half


@dataclass(frozen=True)
class Stops:
    """Stops of a run at moments of its writes, at which the state that a SIGKILL would leave is copied."""

    wanted: frozenset[tuple[int, str]]
    """Numbers and moments of writes."""
    home: Path
    """Home of the run that stops."""
    copies: Path
    """Directory with one copy per moment, such as `12-after`."""

    def stop(self, write: int, moment: str, data: bytes | Path, *, root: Path) -> None:
        """Stop this process until its home has been copied, if the moment is wanted. Called by one thread at a time."""
        if (write, moment) not in self.wanted:
            return
        half = write_half(data, root=root) if moment == "during" else None
        self._asked.write_text(f"{write}-{moment}")
        os.kill(os.getpid(), signal.SIGSTOP)
        while self._asked.exists():  # this thread may be the last that the signal reaches
            time.sleep(0.001)
        if half is not None:
            half.unlink()

    def follow(self, child: BaseProcess) -> None:
        """Copy the run's home at each stop and then resume the run, until it ends."""
        while child.is_alive():
            if child.pid is not None and self._asked.exists() and has_stopped(child.pid):
                shutil.copytree(self.home, self.copies / self._asked.read_text(), ignore=lambda *_: {self._asked.name})
                self._asked.unlink()
                os.kill(child.pid, signal.SIGCONT)
            time.sleep(0.001)

    def copy_to(self, home: Path, first: Strike) -> bool:
        """Copy to a home the state that a fault of the first start leaves. Return False if the run had fewer writes."""
        state = self.copies / f"{first.write}-{first.moment}"
        if not state.exists():
            return False
        shutil.copytree(state, home)
        return True

    @property
    def _asked(self) -> Path:
        return self.home / "stopped"


def has_stopped(pid: int) -> bool:
    """Return whether every thread of a process is stopped. Return False if a thread is about to end."""
    try:
        states = {task.read_text().rpartition(") ")[2][:1] for task in Path(f"/proc/{pid}/task").glob("*/stat")}
    except (FileNotFoundError, ProcessLookupError):
        return False
    return states == {"T"}


WORKERS: dict[tuple[str, str], tuple[tuple[str, int], ...]] = {
    ("preparation", "begin"): (("make_policy", 1), ("make_prompts", 2)),
    ("rollout", "begin"): (("generate", 3),),
    ("rollout", "progress"): (("generate", 8),),
    ("rollout", "/shards/"): (("", 3),),
    ("scoring", "begin"): (("score", 3), ("credit", 2)),
    ("scoring", "/shards/"): (("", 3),),
    ("update-0", "begin"): (("warmup", 1), ("update", 2), ("sync", 2)),
    ("update-0", "progress"): (("warmup", 2), ("update", 2)),
    ("update-0", "/policies/"): (("", 4),),
    ("update-0", "/states/"): (("", 2),),
}
"""Moments at which workers on Ray are killed: work and maximum count, by role and moment or folder of a write."""


@dataclass(frozen=True)
class Storm:
    """Faults of one start of a run on Ray: kills of workers, and at the end perhaps of the driver."""

    faults: tuple[Fault, ...]

    @property
    def code(self) -> int:
        """Exit code of a start in which all faults happen."""
        return -signal.SIGKILL if any(fault.role == "driver" for fault in self.faults) else 0

    def __str__(self) -> str:
        return " and ".join(f"{fault.role} {fault.moment} {fault.at} no. {fault.count}" for fault in self.faults)


def storms_of(seed: int, writes: int) -> list[Storm]:
    """Return the faults of a seed for a run on Ray whose driver has this number of writes.

    In the last start the driver is not killed.
    """
    choose, storms = random.Random(seed), []
    for last in [False] * choose.choices((0, 1), (3, 1))[0] + [True]:
        workers = [_worker_fault(choose) for _ in range(choose.randint(1, 3))]
        driver = Fault("driver", choose.choice(MOMENTS), "/tiny/", count=choose.randint(1, max(1, writes)))
        storms.append(Storm((*workers, *([] if last else [driver]))))
    return storms


def _worker_fault(choose: random.Random) -> Fault:
    (role, moment), places = choose.choice(sorted(WORKERS.items()))
    at, most = choose.choice(places)
    if moment.startswith("/"):
        return Fault(role, choose.choice(MOMENTS), moment, count=choose.randint(1, most))
    return Fault(role, moment, f"^{at}", count=choose.randint(1, most))


def start_on_ray(home: Path, api: str, storm: Storm | None, overrides: Sequence[str] = ()) -> int:
    """Start the job with its workers in processes of Ray; return its exit code."""
    job = Job(home, api, counts_works=True)
    job.plant(() if storm is None else storm.faults)
    code = run_driver(job, "train", *JOB, *overrides)
    with (home / "struck").open("a") as struck:
        struck.write("x" * job.struck())
    return code


def run_driver(job: Job, *words: str) -> int:
    """Run a command of the job with its faults that have not happened yet, and return its exit code."""
    with process(execute_command, job, words) as driver:
        driver.join(PATIENCE)
        return -1000 if driver.exitcode is None else driver.exitcode


def execute_command(job: Job, words: Sequence[str]) -> None:
    """Execute a command of the job in this process, which has already imported its modules."""
    os.setsid()
    os.environ.clear()
    os.environ.update(job.environment())
    write_to(job.home / "output")
    faults.Planted("driver")
    with InProcessJob(job.home, str(job.api)).prefect(), faults.planted(job.home):
        code = command([words[0], str(job.configured()), *words[1:], "--store", str(job.store)])
    os._exit(code)


def write_to(output: Path) -> None:
    """Redirect the output of this process to a file, in append mode."""
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def schedule_of(seed: int, writes: int, *, shares: tuple[int, int, int] = (16, 3, 1)) -> list[Strike]:
    """Return the faults of a seed for a run with this number of writes: one to three, with these relative shares.

    Later attempts have fewer writes left, and may end before their fault.
    """
    choose = random.Random(seed)
    strikes, left = [], writes
    for _ in range(choose.choices((1, 2, 3), shares)[0]):
        at = choose.randint(1, max(1, left))
        strikes.append(Strike(at, choose.choice(MOMENTS), full=choose.random() < 0.2))
        left -= at
    return strikes


def attempt(
    home: Path,
    api: str,
    strike: Strike | None,
    overrides: Sequence[str],
    stops: Stops | None = None,
    *,
    job: Sequence[str] = JOB,
) -> None:
    """Run the job in this process to its end or to its fault. Log its writes and the work of its workers."""
    numbers, lock, one_stop, run = count(1), Lock(), Lock(), home / "store/tiny"

    def stop(number: int, moment: str, data: bytes | Path, root: Path) -> None:
        if stops is not None:
            with one_stop:
                stops.stop(number, moment, data, root=root)

    (home / "writes").write_text("")

    def publish(path: Path, data: bytes | Path, *, root: Path, durable: bool = True) -> bool:
        name = path.relative_to(run).as_posix()
        with lock:
            number = next(numbers)
            with (home / "writes").open("a") as writes:
                writes.write(f"{name}\n")
        here = strike if strike is not None and strike.write in (number, name) else None
        for moment in ("before", "during"):
            stop(number, moment, data, root)
        if here is not None and here.moment != "after":
            here.happen(path, data, root=root)
        won = publish_file(path, data, root=root, durable=durable)
        stop(number, "after", data, root)
        if here is not None and here.moment == "after":
            here.happen(path, data, root=root)
        return won

    rheostat.infra.store.local.publish_file = publish
    write_to(home / "output")
    try:
        InProcessJob(home, api, counts_works=True).train(*job, *overrides)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_once(
    home: Path, api: str, strike: Strike | None, overrides: Sequence[str] = (), *, job: Sequence[str] = JOB
) -> int:
    """Start the job; return its exit code."""
    with process(partial(attempt, job=job), home, api, strike, overrides) as child:
        child.join(600)
        code = child.exitcode
    return -1000 if code is None else code


def record(
    home: Path, api: str, wanted: Iterable[Strike], overrides: Sequence[str], *, job: Sequence[str] = JOB
) -> Stops:
    """Start the job, and copy the state that a SIGKILL leaves at the moments of some strikes."""
    stops = Stops(frozenset((int(at.write), at.moment) for at in wanted if not at.full), home, home.parent / "copies")
    home.mkdir()
    with process(partial(attempt, job=job), home, api, None, overrides, stops) as child:
        stops.follow(child)
    return stops


def writes_of(home: Path) -> list[str]:
    """Return the names of the files that the last start wrote, in order."""
    return (home / "writes").read_text().splitlines()


def begun_again(home: Path) -> int:
    """Return how many pieces of work were begun again, over all starts."""
    return sum(times - 1 for times in works_of(home).values())


S = TypeVar("S", Strike, Storm)


def compare_manifests(run: Path, whole: Path) -> list[str]:
    """Return the differences of a run from the undisturbed one: results with other digests, and missing shards."""
    problems = []
    if manifests_of(run) != manifests_of(whole):
        changed = manifests_of(run).items() ^ manifests_of(whole).items()
        problems.append(f"other manifests: {sorted({key for key, _ in changed})[:5]}")
    if not shards_of(run) >= shards_of(whole):
        problems.append("shards are missing")
    return problems


def compare_apart_from_replays(run: Path, whole: Path) -> list[str]:
    """Return the differences of a run with agents from the undisturbed one. The field `replayed` of a turn may differ,
    because it says whether a stored answer was repeated after a kill. Digests of rollouts and of later results
    depend on it, but metrics, policies and all other fields do not."""
    found, expected = manifests_of(run), manifests_of(whole)
    if found.keys() != expected.keys():
        return [f"other manifests: {sorted(found.keys() ^ expected.keys())[:5]}"]
    parts = ("metrics", "bundles", "detail")
    changed = [
        key
        for key in expected
        if any(manifest_of(run, key)[part] != manifest_of(whole, key)[part] for part in parts)
        or ("/rollout/" in key and _rows_apart_from_replays(run, key) != _rows_apart_from_replays(whole, key))
    ]
    return [f"other results: {changed[:5]}"] if changed else []


def _rows_apart_from_replays(run: Path, key: str) -> list[dict[str, object]]:
    opened = open_run(str(run.parent), run.name)
    rows = [row for shard in opened.require(key).shards for row in read_shard(opened.store, shard).to_pylist()]
    for turn in (turn for row in rows for turn in row["turns"] or ()):
        turn["replayed"] = None
    return rows


def problems_after(
    strikes: Sequence[S],
    home: Path,
    api: str,
    whole: Path,
    overrides: Sequence[str] = (),
    *,
    start: Callable[[Path, str, S | None, Sequence[str]], int],
    struck: int = 0,
    collects: bool = False,
    compare: Callable[[Path, Path], list[str]] = compare_manifests,
) -> list[str]:
    """Start a job with one fault after another, then without, and return the differences from the undisturbed run.

    If some faults have happened already, the home is what they left. With `collects`, garbage is deleted before each
    start. `compare` returns the differences between two runs.
    """
    home.mkdir(parents=True, exist_ok=True)
    code, attempts = -1, max(ATTEMPTS, len(strikes) + 1)
    for number in range(struck, attempts):
        if collects and (home / "store/tiny/run.json").exists():
            with open_run(str(home / "store"), "tiny").lock() as held:
                collect_garbage(held)
        code = start(home, api, strikes[number] if number < len(strikes) else None, overrides)
        if code == 0:
            break
        if number >= len(strikes) or code != strikes[number].code:
            output = (home / "output").read_text(errors="replace").splitlines()
            return [f"start {number + 1} ended with {code}: {' | '.join(output[-8:])}"]
    run, problems = home / "store/tiny", []
    if code != 0:
        problems.append(f"not at its end after {attempts} starts")
    problems += compare(run, whole)
    if collects and code == 0:
        with open_run(str(home / "store"), "tiny").lock() as held:
            collect_garbage(held)
        problems += ["other shards than the undisturbed run's"] * (shards_of(run) != shards_of(whole))
    problems += [f"left {path.name}" for path in leftovers_of(run)]
    return problems + checker.problems_of(run)[:5]
