"""Runs whose workers are threads of this process. test_resume.py compares them with runs on Ray."""

import tomllib
from types import SimpleNamespace

import httpx
import pytest
from prefect import flow
from prefect.runtime import flow_run

import rheostat.tasks.reporting
import rheostat.tasks.run.open_run
from rheostat.flows.cli.train import run_flow
from rheostat.infra.errors import BadInput
from rheostat.infra.store.runs import open_run
from rheostat.tasks.config.run import override_config, parse_config
from rheostat.tasks.reporting import keep_pages_updated, report_iteration
from rheostat.tasks.run.prefect_pages import PrefectPages
from rheostat.tasks.run.rescorings import Rescoring
from tests.support.in_process import InProcessJob, copy_job, run_command
from tests.support.jobs import PASSWORD, TINY, leftovers_of, manifests_of

pytestmark = pytest.mark.timeout(1200)


def test_a_run_in_threads_leaves_no_temporary_file(reference):
    assert leftovers_of(reference.run) == []


@pytest.mark.system
def test_progress_pages_are_throttled_but_show_the_last_iteration_of_a_failed_run(reference, prefect_api, monkeypatch):
    for limit in ("PAGES_SECONDS", "LAST_PAGE_SECONDS"):
        monkeypatch.setattr(rheostat.tasks.reporting, limit, 600.0)  # on a slow machine the three reports take longer
    run = open_run(str(reference.store), "tiny")
    settings = parse_config(
        {**run.record.config, "name": "tiny", "store": str(reference.store), "iterations": 3}, source="tiny"
    )
    opened, ids = SimpleNamespace(run=run, settings=settings, prefect_pages=PrefectPages()), []

    @flow
    async def failing():
        ids.append(str(flow_run.id))
        async with keep_pages_updated(opened):
            for number in (1, 2, 3):
                await report_iteration(opened, number)
            raise BadInput("nothing goes on")

    with reference.prefect(), pytest.raises(BadInput, match="nothing goes on"):
        run_flow(failing())
    asked = {"artifacts": {"flow_run_id": {"any_": ids}, "key": {"any_": ["tiny-progress"]}}}
    found = httpx.post(f"{prefect_api}/artifacts/filter", json=asked, auth=PASSWORD).json()
    assert sorted(round(artifact["data"]) for artifact in found) == [33, 100]


@pytest.mark.system
def test_a_flow_that_fails_does_not_affect_the_next_flow_of_the_process(tmp_path, prefect_api):
    job = InProcessJob(tmp_path, prefect_api)
    unknown = "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:odd'}]"
    with pytest.raises(BadInput, match="odd"):
        job.train(unknown, "iterations=1", "name=refused")
    job.train("iterations=1")
    assert "it-0001/seal" in manifests_of(job.run)


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("rollout.sampling.max_new_tokens=4000", "so no prompt fits"),
        ("scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:missing'}]", "missing"),
    ],
)
def test_a_flow_called_from_python_refuses_invalid_inputs_before_anything_is_written(
    tmp_path, prefect_api, override, fault
):
    job = InProcessJob(tmp_path, prefect_api)
    with pytest.raises(BadInput, match=fault):
        job.train(override)
    assert not job.run.exists()


def test_a_rescoring_called_from_python_refuses_invalid_rewards_before_anything_is_written(reference, tmp_path):
    from rheostat.flows.rescoring import rescore

    job = copy_job(reference, tmp_path / "job")
    reward = "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:missing'}]"
    config = override_config(
        tomllib.loads(TINY), [reward, f"store={job.store}", "pools.cluster=threads"], source="tiny"
    )
    with job.prefect(), pytest.raises(BadInput, match="missing"):
        run_flow(rescore(Rescoring(config=config, name="new", iterations=(1,))))
    assert manifests_of(job.run) == manifests_of(reference.run)


def test_resuming_a_finished_run_reserves_no_workers_and_changes_nothing(reference, tmp_path, monkeypatch):
    job = copy_job(reference, tmp_path / "job", counts_works=True)

    async def refuse(*arguments):
        raise AssertionError("worker slots of a finished run")

    monkeypatch.setattr(rheostat.tasks.run.open_run, "open_worker_slots", refuse)
    job.train()
    assert {work.partition("(")[0] for work in job.works()} <= {"excerpts"}
    assert manifests_of(job.run) == manifests_of(reference.run)


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_fewer_iterations_than_a_run_has_are_refused_and_the_run_is_unchanged(reference, tmp_path, arguments):
    job = copy_job(reference, tmp_path / "job")
    (job.home / "tiny.toml").write_text(TINY)
    settings = (f"store={job.store}", "pools.cluster=threads", "iterations=1")
    with job.prefect():
        ended = run_command("train", str(job.home / "tiny.toml"), *settings, *arguments)
    assert ended.code == 2
    assert "iterations is 1, but run 'tiny'" in ended.output
    assert "already has 3 iterations. Set iterations to 3 or more" in ended.output
    assert manifests_of(job.run) == manifests_of(reference.run)
