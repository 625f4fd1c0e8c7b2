"""States and log lines that Prefect shows for runs that are cancelled or fail."""

import asyncio
import logging
import re

import pytest
from prefect import flow, task
from prefect._internal import control_listener
from prefect.client.orchestration import get_client

from rheostat.flows.prefect_states import CANCELLED, install_state_handling
from rheostat.infra.errors import BadInput
from tests.support.in_process import prefect_at

SLIP = "rollout.prompts 0: expected at least 1"


class LineHandler(logging.Handler):
    """Logging handler that keeps the level and text of every record."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, self.format(record)))


@pytest.fixture
def log_lines():
    """Levels and lines that are logged for flow and task runs, including tracebacks."""
    install_state_handling()
    handler, loggers = LineHandler(), [logging.getLogger(f"prefect.{kind}_runs") for kind in ("flow", "task")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler.lines
    for logger in loggers:
        logger.removeHandler(handler)


async def test_a_cancelled_run_is_shown_as_cancelled_and_not_as_crashed(prefect_api, log_lines):
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
    finished = [line for _, line in log_lines if line.startswith("Finished")]
    assert finished == [f"Finished in state Cancelled({CANCELLED!r})"] * 2, "of the task and of its flow"
    assert [line for level, line in log_lines if level not in ("INFO", "DEBUG")] == []
    assert not [line for _, line in log_lines if re.search("[Cc]rash", line)]


@pytest.mark.parametrize("name", ["prefect.flow_runs", "prefect.engine", "asyncio"])
def test_errors_that_follow_from_a_workers_cancellation_are_not_logged(name, log_lines, monkeypatch, caplog):
    logging.getLogger(name).error("the cluster has ended")
    monkeypatch.setattr(control_listener, "_intent", "cancel")
    logging.getLogger(name).error("the cluster has ended")
    logging.getLogger(name).warning("the store is slow")
    lines = [line for _, line in log_lines] if name == "prefect.flow_runs" else caplog.messages
    assert lines == ["the cluster has ended", "the store is slow"]


async def test_bad_input_is_logged_in_one_line_and_other_errors_with_a_traceback(prefect_api, log_lines):
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
        slip = [line for level, line in log_lines if level == "ERROR"]
        assert slip == [
            f"Finished in state Failed('Task run encountered an exception BadInput: {SLIP}')",
            f"Finished in state Failed('Flow run encountered an exception: BadInput: {SLIP}')",
        ]
        with pytest.raises(RuntimeError):
            await pipeline("a bug")
    assert any("Traceback" in line and "a bug" in line for _, line in log_lines)
