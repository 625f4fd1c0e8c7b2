"""Entrypoints of existing deployments, which name flows as they were called before the package rheostat."""

import os
import subprocess
import sys
from pathlib import Path

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
HOOKS = """
import asyncio, os, sys
from pathlib import Path
from uuid import uuid4
import prefect.runner._workspace_runtime_bootstrap as bootstrap
from prefect.client.schemas.objects import FlowRun
from prefect.plugins import load_prefect_collections
from prefect.runner._workspace_runtime import PreparedWorkspaceManifest, write_private_model
from prefect.states import Cancelling

load_prefect_collections()
from prefect.runner._workspace_hook_runner import WorkspaceHookRunner

path = Path("workspace.json").absolute()
command = [sys.executable, "-P", bootstrap.__file__, "hook"]
manifest = PreparedWorkspaceManifest(
    working_directory=Path.cwd(), runtime_entrypoint=sys.argv[1], hook_command=command, environment=dict(os.environ)
)
write_private_model(path, manifest)
hooks = WorkspaceHookRunner(manifest_path=path, stream_output=True)
asyncio.run(hooks.run_cancellation_hooks(FlowRun(id=uuid4(), flow_id=uuid4()), Cancelling()))
"""


def run_code(code: str, *arguments: str, merged: bool = False, folder: Path | None = None, **variables: str) -> str:
    """Run a program in a process as a Prefect worker starts it. Return its output, with its messages if `merged`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [sys.executable, "-P", "-c", code, *arguments]
    output = subprocess.STDOUT if merged else None
    done = subprocess.run(
        command, env=kept | variables, stdout=subprocess.PIPE, stderr=output, text=True, check=True, cwd=folder
    )
    return done.stdout


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


@pytest.mark.thorough
def test_a_worker_runs_the_hooks_of_a_cancelled_flow_run_of_a_former_entrypoint_without_an_error(tmp_path):
    shown = run_code(HOOKS, "flows.train.train", merged=True, folder=tmp_path, PREFECT_HOME=str(tmp_path))
    assert "Traceback" not in shown and "Runner failed" not in shown, shown
