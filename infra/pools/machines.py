"""Which machines of a Ray cluster serve: Ray takes 15 s to see that one died, and a minute where it went silent."""

import asyncio
from dataclasses import dataclass

from infra.processes.watch import apart

PROBES, PROBE_SECONDS, PAUSE_SECONDS = 3, 1.0, 0.2


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of the cluster that this process is connected to; the port of a raylet tells whether one serves."""

    alone: bool = False
    """Whether there is only this one, whose raylet is watched elsewhere."""
    within_reach: bool = True
    """Whether this process can connect to them: a `ray://` client cannot, and believes Ray."""

    async def serving(self, *only: str) -> dict[str, bool]:
        """Tell of every node that Ray takes for alive, or `only` of these, whether it serves."""
        import ray

        if self.alone:
            return dict.fromkeys(only, True)
        nodes = [node for node in await apart(ray.nodes) if node["Alive"]]
        nodes = [node for node in nodes if not only or node["NodeID"] in only]
        ports = [(str(node["NodeManagerAddress"]), int(node["NodeManagerPort"])) for node in nodes]
        serve = await asyncio.gather(*(listens(*port) for port in ports)) if self.within_reach else [True] * len(nodes)
        return {str(node["NodeID"]): serves for node, serves in zip(nodes, serve, strict=True)}


async def listens(address: str, port: int) -> bool:
    """Whether a port takes connections, asked more than once."""
    for _ in range(PROBES):
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                _, writer = await asyncio.open_connection(address, port)
            writer.close()
            return True
        except (OSError, TimeoutError):
            await asyncio.sleep(PAUSE_SECONDS)
    return False
