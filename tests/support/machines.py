"""Machines of a Ray cluster that join and are lost: raylets of this machine in `python -m tests.support.machines`."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from rheostat.infra.pools.embedded import START_ENVIRONMENT


@dataclass(frozen=True)
class Machines:
    """Cluster whose first machine, that of the driver, has no CPUs to reserve."""

    keeper: "subprocess.Popen[str]"
    address: str

    def join(self, cpus: int, *, gpus: int = 0) -> int:
        """Add a machine, whose GPUs need not exist, and return the pid of its raylet, which a kill removes."""
        self.keeper.stdin.write(f"{cpus} {gpus}\n")
        self.keeper.stdin.flush()
        return int(read_value(self.keeper.stdout))


@contextmanager
def machines(environment: Mapping[str, str]) -> Iterator[Machines]:
    """Start a cluster of one machine. Its processes and those of machines that join have this environment."""
    command = [sys.executable, "-m", "tests.support.machines"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**environment, **START_ENVIRONMENT}
    ) as keeper:
        try:
            yield Machines(keeper, read_value(keeper.stdout))
        finally:
            keeper.stdin.close()
            keeper.wait()


def lose_machine(raylet: int) -> None:
    """Kill a raylet and all its descendants. If this process is one of them, kill it last."""
    root = psutil.Process(raylet)
    for process in (root, *sorted(root.children(recursive=True), key=lambda child: child.pid == psutil.Process().pid)):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def print_value(what: object) -> None:
    """Print a value on a separate line between those of Ray."""
    sys.stdout.write(f"told {what}\n")
    sys.stdout.flush()


def read_value(output: Iterable[str]) -> str:
    """Read the next value that was printed."""
    for line in output:
        if line.startswith("told "):
            return line.removeprefix("told ").strip()
    raise AssertionError("ended without a word")


def _keep() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    print_value(cluster.address)
    for line in sys.stdin:
        cpus, gpus = map(int, line.split())
        node = cluster.add_node(num_cpus=cpus, num_gpus=gpus)
        print_value(node.all_processes["raylet"][0].process.pid)
    cluster.shutdown()


if __name__ == "__main__":
    _keep()
