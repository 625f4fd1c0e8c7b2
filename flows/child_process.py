"""Child processes that use the same Prefect API, and can import other versions of the user's modules."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rheostat.infra import errors
from rheostat.infra.plugins import TARGETS, target_folders
from rheostat.infra.processes.watch import kill_and_wait

END_SECONDS: Final = 8.0
"""Seconds that a canceled child process has to stop before it is killed. Its results in the store are kept."""


def build_prefect_environment() -> dict[str, str]:
    """Return the environment variables with which a process uses the current Prefect API: its address and password, and
    whether it needs tokens against forged requests."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_CLIENT_CSRF_SUPPORT_ENABLED

    csrf = str(PREFECT_CLIENT_CSRF_SUPPORT_ENABLED.value()).lower()
    variables = {
        "PREFECT_API_URL": PREFECT_API_URL.value(),
        "PREFECT_API_AUTH_STRING": PREFECT_API_AUTH_STRING.value(),
        "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": csrf,
    }
    return {name: str(value) for name, value in variables.items() if value}


async def run_module(
    module: str, document: str, *, folder: Path, others: Sequence[Path], python: Path | None = None
) -> None:
    """Run `python -m MODULE PID` in a folder, with a document on its standard input, and wait for its end. PID is the
    id of this process. The child process exits when this process exits. `python` is the path of the Python interpreter.
    The default is the interpreter of this process.

    The user's modules are searched in `folder` first, and then in the folders `others`. Progress goes to the standard
    error output. Raises the error of Rheostat whose name and message the process has written to its standard output, or
    RunsFailed.
    """
    folders = dict.fromkeys([*target_folders()[1:], *map(str, others)])
    process = await asyncio.create_subprocess_exec(
        *(str(python or sys.executable), "-P", "-m", module, str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=folder,
        env={**os.environ, **build_prefect_environment(), TARGETS: os.pathsep.join(folders)},
        start_new_session=True,  # Ctrl-C reaches only this process, which stops the other one
    )
    try:
        output, _ = await process.communicate(document.encode())
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), END_SECONDS)
            except TimeoutError:
                await kill_and_wait(process)
    if process.returncode:
        kind, message = json.loads(output) if output else ("", f"a process ended with exit code {process.returncode}")
        raise vars(errors).get(kind, errors.RunsFailed)(message)
