"""Final states and log lines in Prefect for runs that fail on bad input or are canceled.

Without these changes Prefect, whose version is pinned, would log a traceback for invalid user input, and would report a
cancellation as a crash. The replaced functions of Prefect's engines are not part of its public interface.
"""

import asyncio
import logging
from typing import Final

from prefect import flow_engine, task_engine
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, exception_to_crashed_state

from infra.errors import BadInput

CANCELLED: Final = "Cancelled before its end."
_CRASHED: Final = f"Crash detected! {CANCELLED}"
_FINISHED: Final = "Finished in state Cancel"


def install_state_handling() -> None:
    """Install the handling of cancellations and bad input in this process. Repeated calls have no effect."""
    for engine in (flow_engine, task_engine):
        engine.exception_to_crashed_state = _build_state  # type: ignore[attr-defined]
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_filter_record)


async def _build_state(error: BaseException) -> State:
    if isinstance(error, asyncio.CancelledError):
        return Cancelled(message=CANCELLED)
    return await exception_to_crashed_state(error)


def _filter_record(record: logging.LogRecord) -> bool:
    """Return whether to log a record. Drop tracebacks of BadInput, which the flow's state reports, and log
    cancellations as info."""
    if record.exc_info and isinstance(record.exc_info[1], BadInput):
        return False
    message = record.getMessage()
    if message == _CRASHED or message.startswith(_FINISHED):
        record.msg, record.args = message.replace(_CRASHED, CANCELLED), ()
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    return True
