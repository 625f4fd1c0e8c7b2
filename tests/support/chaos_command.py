"""Hundreds of faults in a small run: `make chaos SEEDS=1..200`, or `make chaos ARGS=--every=1`.

`make chaos ARGS='--family NAME'` kills another kind of run instead, and `make chaos ARGS=--list` prints the kinds. A
schedule that fails is printed with the command that repeats it. `--family` may be repeated.
"""

import argparse
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from rheostat.infra.terminal import write
from tests.support.chaos import (
    MOMENTS,
    S,
    Strike,
    problems_after,
    record,
    run_once,
    schedule_of,
    start_on_ray,
    storms_of,
    writes_of,
)
from tests.support.chaos_deployed import plan_deployed
from tests.support.chaos_families import Plan, plan_bucket, plan_family, plan_server, plan_soup, plan_sweep
from tests.support.jobs import Job, prefect_server
from tests.support.whole_runs import read_families


@dataclass(frozen=True)
class Kind:
    """Kind of run with kills."""

    what: str
    """Description of the run and of the kills, for `--list`."""
    plan: Callable[[Path, str, Sequence[int], ExitStack], Plan]
    """Make the undisturbed run in a directory with a Prefect API, and return the schedules of some seeds."""


@cache
def kinds() -> Mapping[str, Kind]:
    """Return all kinds by name. The families whose undisturbed run has processes as workers are not among them."""
    on_threads = {
        family.name: Kind("the process of the run, or a full disk, at its writes", partial(plan_family, family.name))
        for family in read_families().values()
        if family.on == "threads"
    }
    return on_threads | {
        "soup": Kind("the process of a soup of several runs, at its writes", plan_soup),
        "sweep": Kind("the command of a sweep, or one of its runs", plan_sweep),
        "s3": Kind("the process of a run in a bucket of moto, at its requests", plan_bucket),
        "prefect server": Kind("the run's own Prefect server, during its updates", plan_server),
        "deployed": Kind("a deployed controller, the driver, the worker or the Prefect server", plan_deployed),
    }


def read_seeds(text: str) -> range:
    """Return the seeds that `A..B` (both ends included), `A+N` (N seeds from A on) or `A` means."""
    first, sign, last = re.fullmatch(r"(\d+)(?:(\.\.|\+)(\d+))?", text).groups(default="")
    end = int(first) + (int(last) if sign == "+" else 1) if sign != ".." else int(last) + 1
    return range(int(first), end)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the words of the command line."""
    parser = argparse.ArgumentParser(prog="make chaos", description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--seeds",
        default="1..20",
        type=read_seeds,
        metavar="A..B",
        help="seeds of the schedules: A to B, or with A+N the N from A on",
    )
    parser.add_argument(
        "--family",
        action="append",
        default=[],
        choices=sorted(kinds()),
        metavar="NAME",
        help="kill this kind of run instead, or several kinds one after another",
    )
    parser.add_argument("--list", action="store_true", help="print the kinds of runs for --family, and end")
    parser.add_argument("--on", choices=("threads", "ray"), default="threads", help="what the run's workers are")
    parser.add_argument("--every", type=int, metavar="N", help="one kill at every N-th write and each of its moments")
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE", help="change the job")
    parser.add_argument("--collect", action="store_true", help="delete garbage before each start, and at the end")
    parser.add_argument(
        "--side-by-side", type=int, default=(os.cpu_count() or 1) + 1, metavar="N", help="runs at a time"
    )
    asked = parser.parse_args(words)
    if asked.family and (asked.on == "ray" or asked.every or asked.override or asked.collect):
        parser.error("--family cannot be combined with --on ray, --every, --override or --collect")
    return asked


def main(words: Sequence[str] | None = None) -> int:
    """Run the schedules in parallel. Return exit code 1 if one failed."""
    asked = parse_arguments(words)
    if asked.list:
        for name, kind in kinds().items():
            write(f"{name:<24} kills {kind.what}")
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"  # sums depend on it, and workers have one thread
    runs = [partial(kill_family, name) for name in asked.family] or [kill_text]
    return max([kill(asked) for kill in runs])


@contextmanager
def home_with_api() -> Iterator[tuple[Path, str]]:
    """Run the block with a temporary directory and a Prefect API."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        home = Path(folder)
        (home / "prefect").mkdir()
        with prefect_server(home / "prefect", keeps_tasks=False) as api:
            yield home, api


