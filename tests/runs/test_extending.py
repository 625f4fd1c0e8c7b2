"""A whole run with an algorithm, a loss, an engine, data, a placement policy and a reward of the user."""

from pathlib import Path

import pytest

from rheostat.flows.cli.app import main
from tests.support.in_process import InProcessJob
from tests.support.jobs import Job, digest_of
from tests.support.pages import EXTENDING, files_of, write_page

pytestmark = [pytest.mark.timeout(1200), pytest.mark.system]

KEYS = ("policy/initial", "it-0001/update", "it-0002/update")


def learnt(run: Path) -> int:
    """Return the number of different policies that a run of two iterations trained."""
    return len({digest_of(run, key) for key in KEYS})


def test_the_job_of_the_extension_guide_trains(tmp_path, prefect_api, monkeypatch):
    write_page(EXTENDING, tmp_path)
    monkeypatch.chdir(tmp_path)  # where the modules are found, as by users
    job = InProcessJob(tmp_path, prefect_api)
    with job.prefect():
        train = ["train", "mine.toml", "--run", "tiny", "pools.cluster=threads"]
        assert main([*train, "--store", str(job.store)]) == 0
    assert learnt(job.run) == 3
    checked = job.command("verify")
    assert checked.code == 0, checked.output


@pytest.mark.slow
def test_the_job_of_the_extension_guide_trains_on_ray(tmp_path, prefect_api):
    write_page(EXTENDING, tmp_path)
    job = Job(tmp_path / "job", prefect_api, document=files_of(EXTENDING)["mine.toml"], path=tmp_path)
    ended = job.train("name=tiny")
    assert ended.code == 0, ended.output
    assert learnt(job.run) == 3
    checked = job.command("verify")
    assert checked.code == 0, checked.output
