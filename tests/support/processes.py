"""Real processes for tests: quick to start, without the test process's threads and locks."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import contextmanager, suppress

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["infra.store.verify", "pytest"]
CONTEXT.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Make the process that others are forked from import these modules too, unless it has already started."""
    PRELOADED.extend(module for module in modules if module not in PRELOADED)


@contextmanager
def process(target: Callable[..., None], *arguments: object):
    """Run a module's function in a separate process, which is killed afterwards."""
    child = CONTEXT.Process(target=target, args=arguments)
    child.start()
    try:
        yield child
    finally:
        kill(child)


def kill(child) -> None:
    """Send SIGKILL, also to a stopped process, and wait until it is dead."""
    with suppress(ProcessLookupError):  # it may end by itself meanwhile
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
    child.join()
