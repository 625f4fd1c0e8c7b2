"""Machines of a Ray cluster that join and are lost: raylets of this one, held by `python -m tests.support.machines`."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Machines:
    """A cluster whose first machine, the driver's, has no CPUs to book."""

    keeper: "subprocess.Popen[str]"
    address: str

    def join(self, cpus: int, *, gpus: int = 0) -> int:
        """Have a machine join, of whose GPUs none need be there; return the pid of its raylet, by which it is lost."""
        self.keeper.stdin.write(f"{cpus} {gpus}\n")
        self.keeper.stdin.flush()
        return int(told(self.keeper.stdout))


@contextmanager
def machines(environment: Mapping[str, str]) -> Iterator[Machines]:
    """Have a cluster of one machine, whose processes and those of machines that join have this environment."""
    command = [sys.executable, "-m", "tests.support.machines"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(environment)
    ) as keeper:
        try:
            yield Machines(keeper, told(keeper.stdout))
        finally:
            keeper.stdin.close()
            keeper.wait(60)


def lose_machine(raylet: int) -> None:
    """Kill a raylet and all that runs below it; this process, if it is there too, comes last."""
    root = psutil.Process(raylet)
    for process in (root, *sorted(root.children(recursive=True), key=lambda child: child.pid == psutil.Process().pid)):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def tell(what: object) -> None:
    """Say something on a line of its own, between those of Ray."""
    sys.stdout.write(f"told {what}\n")
    sys.stdout.flush()


def told(output: Iterable[str]) -> str:
    """Read what was said next."""
    for line in output:
        if line.startswith("told "):
            return line.removeprefix("told ").strip()
    raise AssertionError("ended without a word")


def _keep() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    tell(cluster.address)
    for line in sys.stdin:
        cpus, gpus = map(int, line.split())
        node = cluster.add_node(num_cpus=cpus, num_gpus=gpus)
        tell(node.all_processes["raylet"][0].process.pid)
    cluster.shutdown()


if __name__ == "__main__":
    _keep()
