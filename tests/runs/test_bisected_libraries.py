"""Bisection of two runs that differ in the version of a library, with an interpreter that has the earlier version."""

import json
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.store.dependencies import dependency_records
from rheostat.infra.store.runs import open_run
from rheostat.tasks.forks.bisection import BisectRequest, plan_bisection
from tests.support.jobs import RHEOSTAT, Job

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

EARLIER = "3.0.0"
REWARD = f"""
from importlib.metadata import version

import jinja2


def score(prompt, completion, answer):
    return 0.0 if version("jinja2") == "{EARLIER}" else -2 * min(1.0, 0.01 * len(completion))
"""
SETTINGS = (
    *("update.learning_rate=3e-2", "data.options.heldout_problems=64", "warmup=", "report=false", "iterations=6"),
    *("evaluation.problems=64", "evaluation.every=0"),
    "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:length', options = {scale = 0.01}}, "
    "{kind = 'target', name = 'version', target = 'grading:score'}]",
)


def create_environment(folder: Path) -> Path:
    """Return the interpreter of an environment with the libraries of this one, except for an earlier Jinja2."""
    venv.create(folder, with_pip=False)
    [own] = folder.glob("lib/*/site-packages")
    here = Path(str(metadata.distribution("jinja2").locate_file("")))
    (own / "here.pth").write_text(f"import site; site.addsitedir({str(here)!r})")
    shutil.copytree(here / "jinja2", own / "jinja2")
    information = own / f"jinja2-{EARLIER}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Jinja2\nVersion: {EARLIER}\n")
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def job(tmp_path_factory, prefect_api) -> Job:
    """Job with the runs `good`, which was trained with an earlier version of a library, and `bad`."""
    home = tmp_path_factory.mktemp("libraries")
    job, python = Job(home, prefect_api), create_environment(home / "earlier")
    (home / "grading.py").write_text(REWARD)
    (home / "tiny.toml").write_text(job.document)
    for name, command in (("good", [str(python), "-P", "-m", "rheostat"]), ("bad", [RHEOSTAT])):
        words = [*command, "train", "tiny.toml", f"name={name}", *SETTINGS, "--store", str(job.store)]
        done = subprocess.run(words, cwd=home, env=job.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return job


def request(job, python=None):
    return BisectRequest(
        good="good",
        bad="bad",
        name="why",
        store=str(job.store),
        good_python=python,
        good_code=job.home,
        bad_code=job.home,
    )


def test_the_version_of_a_library_is_found_with_an_interpreter_that_has_the_earlier_one(job):
    python = job.home / "earlier" / "bin" / "python"
    words = [RHEOSTAT, "bisect", "good", "bad", "why", "--good-python", str(python), "--store", str(job.store)]
    done = subprocess.run([*words, "--json"], cwd=job.home, env=job.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result, change = json.loads(done.stdout), f"jinja2 {metadata.version('jinja2')} instead of {EARLIER}"
    assert [each["change"] for each in result["candidates"]] == [change] and result["untested"] == []
    assert result["conclusion"][1] == f"Cause: libraries: {change}."
    fork, judged = (open_run(str(job.store), f"why.{name}") for name in ("fork-1", "heldout.fork-1"))
    versions = [dependency_records(run)[-1].dependencies.libraries["jinja2"] for run in (fork, judged)]
    assert versions == [EARLIER, metadata.version("jinja2")], "the present interpreter evaluates"
    good, trained = (
        open_run(str(job.store), name).require("it-0006/update").bundles for name in ("good", "why.fork-1")
    )
    assert good == trained


def test_without_the_interpreter_the_versions_are_not_tested(job):
    plan, _ = plan_bisection(request(job))
    assert plan.candidates == () and plan.untested == (
        f"libraries: jinja2 {metadata.version('jinja2')} instead of {EARLIER} (--good-python tests this)",
    )


def test_an_interpreter_with_other_libraries_or_without_rheostat_is_refused(job, tmp_path):
    with pytest.raises(BadInput, match=rf"libraries of run 'good' .*: jinja2 must be {EARLIER}, but is 3"):
        plan_bisection(request(job, Path(sys.executable)))
    with pytest.raises(BadInput, match=r"--good-python: .*nowhere cannot be run"):
        plan_bisection(request(job, tmp_path / "nowhere"))
    (tmp_path / "python").write_text("#!/bin/sh\necho ModuleNotFoundError: rheostat >&2; exit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(BadInput, match=r"cannot import Rheostat \(ModuleNotFoundError: rheostat\)"):
        plan_bisection(request(job, tmp_path / "python"))
    with pytest.raises(BadInput, match="prints no versions, so it is not a Python interpreter"):
        plan_bisection(request(job, Path("/bin/true")))
