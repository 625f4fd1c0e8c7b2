"""Runs whose workers are threads of this process; that they are the runs of Ray's processes, test_resume.py tells."""

import shutil

import httpx
import pytest

import tasks.run.session
from infra.errors import BadInput
from tests.support.in_process import InProcessJob
from tests.support.jobs import PASSWORD, leftovers_of, manifests_of, wait_for

pytestmark = pytest.mark.timeout(1200)


def test_a_run_in_threads_leaves_no_temporary_file(reference):
    assert leftovers_of(reference.run) == []


@pytest.mark.system
def test_the_tasks_of_an_iteration_are_found_by_its_tag(reference, prefect_api):
    def names() -> set[str]:
        """Of the task runs with both tags, in any job of that name."""
        asked = {"task_runs": {"tags": {"all_": ["tiny", "it-0002"]}}}
        return {run["name"] for run in httpx.post(f"{prefect_api}/task_runs/filter", json=asked, auth=PASSWORD).json()}

    stages = {f"it-0002 {stage}" for stage in ("generate", "score", "credit", "update")}
    assert wait_for(lambda: names() >= {"place it-0002", "report it-0002", *stages}), names()
    assert all("it-0002" in name for name in names())


def test_what_a_worker_refuses_ends_the_flow_and_the_next_in_this_process_is_none_the_worse(tmp_path, prefect_api):
    job = InProcessJob(tmp_path, prefect_api)
    unknown = "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:odd'}]"
    with pytest.raises(BadInput, match="odd"):
        job.train(unknown, "iterations=1", "name=refused")
    job.train("iterations=1")
    assert "it-0001/seal" in manifests_of(job.run)


def test_a_finished_run_that_is_given_again_has_no_worker_slot_and_stays_as_it_is(
    reference, tmp_path, prefect_api, monkeypatch
):
    shutil.copytree(reference.run, tmp_path / "store" / "tiny")
    job = InProcessJob(tmp_path, prefect_api, counts_works=True)

    async def refuse(session):
        raise AssertionError("worker slots of a finished run")

    monkeypatch.setattr(tasks.run.session, "_open_fleet", refuse)
    job.train()
    assert {work.partition("(")[0] for work in job.works()} <= {"excerpts"}
    assert manifests_of(job.run) == manifests_of(reference.run)