def kill_family(name: str, asked: argparse.Namespace) -> int:
    """Run the schedules of one kind of run."""
    with home_with_api() as (home, api), ExitStack() as stack:
        plan = kinds()[name].plan(home, api, asked.seeds, stack)
        write(f"{name}: the undisturbed run is there")
        schedules = {f"seed {seed}": faults for seed, faults in plan.schedules.items()}
        side_by_side = min(asked.side_by_side, plan.side_by_side)
        options = f"--family {quote(name)}"
        return judge(schedules, home, plan.problems_after, side_by_side=side_by_side, options=options)


def kill_text(asked: argparse.Namespace) -> int:
    """Run the schedules of the small text job."""
    with home_with_api() as (home, api):
        return _kill_text(home, api, asked)


def _kill_text(home: Path, api: str, asked: argparse.Namespace) -> int:
    (home / "whole").mkdir()
    start = start_on_ray if asked.on == "ray" else run_once
    code = start(home / "whole", api, None, asked.override)
    if code != 0:
        write((home / "whole/output").read_text(errors="replace")[-2000:])
        return 1
    whole, seeds = home / "whole/store/tiny", asked.seeds
    check = partial(problems_after, api=api, whole=whole, overrides=asked.override, collects=asked.collect)
    options = " ".join(
        ["--on ray"] * (asked.on == "ray")
        + [f"--every {asked.every}"] * bool(asked.every)
        + ["--collect"] * asked.collect
        + [f"--override {quote(each)}" for each in asked.override]
    )
    pass_on = partial(judge, side_by_side=asked.side_by_side, options=options)
    if asked.on == "ray":
        writes = len(Job(home / "whole").puts())
        storms = {f"seed {seed}": storms_of(seed, writes) for seed in seeds}
        return pass_on(storms, home, partial(check, start=start_on_ray))
    writes = len(writes_of(home / "whole"))
    write(f"the undisturbed run of {writes} writes is there")
    if asked.every:
        places = range(1, writes + 1, asked.every)
        schedules = {f"{at} {moment}": [Strike(at, moment)] for at in places for moment in MOMENTS}
    else:
        schedules = {f"seed {seed}": schedule_of(seed, writes) for seed in seeds}
    stops = record(home / "stopping", api, (strikes[0] for strikes in schedules.values()), asked.override)
    find = partial(check, start=run_once)

    def find_from_copy(strikes: Sequence[Strike], place: Path) -> list[str]:
        return find(strikes, place, struck=int(not strikes[0].full and stops.copy_to(place, strikes[0])))

    return pass_on(schedules, home, find_from_copy)


def judge(
    schedules: Mapping[str, Sequence[S]],
    home: Path,
    problems_after: Callable[[Sequence[S], Path], list[str]],
    *,
    side_by_side: int,
    options: str,
) -> int:
    """Report each schedule that failed with the command that repeats it, and at the end the number that passed."""
    failed, struck = 0, 0

    def one(name: str) -> list[str]:
        nonlocal struck
        place = home / name.replace(" ", "-")
        found = problems_after(schedules[name], place)
        counted = place / "struck"
        struck += len(counted.read_text()) if counted.exists() else len(schedules[name])
        shutil.rmtree(place, ignore_errors=True)
        return found

    with ThreadPoolExecutor(side_by_side) as pool:
        for done, (name, found) in enumerate(zip(schedules, pool.map(one, schedules), strict=True), start=1):
            if found:
                failed += 1
                write(f"FAILED {name}: {', then '.join(map(str, schedules[name]))}: {'; '.join(found)}")
                write(f"repeat with: {repeat_command(name, options)}")
            elif done % 10 == 0:
                write(f"{done} of {len(schedules)} schedules, {failed} failed")
    write(f"{len(schedules) - failed} of {len(schedules)} schedules with {struck} faults ended as the undisturbed run")
    return int(failed > 0)


def repeat_command(name: str, options: str) -> str:
    """Return the command that repeats a schedule.

    >>> repeat_command("seed 7", '--family "stale rollouts"')
    'make chaos SEEDS=7 ARGS=\\'--family "stale rollouts"\\''
    """
    kind, _, seed = name.partition(" ")
    words = [f"SEEDS={seed}"] * (kind == "seed") + [f"ARGS='{options}'"] * bool(options)
    return " ".join(["make chaos", *words])


def quote(text: str) -> str:
    """Quote a word that has spaces for a shell, within single quotes."""
    return f'"{text}"' if " " in text else text
