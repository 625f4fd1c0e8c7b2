"""Kinds of runs that `make chaos ARGS='--family NAME'` kills, and what each of them must equal at its end.

The families of tests/runs/runs.toml are jobs with workers that are threads: see `Strike` of tests/support/chaos.py. The
other kinds have several runs, several processes or a store in a bucket. Each kind makes one undisturbed run and one
schedule of kills per seed. A schedule kills a process, runs the same command again until it ends, and compares the end.
"""

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rheostat.infra.store.runs import list_runs
from rheostat.tasks.soup.record import latest_records
from rheostat.tasks.verification.invariants import verify_run
from tests.support import checker
from tests.support.chaos import (
    ATTEMPTS,
    MOMENTS,
    Strike,
    compare_apart_from_replays,
    compare_manifests,
    problems_after,
    record,
    run_driver,
    run_once,
    schedule_of,
    write_to,
)
from tests.support.demos import demo_job
from tests.support.jobs import (
    GO_ON,
    PATIENCE,
    RHEOSTAT,
    ROOT,
    SMALLEST_SWEEP,
    Fault,
    Job,
    child_of,
    copy_prefect_database,
    files_of,
    is_alive,
    kill,
    leftovers_of,
    manifests_of,
    process_tree,
    wait_for,
)
from tests.support.processes import preload, process
from tests.support.s3_proxy import Fault as RequestFault
from tests.support.s3_proxy import s3_proxy
from tests.support.s3_servers import moto
from tests.support.whole_runs import read_families

preload(__name__)

SHARES = (2, 2, 1)
"""Relative shares of schedules with one, two and three faults."""
QUARTERS = 4
SMALL = "small text"
"""Family whose job the kinds with a bucket and with real Prefect servers train."""
THREADS = "pools.cluster=threads"

SMALLEST_SOUP = (
    *("iterations=1", "warmup.steps=20", "rollout.prompts=2", "rollout.shard_prompts=2", "evaluation.problems=4"),
    *("soup.grid=3", "soup.statistics_prompts=4", "soup.corners='merge'"),
)
"""Overrides of configs/demos/soup/job.toml for tests that start the soup several times."""

S = TypeVar("S")


@dataclass(frozen=True)
class Plan:
    """Schedules of kills, and the function that runs one of them."""

    schedules: Mapping[int, Sequence[Any]]
    """Faults of each seed, in the order of the starts."""
    problems_after: Callable[[Sequence[Any], Path], list[str]]
    """Run a schedule in an empty directory, and return the differences from the undisturbed run."""
    side_by_side: int = 1
    """Number of schedules that may run at a time."""


def run_chain(
    faults: Sequence[S],
    start: Callable[[S | None], tuple[int, str]],
    *,
    place: Path,
    ends: Callable[[S, int, str], bool],
) -> list[str]:
    """Run a command with one fault after another, then without a fault until it succeeds. Return what went wrong.

    `start` returns the exit code and the output of the command. `ends` returns whether this is the documented end of a
    command in which the fault happened. A command that succeeds before its fault is the last one.
    """
    attempts = max(ATTEMPTS, len(faults) + 1)
    for number in range(attempts):
        fault = faults[number] if number < len(faults) else None
        code, output = start(fault)
        if code == 0:
            return []
        if fault is None or not ends(fault, code, output):
            return [f"start {number + 1} ended with {code}: {' | '.join(output.splitlines()[-8:])}"]
        with (place / "struck").open("a") as struck:
            struck.write("x")
    return [f"not at its end after {attempts} starts"]


def compare_stores(store: Path, whole: Path) -> list[str]:
    """Return the differences of the runs of a store from those of another store, and what two checks find in them."""
    names, expected = list_runs(str(store)), list_runs(str(whole))
    if names != expected:
        return [f"the runs are {names}, expected {expected}"]
    problems = []
    for name in names:
        if manifests_of(store / name) != manifests_of(whole / name):
            problems.append(f"{name} has other manifests")
        problems += [f"{name} left {path.name}" for path in leftovers_of(store / name)]
        problems += [f"{name}: {problem}" for problem in checker.problems_of(store / name)[:5]]
        problems += [f"{name}: {problem}" for problem in verify_run(str(store), name)[:5]]
    return problems


