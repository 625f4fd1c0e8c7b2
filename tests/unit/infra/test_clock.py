"""The timer of calls, which counts the work of a whole family of processes."""

import subprocess
import sys
import time

import psutil

from rheostat.infra.processes.clock import CallClock, process_tree

TREE = """
import subprocess, sys, threading
from time import sleep
start = lambda *command: subprocess.Popen(command)
thread = threading.Thread(target=lambda: (start("sleep", "60"), sleep(60)), daemon=True)
thread.start()
start("sh", "-c", "sleep 60 & wait")
print("ready", flush=True)
sleep(60)
"""


def test_the_family_of_a_process_contains_all_descendants_also_those_of_its_threads():
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            deadline = time.monotonic() + 60
            known = psutil.Process(process.pid)
            while len(found := [child.pid for child in known.children(recursive=True)]) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert sorted(process_tree(process.pid)) == sorted([process.pid, *found])
        finally:
            for each in (*known.children(recursive=True), known):
                each.kill()
    assert list(process_tree(process.pid)) == [process.pid]


def test_a_long_call_is_polled_less_often_than_a_short_call_but_at_least_every_second():
    assert [CallClock(1, seconds).slice for seconds in (0.5, 5, 20, 600)] == [0.05, 0.05, 0.2, 1.0]
