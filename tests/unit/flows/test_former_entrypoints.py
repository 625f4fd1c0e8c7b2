"""Entrypoints of existing deployments, which name flows as they were called before the package rheostat."""

import os
import subprocess
import sys

import pytest

WORKER = """
import os
from prefect.plugins import load_prefect_collections
assert load_prefect_collections()["rheostat"].__name__ == "rheostat.flows.former_entrypoints"
print(os.environ["PREFECT_PLUGINS_ENABLED"])
"""
FLOW_RUN = """
import sys
from prefect.flows import load_flow_from_entrypoint
flow = load_flow_from_entrypoint(sys.argv[1], use_placeholder_flow=False)
print(flow.name, flow.fn.__module__)
"""


def run_code(code: str, *arguments: str, **variables: str) -> str:
    """Run a program in a process as a Prefect worker starts it. Return its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, env=kept | variables, stdout=subprocess.PIPE, text=True, check=True).stdout


@pytest.mark.thorough
def test_a_worker_switches_on_plugins_for_its_flow_runs():
    assert run_code(WORKER) == "true\n"
    assert run_code(WORKER, PREFECT_PLUGINS_ENABLED="false") == "false\n"


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("entrypoint", "flow"),
    [
        ("flows.train.train", "train rheostat.flows.train"),
        ("flows.retrain.retrain", "retrain rheostat.flows.retrain"),
        ("rheostat.flows.update.update", "update rheostat.flows.update"),
    ],
)
def test_a_flow_run_finds_its_flow_by_the_former_and_the_present_entrypoint(entrypoint, flow, tmp_path):
    shown = run_code(FLOW_RUN, entrypoint, PREFECT_PLUGINS_ENABLED="true", PREFECT_HOME=str(tmp_path))
    assert shown.splitlines()[-1] == flow
