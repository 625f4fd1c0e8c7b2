"""How Prefect tells of what does not end well: what a user wrote wrong in one line, what was cancelled as cancelled.

Prefect, which is pinned exactly, would log a traceback of the one, and call the other a crash. What is replaced here of
its engines is not part of its interface.
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


def tell_endings() -> None:
    """Have this process's flows and tasks end so; done again it changes nothing."""
    for engine in (flow_engine, task_engine):
        engine.exception_to_crashed_state = _ended  # type: ignore[attr-defined]
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_told)


async def _ended(error: BaseException) -> State:
    if isinstance(error, asyncio.CancelledError):
        return Cancelled(message=CANCELLED)
    return await exception_to_crashed_state(error)


def _told(record: logging.LogRecord) -> bool:
    """Leave out the traceback of a BadInput, which the state that is told next names; a cancellation is no error."""
    if record.exc_info and isinstance(record.exc_info[1], BadInput):
        return False
    message = record.getMessage()
    if message == _CRASHED or message.startswith(_FINISHED):
        record.msg, record.args = message.replace(_CRASHED, CANCELLED), ()
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    return True
