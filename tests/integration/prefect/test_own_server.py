"""The Prefect server that a job starts dies or is stopped. The flow of the test only waits."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.jobs import ROOT, SEARCH_PATH, list_running, wait_for

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, signal, sys
from rheostat.infra.errors import ApiFailed
from rheostat.flows.cli.prefect_api import prefect_api
from rheostat.flows.cli.prefect_api import run_flow
async def waits():
    print("runs", flush=True)
    await asyncio.sleep(600)
try:
    with prefect_api("prefect") as url:
        from prefect import flow
        run_flow(flow(waits)())
except ApiFailed as error:
    print(error, flush=True)
    sys.exit(1)
except KeyboardInterrupt as interrupt:
    print("interrupted", flush=True)
    sys.exit(128 + int(interrupt.args[0]))
"""


@pytest.mark.parametrize(
    ("fate", "interrupt", "code", "told"),
    [
        (signal.SIGKILL, None, 1, r"API failed.*Prefect server \(pid \d+\) has died"),
        (signal.SIGSTOP, None, 1, r"API failed.*Prefect server \(pid \d+\) is suspended"),
        (signal.SIGSTOP, signal.SIGINT, 130, "interrupted"),
        (signal.SIGSTOP, signal.SIGTERM, 143, "interrupted"),
    ],
)
def test_a_flow_ends_with_a_named_error_if_its_prefect_server_fails_and_still_obeys_signals(
    fate, interrupt, code, told, tmp_path
):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = kept | {"PREFECT_HOME": str(tmp_path), "PYTHONPATH": SEARCH_PATH}
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, stdout=output)
    try:
        assert wait_for(lambda: "runs" in (tmp_path / "output").read_text() or process.poll() is not None)
        (server,) = [
            child for child in psutil.Process(process.pid).children() if "rheostat.flows.cli.server" in child.cmdline()
        ]
        server.send_signal(fate)
        if interrupt is not None:
            process.send_signal(interrupt)
        assert process.wait() == code
        assert re.search(told, (tmp_path / "output").read_text())
        assert wait_for(lambda: not list_running([server]))
    finally:
        process.kill()
        process.wait()
