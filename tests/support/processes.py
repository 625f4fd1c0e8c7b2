"""Real processes for tests: quick to start, without the test process's threads and locks.

They end when the test process ends for any reason, also if it is interrupted or killed.
"""

import ctypes
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import signal
from collections.abc import Callable
from contextlib import contextmanager, suppress

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. For `preexec_fn` of subprocesses."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class EndingProcess(multiprocessing.context.ForkServerProcess):
    """Process that the fork server starts, and that ends with the test process.

    The fork server ends when no process has the end of a pipe that it watches. Python passes this end to each process
    that the fork server starts. Therefore a process would keep itself and the fork server running.
    """

    def run(self) -> None:
        """Run the target of the process."""
        server = multiprocessing.forkserver._forkserver
        if server._forkserver_alive_fd is not None:
            os.close(server._forkserver_alive_fd)
            server._forkserver_alive_fd = None
        die_with_parent()
        if os.getppid() == 1:  # the fork server ended before the call
            os._exit(1)
        super().run()


class EndingContext(multiprocessing.context.ForkServerContext):
    """Context whose processes end with the test process."""

    Process = EndingProcess


CONTEXT = EndingContext()
PRELOADED = ["rheostat.infra.store.verify", "pytest"]
CONTEXT.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Make the process that others are forked from import these modules too, unless it has already started."""
    PRELOADED.extend(module for module in modules if module not in PRELOADED)


def preload_no_training() -> None:
    """Keep libraries for training out of the fork server, which takes 9 CPU seconds to import them."""
    PRELOADED[:] = [module for module in PRELOADED if module.startswith(("rheostat.infra.", "pytest", "tests.unit."))]


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
