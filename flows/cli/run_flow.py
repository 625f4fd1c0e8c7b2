"""A flow that a command runs to its end: what signals and a dead server do to it, and the error that is told.

One private of Prefect is replaced here, the other by flows/cli/server.py, as flows/cli/prefect_api.py says:
`prefect.utilities.engine._prefect_sigterm_handler`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

from flows.cli.prefect_api import own_server
from infra.errors import ApiFailed, first_cause
from infra.processes.watch import Ending, Watch, WatchedServer, on_signals

R = TypeVar("R")

CANCEL_SECONDS = 1.0


def run_flow(flow: "Coroutine[object, object, R]") -> R:
    """Run a flow to its end; of the errors that its controllers ended with together, raise the first of ours.

    SIGTERM cancels it as Ctrl-C does; it ends in a KeyboardInterrupt with the signal's number.
    """
    numbers: list[int] = []
    ending, serving = Ending(), own_server()

    def signalled(number: int) -> None:
        numbers.append(number)
        ending.begin(128 + number, "rheostat: interrupted; the same command continues")

    def failed(problem: str) -> None:
        ending.begin(1, f"rheostat: {_api_failed(problem)}")

    try:
        with on_signals(signalled):
            return asyncio.run(_cancellable(flow, serving, signalled=signalled, failed=failed))
    except BaseException as error:
        if numbers or isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(*(numbers[:1] or error.args)) from None
        named = _named(error, serving)
        if named is error:
            raise
        raise named from error
    finally:
        ending.over()


async def _cancellable(
    flow: "Coroutine[object, object, R]",
    serving: WatchedServer | None,
    *,
    signalled: Callable[[int], None],
    failed: Callable[[str], None],
) -> R:
    """Await a flow until SIGTERM or the failure of the job's own server cancels it."""
    from prefect.utilities import engine

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        if not task.done():
            task.cancel()
            if serving is not None and serving.problem is not None:  # flows tell their end to nobody, one by one
                loop.call_later(CANCEL_SECONDS, cancel)

    def interrupt(number: int, _: object) -> None:
        signalled(number)
        loop.call_soon_threadsafe(cancel)

    def end(problem: str) -> None:
        failed(problem)
        loop.call_soon_threadsafe(cancel)

    # Prefect's own raises wherever the process is at that moment, often inside a task that another waits for.
    engine._prefect_sigterm_handler = interrupt  # type: ignore[assignment]
    watch = Watch(lambda: [] if serving is None else [serving], end)
    try:
        return await flow
    finally:
        watch.stop()


def _named(error: BaseException, serving: WatchedServer | None) -> BaseException:
    """The error that a command tells: the API's where that has failed, else the first cause."""
    import httpx
    from prefect.exceptions import PrefectException

    if serving is not None and serving.failure() is not None:
        return _api_failed(str(serving.problem))
    leaf = first_cause(error)
    if isinstance(leaf, httpx.HTTPStatusError) and leaf.response.status_code == httpx.codes.UNAUTHORIZED:
        told = f"{leaf.request.url.copy_with(path='/api', query=None)} asks for a password"
        return ApiFailed(f"the Prefect API {told}: set PREFECT_API_AUTH_STRING=NAME:PASSWORD")
    if isinstance(leaf, PrefectException | httpx.HTTPError):
        return _api_failed(f"{type(leaf).__name__}: {leaf}")
    return leaf


def _api_failed(problem: str) -> ApiFailed:
    return ApiFailed(f"the Prefect API failed, the same command continues: {problem}")
