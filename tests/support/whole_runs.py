"""Table of whole runs that faults and placement must not change: `tests/runs/runs.toml`.

A `[[family]]` is a job. One run of the job without faults, the undisturbed run, is made once per test session and
shared by all test processes. A case of `cases` is another run of the same job, which is killed, or has other workers,
and must end with the manifests, the shards and the temporary files of the undisturbed run. Keys of a family:

- `like`: another family, whose overrides come before those of this family.
- `overrides`: the difference from the tiny job of tests/support/jobs.py. `{inputs}` is the directory of `build`.
- `undisturbed_overrides`: settings of the undisturbed run alone, which must change no bit.
- `chaos_overrides`: settings of the killed runs of `make chaos ARGS='--family NAME'`, which must change no bit.
- `build`: function `module:function` that writes data and models into a directory.
- `on`: where the undisturbed run has its workers, `threads` (default) or `ray`.
- `cases`: inline tables, and `defaults` for all of them.

Keys of a case:

- `name`: what happens to the run, a phrase.
- `on`: `threads` (default) runs the job in a forked process whose workers are threads, so a kill ends all of them.
  `ray` runs the driver in a forked process and the workers in processes of a Ray cluster.
- `overrides`: settings that must change no bit.
- `begins`: iteration at which the run begins, on a copy of the undisturbed run without that iteration and all later
  stages. By default the run begins with an empty store.
- `kills`: for threads, one start of the job per entry `[moment, file]`: SIGKILL `before`, `during` (half of the file is
  written) or `after` the write of a file of the run. `{KEY N}` in the name of a file stands for shard N of the manifest
  KEY of the undisturbed run, `{KEY NAME}` for the bundle NAME. The last start, without a kill, is not in the list.
- `starts`: for Ray, one list of faults `[role, moment, at, count, signal]` per start of the job, as in `Fault` of
  tests/support/jobs.py. A start that kills the driver must end with SIGKILL, any other with success. If the last start
  kills the driver, another start without faults follows.
- `start_overrides`: settings of each start that must change no bit.
- `repeats`: smallest and largest number of works that may begin more than once.
- `retaken`: allowed numbers of updates that are computed again because the optimizer state is not stored.
- `commands`: `rheostat` commands about the run that must succeed at the end.
- `marks`: pytest marks besides `system`.
"""

import fcntl
import functools
import importlib
import re
import shutil
import signal
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import httpx
import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict

from rheostat.tasks.verification.invariants import verify_run
from tests.support import checker, jobs
from tests.support.in_process import InProcessJob
from tests.support.jobs import Fault, Job, leftovers_of, manifests_of, shards_of

TABLE = Path(__file__).parents[1] / "runs/runs.toml"
REFERENCE = "text"
"""Family whose undisturbed run is the fixture `reference` of tests/conftest.py."""
BUNDLES = ("policies", "states", "critics", "critic-states", "adapters")
"""Folders of a run with one directory per bundle."""
NUMBERED = re.compile(r"(?:^|-)(it|eval)-(\d{4})")


def _read_fault(role: str, moment: str, at: str, count: int = 1, name: str = "SIGKILL") -> Fault:
    number = getattr(signal, name, None) or getattr(jobs, name)
    return Fault(role, moment, at, count, int(number))


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Case(_Record):
    """One run that must end as the undisturbed run."""

    name: str
    on: Literal["threads", "ray"] = "threads"
    overrides: tuple[str, ...] = ()
    begins: int = 0
    kills: tuple[tuple[Literal["before", "during", "after"], str], ...] = ()
    starts: tuple[tuple[Annotated[Fault, BeforeValidator(lambda value: _read_fault(*value))], ...], ...] = ()
    start_overrides: tuple[tuple[str, ...], ...] = ()
    repeats: tuple[int, int] | None = None
    retaken: tuple[int, ...] | None = None
    commands: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


