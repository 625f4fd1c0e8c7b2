"""Machines of a Ray cluster, and whether they are available.

Ray takes 15 s to notice that a machine died, and a minute if the machine became unreachable. Therefore `Machines`
checks the machines directly.
"""

import asyncio
from dataclasses import dataclass

from rheostat.infra.processes.watch import run_apart

PROBES, PROBE_SECONDS, PAUSE_SECONDS = 3, 1.0, 0.2


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines of the Ray cluster to which this process is connected. A machine is considered available if the port of
    its raylet (Ray's server on each machine) accepts connections."""

    is_single: bool = False
    """Whether the cluster consists of this machine only. Then the machine is not checked here, because a `Watch`
    already checks its raylet."""
    is_reachable: bool = True
    """Whether this process can open connections to the machines. A `ray://` client cannot, and relies on Ray's
    information about them."""

    async def check_nodes(self, *only: str) -> dict[str, bool]:
        """Return whether each machine is available, by Ray node id. Only the nodes in `only` are checked, or all nodes
        that Ray considers alive if `only` is empty."""
        import ray

        if self.is_single:
            return dict.fromkeys(only, True)
        nodes = [node for node in await run_apart(ray.nodes) if node["Alive"]]
        nodes = [node for node in nodes if not only or node["NodeID"] in only]
        ports = [(str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])) for node in nodes]
        if not self.is_reachable:
            return dict.fromkeys((str(node["NodeID"]) for node in nodes), True)
        serve = await asyncio.gather(*(accepts_connections(*port) for port in ports))
        return {str(node["NodeID"]): serves for node, serves in zip(nodes, serve, strict=True)}


async def accepts_connections(address: str, port: int) -> bool:
    """Return whether a port accepts connections. A failed attempt is repeated a few times."""
    for _ in range(PROBES):
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                _, writer = await asyncio.open_connection(address, port)
            writer.close()
            return True
        except (OSError, TimeoutError):
            await asyncio.sleep(PAUSE_SECONDS)
    return False
