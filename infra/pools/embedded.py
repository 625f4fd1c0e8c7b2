"""Start of an embedded Ray cluster: a cluster of this machine only, which ends with this process.

Ray is imported only inside functions, because an embedded cluster needs its environment variables to be set before.
"""

import contextlib
import logging
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

from rheostat.infra.former_names import PACKAGE
from rheostat.infra.pools import forks
from rheostat.infra.pools.host import environment, thread_variables
from rheostat.infra.pools.placement_group import SLOT
from rheostat.infra.processes.guard import CLUSTER, GIVE_UP_SECONDS, start_guard
from rheostat.infra.processes.heap import heap_variables
from rheostat.infra.processes.watch import CHECK_SECONDS

if TYPE_CHECKING:
    from ray.job_config import JobConfig

OBJECT_STORE_BYTES = 100 * 2**20  # just above Ray's minimum of 75 MB, because calls pass only references
EMBEDDED_SLOTS = 2**20
RAY_TIMEOUT_SECONDS = 3600
UNUSED_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""Names of the ports of Ray's metrics and dashboard agents, which an embedded cluster does not run."""
QUIET = logging.ERROR

START_ENVIRONMENT = {
    **dict.fromkeys(
        (
            "RAY_gcs_rpc_server_connect_timeout_s",
            "RAY_py_gcs_connect_timeout_s",
            "RAY_raylet_start_wait_time_s",
            "RAY_worker_register_timeout_seconds",
        ),
        str(RAY_TIMEOUT_SECONDS),
    ),
    "RAY_agent_register_timeout_ms": str(1000 * RAY_TIMEOUT_SECONDS),
}
"""Environment variables that lengthen Ray's timeouts for starting processes, which are 5 to 60 s. On a busy machine a
start can take longer."""

EMBEDDED_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # With 0, a node uses the loopback address (github.com/ray-project/ray/issues/18730).
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray protects a started cluster with the token in ~/.ray, but does not look for it when it joins by address.
    "RAY_AUTH_MODE": "token",
    # Ray's handler of SIGTERM prints a stack and ends the driver immediately.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # Ray's memory monitor would kill our workers for memory that other programs use.
    "RAY_memory_monitor_refresh_ms": "0",
    **START_ENVIRONMENT,  # `start_seconds` and the watch over the servers replace these timeouts
    "RAY_gcs_server_port_wait_time_s": "60",  # kept short, because no other thread can run or end this wait
    "RAY_health_check_failure_threshold": "20",  # instead of 5: a raylet may get no CPU time for over a minute
}


@dataclass(frozen=True, slots=True)
class Preload:
    """Modules that an embedded cluster imports once for all workers, and the number of CPU threads per worker."""

    modules: tuple[str, ...]
    threads: int = 1


@contextlib.contextmanager
def start_embedded(directory: Path, namespace: str, *, preload: Preload | None, log_to_driver: bool) -> Iterator[str]:
    """Run the block with an embedded Ray cluster, and yield its address. Everything is removed even after a crash."""
    guard = start_guard(directory)
    forkserver = None
    try:
        with environment({**EMBEDDED_ENVIRONMENT, CLUSTER: str(directory)}):
            if preload is not None and sys.platform == "linux":
                variables = thread_variables(preload.threads, gpus=0, devices=()) | heap_variables()
                forkserver = forks.start_forkserver(
                    directory, preload.modules, packages=(PACKAGE,), variables=variables
                )
            import ray

            with _patient():
                ray.init(
                    address="local",
                    namespace=namespace,
                    num_cpus=0,
                    resources={SLOT: EMBEDDED_SLOTS},
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=log_to_driver,
                    logging_level=QUIET,
                    runtime_env={} if forkserver is None else {"py_executable": forks.worker_command(directory)},
                    job_config=build_job_config(),
                    _temp_dir=str(directory / "ray"),  # Ray opens it to all users; its parent is private
                )
        yield str(ray.get_runtime_context().gcs_address)
        ray.shutdown()
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.communicate(timeout=2 * GIVE_UP_SECONDS)  # also ends the fork server
            if forkserver is not None:
                forkserver.wait(GIVE_UP_SECONDS)


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Run the block with longer timeouts for the processes that Ray starts.

    By default `ray.init` gives up on a slow node after 30 s, and a raylet aborts if its agents have not written their
    ports to files within 15 s (github.com/ray-project/ray/issues/65983). Therefore the agent for runtime environments
    gets a fixed port, and the files of the other agents, which are not needed, are written in advance with port -1.
    """
    from ray._private import services
    from ray._raylet import persist_port  # type: ignore[attr-defined]  # which has no stubs

    get_node, start_raylet, deadline = services.get_node, services.start_raylet, time.monotonic() + RAY_TIMEOUT_SECONDS
    parameters = signature(start_raylet)

    def wait_for_node(gcs_address: str, node_id: str) -> object:
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:  # the node has not registered yet
                if time.monotonic() > deadline:
                    raise
            time.sleep(CHECK_SECONDS / 2)

    def start_without_waits(*positional: object, **named: object) -> object:
        arguments = parameters.bind(*positional, **named).arguments
        for port in UNUSED_PORTS:
            persist_port(arguments["session_dir"], arguments["node_id"], port, -1)
        return start_raylet(*positional, **{**named, "runtime_env_agent_port": _unused_port()})

    services.get_node, services.start_raylet = wait_for_node, start_without_waits
    try:
        yield
    finally:
        services.get_node, services.start_raylet = get_node, start_raylet


def _unused_port() -> int:
    """Return an unused port below the range from which operating systems choose random ports."""
    while True:
        port = secrets.choice(range(10_000, 32_768))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


class _Unextended(list[str]):
    def extend(self, more: Iterable[str]) -> None:
        """Ignore the paths that Ray adds, so that the workers' module path stays empty."""


def build_job_config() -> "JobConfig":
    """Return a Ray job configuration that keeps the working directory out of the workers' module path."""
    from ray.job_config import JobConfig

    config = JobConfig()
    config._py_driver_sys_path = _Unextended()
    return config