# ---- families of runs.toml


def make_undisturbed(name: str, together: Path, api: str) -> None:
    """Make the undisturbed run of a family in this process, which ends."""
    write_to(together / "output")
    read_families()[name].undisturbed(together, api)
    os._exit(0)


def undisturbed_run(name: str, home: Path, api: str) -> Path:
    """Return the directory of the undisturbed run of a family."""
    with process(make_undisturbed, name, home, api) as child:
        child.join(PATIENCE)
    assert child.exitcode == 0, (home / "output").read_text(errors="replace")[-2000:]
    return read_families()[name].undisturbed(home, api).run


def plan_family(name: str, home: Path, api: str, seeds: Sequence[int], stack: ExitStack) -> Plan:
    """Kill the process of a family's run, or fill the disk, at random writes."""
    whole, family = undisturbed_run(name, home, api), read_families()[name]
    overrides = (*family.settings(home), *family.chaos_overrides)
    writes = len(files_of(whole))
    schedules = {seed: schedule_of(seed, writes, shares=SHARES) for seed in seeds}
    stops = record(home / "stopping", api, (strikes[0] for strikes in schedules.values()), overrides, job=())
    start = partial(run_once, job=())
    has_agents = "rollout.environment.kind=agent" in overrides
    compare = compare_apart_from_replays if has_agents else compare_manifests

    def find(strikes: Sequence[Strike], place: Path) -> list[str]:
        copied = not strikes[0].full and stops.copy_to(place, strikes[0])
        found = problems_after(strikes, place, api, whole, overrides, start=start, struck=int(copied), compare=compare)
        return found or verify_run(str(place / "store"), "tiny")

    return Plan(schedules, find, side_by_side=os.cpu_count() or 1)


# ---- several runs


def plan_soup(home: Path, api: str, seeds: Sequence[int], stack: ExitStack) -> Plan:
    """Kill the process of a soup of several runs at random writes."""
    # Runs name the directories of the policies from which they start, so every soup is made in the same directory.
    document, here, whole = demo_job("soup").read_text(), home / "soup", home / "whole"
    job = Job(here, api, counts_works=True, document=document)

    def start(fault: Fault | None) -> tuple[int, str]:
        here.mkdir(exist_ok=True)
        job.plant([] if fault is None else [fault])
        code = run_driver(job, "soup", *SMALLEST_SOUP)
        return code, (here / "output").read_text(errors="replace")

    code, output = start(None)
    assert code == 0, output[-2000:]
    writes = len(job.puts())
    here.rename(whole)

    def find(faults: Sequence[Fault], place: Path) -> list[str]:
        shutil.rmtree(here, ignore_errors=True)
        place.mkdir()
        found = run_chain(faults, start, place=place, ends=lambda _, code, __: code == -signal.SIGKILL)
        if found:
            return found
        (made,), (expected,) = (latest_records(str(store), "soup") for store in (job.store, whole / "store"))
        differs = made.model_copy(update={"when": expected.when}) != expected
        return ["the record differs"] * differs + compare_stores(job.store, whole / "store")

    def schedule(seed: int) -> list[Fault]:
        return [Fault("driver", moment, "/store/", count=at) for moment, at in schedule_writes(seed, writes)]

    return Plan({seed: schedule(seed) for seed in seeds}, find)


def schedule_writes(seed: int, writes: int) -> list[tuple[str, int]]:
    """Return moments and numbers of random writes at which the starts of a command are killed. The first kills of four
    consecutive seeds are in the four quarters of the command."""
    choose, left, faults = random.Random(seed), writes, list[tuple[str, int]]()
    for number in range(choose.choices((1, 2, 3), SHARES)[0]):
        at = choose.randint(1, max(1, left)) if number else _choose_in_quarter(choose, seed, writes)
        faults.append((choose.choice(MOMENTS), at))
        left -= at
    return faults


