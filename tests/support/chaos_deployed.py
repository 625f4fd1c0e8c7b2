"""Kills of a run whose controllers are deployments of a real Prefect server: `make chaos ARGS='--family deployed'`."""

import random
import subprocess
import time
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from rheostat.tasks.config.documents import apply_overrides
from rheostat.tasks.config.run import RunConfig
from tests.support.chaos_families import SHARES, SMALL, Plan, problems_of_run, run_chain, undisturbed_run
from tests.support.deployments import ENDED, Server, flows_below, process_of_flow, run_worker, serve_deployments
from tests.support.jobs import PATIENCE, TINY, prefect_server, wait_for
from tests.support.whole_runs import read_families

VICTIMS = ("rollout 0", "scoring 0", "update", "tiny", "worker", "server")
"""Names of the flow runs whose process is killed (`tiny` is the driver), or the worker or the server of Prefect."""
MOMENTS = ("it-0001/plan", "it-0001/credit", "it-0002/plan", "it-0002/credit")
"""Manifests after whose commit a process is killed."""


@dataclass
class Site:
    """Prefect server with deployments, and a worker. Both can be killed and started again."""

    home: Path
    server: Server = field(init=False)
    worker: "subprocess.Popen[bytes]" = field(init=False)
    _server: ExitStack = field(default_factory=ExitStack)
    _worker: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Start both, and deploy prefect.yaml."""
        for name in ("server", "deployed", "worker"):
            (self.home / name).mkdir(parents=True)
        api = self._server.enter_context(prefect_server(self.home / "server", keeps_tasks=False))
        self.server = serve_deployments(api, self.home / "deployed")
        self._start_worker()

    def _start_worker(self) -> None:
        self.worker = self._worker.enter_context(run_worker(self.server, self.home / "worker"))

    def restart_server(self) -> None:
        """Kill the server, and start another one with its database and its address."""
        self._server.close()
        port = urlsplit(self.server.api).port
        assert port is not None
        self._server.enter_context(prefect_server(self.home / "server", keeps_tasks=False, port=port))

    def restart_worker(self) -> None:
        """Kill the worker without its flow runs, and start another one."""
        self.worker.kill()
        self.worker.wait()
        self._start_worker()

    def close(self) -> None:
        """End both, and the flow runs whose worker was killed."""
        for process in self.flow_processes():
            with suppress(psutil.Error):
                process.kill()
        self._worker.close()
        self._server.close()

    def flow_processes(self) -> list[psutil.Process]:
        """Return the processes of flow runs, also of those whose worker was killed."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                variables = process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
                if "PREFECT__FLOW_RUN_ID" in variables and variables.get("RHEOSTAT_HOME") == str(
                    self.home / "deployed"
                ):
                    found.append(process)
        return found


def plan_deployed(home: Path, api: str, seeds: Sequence[int], stack: ExitStack) -> Plan:
    """Kill a controller, the driver, the worker or the Prefect server of a deployed run after random commits."""
    whole = undisturbed_run(SMALL, home, api)
    document = apply_overrides(tomllib.loads(TINY), read_families()[SMALL].settings(home), RunConfig)
    site = Site(home / "site")
    stack.callback(site.close)
    site.start()

    def find(faults: Sequence[tuple[str, str]], place: Path) -> list[str]:
        store = place / "store"
        parameters = {"config": {**document, "store": str(store), "controllers": {"where": "deployment", "count": 1}}}

        def start(fault: tuple[str, str] | None) -> tuple[int, str]:
            run = site.server.trigger("train/train", parameters)
            wait_for(lambda: _has_begun(site, run), seconds=PATIENCE, every=0.5)  # a new worker takes a while
            if fault is not None:
                victim, moment = fault
                reached = store / f"tiny/manifests/{moment}.json"
                wait_for(lambda: reached.exists() or _has_ended(site, run), every=0.1)
                if _has_ended(site, run):
                    return _end_of(site, run)
                _kill(site, victim)
            wait_for(lambda: _has_ended(site, run) or not site.flow_processes(), seconds=PATIENCE, every=0.5)
            wait_for(lambda: _has_ended(site, run), seconds=5, every=0.5)
            wait_for(lambda: not flows_below(site.worker), seconds=60, every=0.5)
            return _end_of(site, run)

        place.mkdir()
        found = run_chain(faults, start, place=place, ends=_is_documented_end)
        return found or problems_of_run(store / "tiny", whole)

    return Plan({seed: schedule_victims(seed) for seed in seeds}, find)


def schedule_victims(seed: int) -> list[tuple[str, str]]:
    """Return random victims with the moments of their kills. The first victims of six consecutive seeds are all
    different."""
    choose, first = random.Random(seed), VICTIMS[seed % len(VICTIMS)]
    others = [victim for victim in VICTIMS if victim != first]
    victims = [first, *choose.sample(others, choose.choices((0, 1, 2), SHARES)[0])]
    return list(zip(victims, sorted(choose.choices(MOMENTS, k=len(victims))), strict=True))


def _is_documented_end(fault: tuple[str, str], code: int, output: str) -> bool:
    """Return whether a run may end in this state. A killed controller has a successor, so the run completes.

    Nobody reports the end of a run to a server that is not there, so the state may still be Running.
    """
    states = {"tiny": ("Crashed",), "worker": ("Crashed", "Failed"), "server": ("Crashed", "Failed", "Running")}
    return output.startswith(states.get(fault[0], ()))


def _kill(site: Site, victim: str) -> None:
    if victim == "server":
        site.restart_server()
    elif victim == "worker":
        site.restart_worker()
    else:
        process_of_flow(site.server, site.worker, victim).kill()


def _has_begun(site: Site, run: str) -> bool:
    return site.server.get(f"/flow_runs/{run}")["state_type"] not in {"SCHEDULED", "PENDING"}


def _has_ended(site: Site, run: str) -> bool:
    return site.server.get(f"/flow_runs/{run}")["state_type"] in ENDED


def _end_of(site: Site, run: str) -> tuple[int, str]:
    """Return 0 if a flow run has completed, otherwise 1, and the name and the message of its state."""
    time.sleep(0.5)
    state = site.server.get(f"/flow_runs/{run}")["state"]
    return int(state["type"] != "COMPLETED"), f"{state['name']}: {state['message']}"
