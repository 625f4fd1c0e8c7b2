"""prefect.yaml deployed to a real Prefect server, and a real worker."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from rheostat.flows.cli.passwords import PROFILE
from tests.support.jobs import AUTH, PASSWORD, PATIENCE, ROOT, SEARCH_PATH, kill, list_running, process_tree, wait_for
from tests.support.processes import die_with_parent

PREFECT = str(Path(sys.executable).with_name("prefect"))
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass(frozen=True)
class Server:
    """A Prefect server to which prefect.yaml was deployed."""

    api: str
    environment: dict[str, str]

    def get(self, path: str):
        return httpx.get(f"{self.api}{path}", auth=PASSWORD, timeout=30).raise_for_status().json()

    def find(self, kind: str, **query: object):
        return httpx.post(f"{self.api}/{kind}/filter", json=query, auth=PASSWORD, timeout=30).raise_for_status().json()

    def deployment(self, name: str):
        return self.get(f"/deployments/name/{name}")

    def ask(self, name: str, parameters: dict[str, object]) -> httpx.Response:
        """Create a run of a deployment, as the UI's form does."""
        path = f"/deployments/{self.deployment(name)['id']}/create_flow_run"
        return httpx.post(f"{self.api}{path}", json={"parameters": parameters}, auth=PASSWORD, timeout=30)

    def trigger(self, name: str, parameters: dict[str, object]) -> str:
        asked = self.ask(name, parameters)
        assert asked.is_success, asked.text
        return asked.json()["id"]

    def resume(self, run: str, answer: dict[str, str]) -> None:
        """Submit the form of a suspended run, as the UI does."""
        asked = httpx.post(f"{self.api}/flow_runs/{run}/resume", json={"run_input": answer}, auth=PASSWORD, timeout=30)
        assert asked.raise_for_status().json()["status"] == "ACCEPT", asked.text

    def state(self, run: str) -> str:
        return self.get(f"/flow_runs/{run}")["state_name"]

    def prefect(self, *words: str) -> str:
        """Run a Prefect command in the root of the repository, and return its output."""
        command = [PREFECT, "--no-prompt", *words]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def cancel(self, run: str) -> None:
        state = {"type": "CANCELLING", "name": "Cancelling"}
        httpx.post(
            f"{self.api}/flow_runs/{run}/set_state", json={"state": state}, auth=PASSWORD, timeout=30
        ).raise_for_status()

    def ends(self, run: str) -> str:
        """Wait for a run's end, and return the name of its state, with its message if it did not complete."""
        ended = wait_for(lambda: self.get(f"/flow_runs/{run}")["state_type"] in ENDED, seconds=2 * PATIENCE, every=0.5)
        state = self.get(f"/flow_runs/{run}")["state"]
        assert ended, state
        return state["name"] if state["type"] != "FAILED" else f"{state['name']}: {state['message']}"

    def below(self, run: str) -> list[dict[str, object]]:
        """Return the sub-flow runs of a run, at every depth."""
        found = self.find("flow_runs", flow_runs={"parent_flow_run_id": {"any_": [run]}})
        return [*found, *(child for direct in found for child in self.below(direct["id"]))]

    def artifacts(self, run: str) -> dict[str, dict[str, object]]:
        """Return the newest artifact under each key of a run."""
        found = self.find(
            "artifacts", artifacts={"flow_run_id": {"any_": [run]}, "key": {"exists_": True}}, sort="ID_DESC"
        )
        return {a["key"]: a for a in sorted(found, key=lambda artifact: artifact["created"]) if a["key"]}


def serve_deployments(api: str, home: Path) -> Server:
    """Deploy prefect.yaml and create its work pool, as a user does after `rheostat server`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    told = "".join(f'{name} = "{value}"\n' for name, value in {"PREFECT_API_URL": api, **AUTH}.items())
    (home / "prefect").mkdir()
    (home / "prefect" / "profiles.toml").write_text(f"[profiles.{PROFILE}]\n{told}")  # as `rheostat server` does
    environment |= {"PREFECT_HOME": str(home / "prefect"), "PREFECT_PROFILE": PROFILE, "DO_NOT_TRACK": "1"}
    environment |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "PREFECT_WORKER_QUERY_SECONDS": "1"}
    environment |= {"RHEOSTAT_HOME": str(home), "PYTHONPATH": SEARCH_PATH}  # the tests' rewards are not installed
    server = Server(api, environment)
    pool = {"name": "rheostat", "type": "process"}
    httpx.post(f"{api}/work_pools/", json=pool, auth=PASSWORD, timeout=30).raise_for_status()
    server.prefect("deploy", "--all")
    return server


@contextmanager
def run_worker(server: Server, home: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a worker for the process pool. Its log contains the output of its runs."""
    with (home / "log").open("wb") as output:
        process = subprocess.Popen(
            [PREFECT, "worker", "start", "--pool", "rheostat"],
            cwd=home,
            env=server.environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        yield process
    finally:
        family = process_tree(process.pid) if process.poll() is None else []  # a test may have killed the worker
        process.send_signal(signal.SIGTERM)
        for member in family:
            if member.is_running():
                member.kill()
        kill(process)


def flows_below(worker: "subprocess.Popen[bytes]") -> list[str]:
    """Return the processes in which a worker currently runs flows."""
    return [line for line in list_running(psutil.Process(worker.pid).children()) if "prefect.engine" in line]


def process_of_flow(server: Server, worker: "subprocess.Popen[bytes]", name: str) -> psutil.Process:
    """Wait for the process in which a worker runs the flow run with this name, such as a controller."""
    found: list[psutil.Process] = []

    def has_started() -> bool:
        for process in psutil.Process(worker.pid).children():
            with suppress(psutil.Error):  # the process may have ended meanwhile
                run = process.environ().get("PREFECT__FLOW_RUN_ID")
                if run is not None and server.get(f"/flow_runs/{run}")["name"] == name:
                    found.append(process)
        return bool(found)

    assert wait_for(has_started, every=0.1), f"expected a process of the flow run {name!r}"
    return found[0]