def _choose_in_quarter(choose: random.Random, seed: int, number: int) -> int:
    """Return a random number from 1 to `number`, in the quarter of this range to which the seed belongs."""
    quarter = seed % QUARTERS
    return choose.randint(1 + quarter * number // QUARTERS, max(1, (quarter + 1) * number // QUARTERS))


@dataclass(frozen=True)
class SweepKill:
    """Kill of a process of a sweep when its store has a number of files."""

    files: int
    of_run: bool
    """Whether a process that trains a run is killed, instead of the command."""


def plan_sweep(home: Path, api: str, seeds: Sequence[int], stack: ExitStack) -> Plan:
    """Kill the command of a sweep, or one of its runs, at random moments."""

    def start(place: Path, fault: SweepKill | None) -> tuple[int, str]:
        job = Job(place, api)
        words = ["sweep", str(job.configured()), "rollout.prompts=6,4", *SMALLEST_SWEEP, "--store", str(job.store)]
        with (place / "output").open("wb") as output:
            command = subprocess.Popen(
                [RHEOSTAT, *words], cwd=ROOT, env=job.environment(), stdout=output, stderr=output
            )
        family = list[psutil.Process]()

        def strike() -> bool:
            """Kill the process when the moment is reached. Return whether there is nothing left to wait for."""
            if command.poll() is not None:
                return True
            if fault is None or count_files(job.store) < fault.files:
                return False
            family.extend(process_tree(command.pid)[1:])
            runs = [each for each in family if is_alive(each.pid) and "rheostat.flows.cli.sweep_run" in each.cmdline()]
            (runs[0] if fault.of_run and runs else command).kill()
            return True

        try:
            wait_for(strike)
            code = command.wait(PATIENCE)
        finally:
            kill(command)
        assert wait_for(lambda: not any(is_alive(each.pid) for each in family), seconds=60), "runs end with their sweep"
        return code, (place / "output").read_text(errors="replace")

    whole = home / "whole"
    code, output = start(whole, None)
    assert code == 0, output[-2000:]
    files = count_files(whole / "store")

    def ends(fault: SweepKill, code: int, output: str) -> bool:
        return code == -signal.SIGKILL or (fault.of_run and code == 1 and "killed by SIGKILL" in output)

    def find(faults: Sequence[SweepKill], place: Path) -> list[str]:
        place.mkdir()
        found = run_chain(faults, partial(start, place), place=place, ends=ends)
        return found or compare_stores(place / "store", whole / "store")

    return Plan({seed: schedule_sweep(seed, files) for seed in seeds}, find)


def schedule_sweep(seed: int, files: int) -> list[SweepKill]:
    """Return random kills of a sweep whose store has this number of files at its end. Four consecutive seeds have a
    kill in each quarter of the sweep, and seeds alternately begin with the command and with a run."""
    choose = random.Random(seed)
    others = [choose.randint(1, files) for _ in range(choose.choices((0, 1, 2), SHARES)[0])]
    at = sorted([_choose_in_quarter(choose, seed, files), *others])
    return [SweepKill(each, of_run=(seed + number) % 2 == 0) for number, each in enumerate(at)]


def count_files(folder: Path) -> int:
    """Return the number of files below a folder."""
    return sum(len(files) for _, _, files in os.walk(folder))


# ---- a bucket


def plan_bucket(home: Path, api: str, seeds: Sequence[int], stack: ExitStack) -> Plan:
    """Kill the process of a run in a bucket of moto before or after random requests."""
    whole = undisturbed_run(SMALL, home, api)
    overrides = (*read_families()[SMALL].settings(home), THREADS)
    requests = len(files_of(whole))
    (home / "moto").mkdir()
    server = stack.enter_context(moto(home / "moto"))
    endpoint, weather = stack.enter_context(s3_proxy(server.endpoint))
    os.environ["RHEOSTAT_LEASE_SECONDS"] = "4"

    def find(faults: Sequence[tuple[str, int]], place: Path) -> list[str]:
        bucket = server.place(endpoint=endpoint)
        bucket.open()
        job = Job(place, api, address=bucket.uri)

        def start(fault: tuple[str, int] | None) -> tuple[int, str]:
            weather.faults = []
            with job.started(*overrides) as command:
                if fault is not None:
                    moment, number = fault
                    weather.faults = [
                        RequestFault("", "^PUT ", times=number - 1),
                        RequestFault(moment, "^PUT ", times=1, does=command.kill),
                    ]
                ended = job.ended(command)
            return ended.code, ended.output

        place.mkdir()
        found = run_chain(faults, start, place=place, ends=lambda _, code, __: code == -signal.SIGKILL)
        weather.faults = []
        if found:
            return found
        verified = job.command("verify")
        problems = [] if verified.code == 0 else [f"verify: {verified.output}"]
        return problems + ["other manifests"] * (bucket.manifests() != manifests_of(whole))

    def schedule(seed: int) -> list[tuple[str, int]]:
        return [("after" if moment == "during" else moment, at) for moment, at in schedule_writes(seed, requests)]

    return Plan({seed: schedule(seed) for seed in seeds}, find)


# ---- Prefect servers


UPDATE_MOMENTS = (
    Fault("update-0", "begin", "^update", signal=GO_ON),
    Fault("update-0", "progress", "^update", signal=GO_ON),
    Fault("update-0", "after", "/policies/", signal=GO_ON),
    Fault("update-0", "begin", "^sync", signal=GO_ON),
    Fault("driver", "before", "/it-0001/update.json", signal=GO_ON),
    Fault("driver", "after", "/it-0002/update.json", signal=GO_ON),
)
"""Moments of an update at which the Prefect server is killed."""


def plan_server(home: Path, api: str, seeds: Sequence[int], stack: ExitStack) -> Plan:
    """Kill a run's own Prefect server at moments of its updates."""
    whole = undisturbed_run(SMALL, home, api)
    overrides = read_families()[SMALL].settings(home)

    def find(faults: Sequence[Fault], place: Path) -> list[str]:
        copy_prefect_database(home / "prefect", place / "prefect")
        job = Job(place, counts_works=True)

        def start(fault: Fault | None) -> tuple[int, str]:
            with job.started(*overrides, faults=[] if fault is None else [fault]) as command:
                if fault is not None and wait_for(lambda: job.struck() or command.poll() is not None):
                    server = None if command.poll() is not None else child_of(command.pid, "rheostat.flows.cli.server")
                    if server is not None:
                        server.kill()
                ended = job.ended(command)
            return ended.code, ended.output

        def ends(_: Fault, code: int, output: str) -> bool:
            return code == 1 and "A request to the Prefect API failed" in output and "has died" in output

        found = run_chain(faults, start, place=place, ends=ends)
        return found or problems_of_run(job.run, whole)

    return Plan({seed: schedule_server(seed) for seed in seeds}, find)


def schedule_server(seed: int) -> list[Fault]:
    """Return random moments of updates. The first moments of six consecutive seeds are all different."""
    choose, number = random.Random(seed), seed % len(UPDATE_MOMENTS)
    others = [*UPDATE_MOMENTS[:number], *UPDATE_MOMENTS[number + 1 :]]
    return [UPDATE_MOMENTS[number], *choose.sample(others, choose.choices((0, 1, 2), SHARES)[0])]


def problems_of_run(run: Path, whole: Path) -> list[str]:
    """Return the differences of a run from the undisturbed run, and what two checks find in it."""
    problems = ["other manifests"] * (manifests_of(run) != manifests_of(whole))
    problems += [f"left {path.name}" for path in leftovers_of(run)]
    return problems + checker.problems_of(run)[:5] + verify_run(str(run.parent), run.name)[:5]
