"""Processes that tests start end when the test process is interrupted or killed."""

import signal
import subprocess
import sys
import textwrap

import pytest

from tests.support.jobs import ROOT, SEARCH_PATH, is_alive, wait_for
from tests.support.processes import die_with_parent

pytestmark = pytest.mark.system

PROGRAMS = {
    "a process of the fork server": """
        from tests.support.processes import process
        with process(time.sleep, 600) as child:
            print(child.pid, os.getpid(), flush=True)
            time.sleep(600)
        """,
    "a command of a job": """
        from pathlib import Path
        from tests.support import jobs
        program = Path(sys.argv[1]) / "rheostat"
        program.write_text("#!/bin/sh\\nexec sleep 600")
        program.chmod(0o700)
        jobs.RHEOSTAT = str(program)
        with jobs.Job(Path(sys.argv[1])).started() as command:
            print(command.pid, flush=True)
            time.sleep(600)
        """,
    "a server": """
        from pathlib import Path
        from tests.support.loopback import running
        with running(["sleep", "600"], Path(sys.argv[1]) / "log"):
            import psutil
            print(psutil.Process().children()[0].pid, flush=True)
            time.sleep(600)
        """,
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_test_has_started_ends_with_the_test_process(program, number, tmp_path, monkeypatch):
    script = tmp_path / "program.py"
    body = textwrap.indent(textwrap.dedent(PROGRAMS[program]), "    ")
    script.write_text(f"import os, sys, time\nif __name__ == '__main__':\n{body}")
    command = [sys.executable, str(script), str(tmp_path)]
    monkeypatch.setenv("PYTHONPATH", SEARCH_PATH)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, preexec_fn=die_with_parent) as tester:
        try:
            started = int(tester.stdout.readline().split()[0])
            assert is_alive(started)
            tester.send_signal(number)
            tester.wait()
        finally:
            tester.kill()
    assert wait_for(lambda: not is_alive(started))
