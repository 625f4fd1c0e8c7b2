"""What Prefect shows of runs that do not end well, and how it calls them."""

import asyncio
import logging
import re

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client

from flows.endings import CANCELLED, tell_endings
from infra.errors import BadInput
from tests.integration.prefect.test_prefect_server import server, tiny, worker  # noqa: F401
from tests.support.in_process import prefect_at

SLIP = "rollout.prompts 0: expected at least 1"


class Kept(logging.Handler):
    """Lines that Prefect shows of flows and tasks, each with its level."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, self.format(record)))


@pytest.fixture
def told():
    """What is logged of flow and task runs, tracebacks included, by this process, which tells endings."""
    tell_endings()
    handler, loggers = Kept(), [logging.getLogger(f"prefect.{kind}_runs") for kind in ("flow", "task")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler.lines
    for logger in loggers:
        logger.removeHandler(handler)


async def test_what_was_cancelled_reads_so_and_not_as_a_crash(prefect_api, told):
    begun, ids = asyncio.Event(), []

    @task
    async def waits():
        begun.set()
        await asyncio.Event().wait()

    @flow
    async def pipeline():
        from prefect.runtime import flow_run

        ids.append(flow_run.id)
        await waits()

    with prefect_at(prefect_api):
        running = asyncio.ensure_future(pipeline())
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        async with get_client() as client:
            state = (await client.read_flow_run(ids[0])).state
    assert (state.name, state.message) == ("Cancelled", CANCELLED)
    finished = [line for _, line in told if line.startswith("Finished")]
    assert finished == [f"Finished in state Cancelled({CANCELLED!r})"] * 2, "of the task and of its flow"
    assert [line for level, line in told if level not in ("INFO", "DEBUG")] == []
    assert not [line for _, line in told if re.search("[Cc]rash", line)]


async def test_what_a_user_wrote_wrong_is_told_in_one_line_and_other_errors_with_their_traceback(prefect_api, told):
    @task
    async def reads():
        raise BadInput(SLIP)

    @flow
    async def pipeline(error: str):
        if error:
            raise RuntimeError(error)
        await reads()

    with prefect_at(prefect_api):
        with pytest.raises(BadInput):
            await pipeline("")
        slip = [line for level, line in told if level == "ERROR"]
        assert slip == [
            f"Finished in state Failed('Task run encountered an exception BadInput: {SLIP}')",
            f"Finished in state Failed('Flow run encountered an exception: BadInput: {SLIP}')",
        ]
        with pytest.raises(RuntimeError):
            await pipeline("a bug")
    assert any("Traceback" in line and "a bug" in line for _, line in told)


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_deployed_run_bears_its_name_and_a_retrain_its_day_and_a_slip_is_their_last_line(server, worker, tmp_path):  # noqa: F811
    nowhere = {"policy": {"kind": "directory", "path": "/nowhere"}}
    asked = {
        "tiny": server.trigger("train/train", tiny(tmp_path, **nowhere)),
        "tiny-20261102": server.trigger("retrain/weekly", {**tiny(tmp_path, **nowhere), "day": "2026-11-02"}),
    }
    for name, run in asked.items():
        slip = "BadInput: policy /nowhere: no such directory"
        assert server.ends(run).startswith(f"Failed: Flow run encountered an exception: {slip}")
        assert server.get(f"/flow_runs/{run}")["name"] == name
        logs = [entry["message"] for entry in server.find("logs", logs={"flow_run_id": {"any_": [run]}}, limit=200)]
        assert slip in logs[-1] and not [line for line in logs if "Traceback" in line]
    assert not (tmp_path / "tiny").exists()
