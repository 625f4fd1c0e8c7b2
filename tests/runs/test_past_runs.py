"""Runs of past versions are verified, shown, reported, copied, recredited and continued by the current code."""

import re
import shutil
import tomllib

import pytest

from rheostat.flows.cli.train import run_flow
from rheostat.flows.train import train
from rheostat.tasks.config.run import override_config
from rheostat.tasks.forks.creation import create_fork, request_fork
from rheostat.tasks.verification.invariants import verify_run
from tests.support.in_process import prefect_at, run_command
from tests.support.jobs import manifests_of
from tests.support.past_runs import JOB, NAME, past_versions, unpack_run

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=past_versions())
def past(request, tmp_path_factory):
    """Store with a run of a past version. Tests must not change the run."""
    return unpack_run(request.param, tmp_path_factory.mktemp("past"))


@pytest.fixture
def own(past, tmp_path):
    """A copy of the store, which a test may change."""
    return shutil.copytree(past, tmp_path / "own")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("verify",), "every digest and every invariant holds"),
        (("show",), r"(?s)accuracy.*\n1 +0\.\d"),
        (("rollouts",), "iteration 1, prompt [0-9a-f]{16}, sample 0, reward [01]"),
        (("report", "--to", "{home}/report.html"), "one self-contained file"),
        (("export",), r"it-0001\.parquet"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_commands_read_a_run_of_a_past_version(own, tmp_path, command, expected):
    name, *options = (word.format(home=tmp_path) for word in command)
    ended = run_command(name, NAME, *options, "--store", str(own))
    assert ended.code == 0 and re.search(expected, ended.output), ended.output


def test_a_copy_of_a_run_of_a_past_version_is_verified(past, tmp_path):
    assert run_command("copy", NAME, str(past), str(tmp_path / "copy")).code == 0
    assert manifests_of(tmp_path / "copy" / NAME) == manifests_of(past / NAME)


def test_a_run_of_a_past_version_is_forked_without_changed_settings(own):
    planned = request_fork(str(own), f"{NAME}@1", "fork", overrides=["iterations=2"])
    assert planned.plan.changes == ""
    create_fork(planned)
    assert verify_run(str(own), "fork") == []
    assert request_fork(str(own), f"{NAME}@1", "fork", overrides=["iterations=2"]).plan.exists


@pytest.mark.system
def test_a_run_of_a_past_version_is_recredited(own, prefect_api):
    with prefect_at(prefect_api):
        ended = run_command("recredit", NAME, "--algorithm", "rloo", "--as", "again", "--store", str(own))
    assert ended.code == 0 and re.search(r"\n1 +8 ", ended.output), ended.output


@pytest.mark.smoke
@pytest.mark.system
def test_a_run_of_a_past_version_is_continued_by_the_unchanged_job(own, prefect_api):
    config = override_config(tomllib.loads(JOB), [f"store={own}", "iterations=2", "report=false"], source="job.toml")
    before = manifests_of(own / NAME)
    with prefect_at(prefect_api):
        run_flow(train(config, accept_change=True))  # the code is another
    after = manifests_of(own / NAME)
    assert "it-0002/seal" in after and {key: after[key] for key in before} == before
    assert run_command("verify", NAME, "--store", str(own)).code == 0


@pytest.mark.parametrize("override", ["update.epochs=2", 'scoring.rewards=[{kind="regex",pattern="[a-z]",scale=2}]'])
def test_another_value_of_a_key_newer_than_the_run_is_refused(past, tmp_path, override):
    (tmp_path / "job.toml").write_text(JOB)
    ended = run_command("train", str(tmp_path / "job.toml"), override, "--store", str(past))
    assert ended.code == 2 and f"{override.partition('=')[0]} was" in ended.output, ended.output
