"""Final states and log lines in Prefect for runs that fail on bad input or are canceled.

Without these changes Prefect, whose version is pinned, would log a traceback for invalid user input, and would report a
cancellation as a crash. The replaced functions of Prefect's engines are not part of its public interface.
"""

import asyncio
import contextvars
import logging
import signal
import threading
from typing import Final

from prefect import flow_engine, task_engine
from prefect._internal.control_listener import get_intent
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, exception_to_crashed_state
from prefect.utilities import engine as engine_signals

from rheostat.infra.errors import BadInput

CANCELLED: Final = "Cancelled before its end."
_CRASHED: Final = f"Crash detected! {CANCELLED}"
_FINISHED: Final = "Finished in state Cancel"
_RAISE: Final = engine_signals._prefect_sigterm_handler
"""Prefect's own handler of SIGTERM, which raises an error at whatever point the process has reached."""

logger = logging.getLogger(__name__)


def install_state_handling() -> None:
    """Change Prefect in this process so that it reports cancellations as canceled instead of crashed, and bad user
    input without a traceback. Repeated calls have no effect."""
    for engine in (flow_engine, task_engine):
        engine.exception_to_crashed_state = _build_state  # type: ignore[attr-defined]
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine", "asyncio"):
        logging.getLogger(name).addFilter(_filter_record)
    _cancel_in_order()


def _cancel_in_order() -> None:
    """Make a cancellation by a Prefect worker, which sends SIGTERM, cancel the asyncio task of this process's flow,
    like Ctrl-C.

    Prefect's own handler raises an error in an arbitrary task, which causes tracebacks from all other tasks. If the
    SIGTERM was not sent by a worker's cancellation, Prefect's handler is used and marks the run as crashed.
    """
    is_prefects = signal.getsignal(signal.SIGTERM) is engine_signals._prefect_sigterm_handler is _RAISE
    if threading.current_thread() is not threading.main_thread() or not is_prefects:
        return
    task, loop, context = asyncio.current_task(), asyncio.get_running_loop(), contextvars.copy_context()
    assert task is not None

    def cancel() -> None:
        logger.info("The run was cancelled. A run of the same name and configuration continues it.")
        task.cancel()

    def on_sigterm(number: int, frame: object) -> None:
        if get_intent() != "cancel" or task.done():
            _RAISE(number, frame)
        loop.call_soon_threadsafe(cancel, context=context)

    engine_signals._prefect_sigterm_handler = on_sigterm  # type: ignore[assignment]
    signal.signal(signal.SIGTERM, on_sigterm)


async def _build_state(error: BaseException) -> State:
    if isinstance(error, asyncio.CancelledError):
        return Cancelled(message=CANCELLED)
    return await exception_to_crashed_state(error)


def _filter_record(record: logging.LogRecord) -> bool:
    """Logging filter that drops redundant error records of Prefect. Return whether to log a record. Records about a
    cancellation are kept, with level INFO instead of an error level.

    The traceback of a BadInput is left out, because the state that is logged next has its message. Errors after a
    worker's cancellation are left out, because they are consequences of it, such as errors of a stopping Ray cluster.
    """
    if record.exc_info and isinstance(record.exc_info[1], BadInput):
        return False
    message = record.getMessage()
    if message == _CRASHED or message.startswith(_FINISHED):
        record.msg, record.args = message.replace(_CRASHED, CANCELLED), ()
        record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
    return record.levelno < logging.ERROR or get_intent() != "cancel"
