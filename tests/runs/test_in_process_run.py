"""Runs whose workers are threads of this process; that they are the runs of Ray's processes, test_resume.py tells."""

from types import SimpleNamespace

import httpx
import pytest
from prefect import flow
from prefect.runtime import flow_run

import tasks.run.session
from flows.cli.train import run_flow
from infra.errors import BadInput
from infra.store.runs import open_run
from tasks.config.run import parse_config
from tasks.reporting import report_iteration, showing_progress
from tasks.run.pages import Pages
from tests.support.in_process import InProcessJob, copy_job
from tests.support.jobs import PASSWORD, leftovers_of, manifests_of

pytestmark = pytest.mark.timeout(1200)


def test_a_run_in_threads_leaves_no_temporary_file(reference):
    assert leftovers_of(reference.run) == []


@pytest.mark.system
def test_pages_are_not_renewed_for_every_iteration_and_show_the_last_one_of_a_run_that_fails(reference, prefect_api):
    run = open_run(str(reference.store), "tiny")
    settings = parse_config(
        {**run.record.config, "name": "tiny", "store": str(reference.store), "iterations": 3}, source="tiny"
    )
    session, ids = SimpleNamespace(run=run, settings=settings, pages=Pages()), []

    @flow
    async def failing():
        ids.append(str(flow_run.id))
        async with showing_progress(session):
            for number in (1, 2, 3):
                await report_iteration(session, number)
            raise BadInput("nothing goes on")

    with reference.prefect(), pytest.raises(BadInput, match="nothing goes on"):
        run_flow(failing())
    asked = {"artifacts": {"flow_run_id": {"any_": ids}, "key": {"any_": ["tiny-progress"]}}}
    found = httpx.post(f"{prefect_api}/artifacts/filter", json=asked, auth=PASSWORD).json()
    assert sorted(round(artifact["data"]) for artifact in found) == [33, 100]


@pytest.mark.system
def test_what_a_worker_refuses_ends_the_flow_and_the_next_in_this_process_is_none_the_worse(tmp_path, prefect_api):
    job = InProcessJob(tmp_path, prefect_api)
    unknown = "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:odd'}]"
    with pytest.raises(BadInput, match="odd"):
        job.train(unknown, "iterations=1", "name=refused")
    job.train("iterations=1")
    assert "it-0001/seal" in manifests_of(job.run)


def test_a_finished_run_that_is_given_again_has_no_worker_slot_and_stays_as_it_is(reference, tmp_path, monkeypatch):
    job = copy_job(reference, tmp_path / "job", counts_works=True)

    async def refuse(session):
        raise AssertionError("worker slots of a finished run")

    monkeypatch.setattr(tasks.run.session, "_open_fleet", refuse)
    job.train()
    assert {work.partition("(")[0] for work in job.works()} <= {"excerpts"}
    assert manifests_of(job.run) == manifests_of(reference.run)