class Family(_Record):
    """A job, and the runs of the job that must be equal."""

    name: str
    like: str = ""
    overrides: tuple[str, ...] = ()
    undisturbed_overrides: tuple[str, ...] = ()
    chaos_overrides: tuple[str, ...] = ()
    build: str = ""
    on: Literal["threads", "ray"] = "threads"
    cases: tuple[Case, ...] = ()

    def settings(self, together: Path) -> tuple[str, ...]:
        """Return the overrides of the job with the path of the inputs."""
        shared = read_families()[self.like].settings(together) if self.like else ()
        inputs = str(self._place(together, "inputs"))
        own = (re.sub(r"\n\s*", " ", each) for each in self.overrides)  # TOML has no line breaks in inline tables
        return (*shared, *(each.replace("{inputs}", inputs) for each in own))

    def undisturbed(self, together: Path, api: str) -> InProcessJob:
        """Return the undisturbed run; the first caller of all test processes makes it."""
        job = InProcessJob(self._place(together, ""), api, counts_works=True)
        made = self._place(together, "made")
        with self._place(together, "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                self._make(job, together)
                _keep_artifacts(job)
                made.touch()
        return job

    def _make(self, job: InProcessJob, together: Path) -> None:
        if self.build:
            module, _, name = self.build.partition(":")
            inputs = self._place(together, "inputs")
            inputs.mkdir(exist_ok=True)
            getattr(importlib.import_module(module), name)(inputs)
        overrides = (*self.settings(together), *self.undisturbed_overrides)
        if self.on == "threads":
            job.train(*overrides)
        else:
            ended = Job(job.home, job.api, counts_works=True).train(*overrides)
            assert ended.code == 0, ended.output

    def _place(self, together: Path, part: str) -> Path:
        name = "reference" if self.name == REFERENCE else f"undisturbed-{self.name.replace(' ', '-')}"
        return together / "-".join(filter(None, (name, part)))


def _keep_artifacts(job: InProcessJob) -> None:
    """Write the Prefect artifacts of runs of this name to a file, because another test may delete the artifacts."""
    newest = {"artifacts": {"key": {"any_": ["tiny-summary", "tiny-rollouts"]}}, "sort": "CREATED_DESC"}
    found = httpx.post(f"{job.api}/artifacts/filter", json=newest, auth=jobs.PASSWORD, timeout=30).raise_for_status()
    (job.home / "artifacts.json").write_text(found.text)


@functools.cache
def read_families() -> dict[str, Family]:
    """Read the table, by the names of the families."""
    families = []
    for each in tomllib.loads(TABLE.read_text())["family"]:
        defaults = each.pop("defaults", {})
        families.append(Family(**each | {"cases": [defaults | case for case in each.get("cases", ())]}))
    return {family.name: family for family in families}


def read_cases() -> Iterator[pytest.param]:
    """Yield the cases of all families with their marks."""
    for family in read_families().values():
        for case in family.cases:
            marks = [getattr(pytest.mark, mark) for mark in case.marks]
            yield pytest.param(family, case, id=f"{family.name}: {case.name}", marks=marks)


def check_same_run(run: Path, undisturbed: Path) -> None:
    """Check that a run is complete, equal to the undisturbed run, and valid in two independent checks."""
    assert manifests_of(run) == manifests_of(undisturbed)
    assert shards_of(run) == shards_of(undisturbed)
    assert leftovers_of(run) == []
    assert checker.problems_of(run) == []
    assert verify_run(str(run.parent), run.name) == []


def copy_until(undisturbed: Path, run: Path, *, iteration: int) -> None:
    """Copy a run as it was before an iteration began: without later stages and the files that only these name."""
    shutil.copytree(undisturbed, run)
    for path in sorted(run.rglob("*")):
        numbered = NUMBERED.search(path.stem)
        if path.exists() and numbered and int(numbered[2]) >= iteration:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(run / "manifests/retention", ignore_errors=True)
    delete_unnamed(run)


def delete_unnamed(run: Path) -> None:
    """Delete the shards and bundles of a run that no manifest names."""
    named = "".join(path.read_text() for path in (run / "manifests").rglob("*.json"))
    for path in [*run.glob("shards/*/*"), *(path for folder in BUNDLES for path in run.glob(f"{folder}/*"))]:
        if path.relative_to(run).as_posix() not in named:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
