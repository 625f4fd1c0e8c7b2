"""Programs that open a Ray cluster in a process of their own, and conditions to wait for."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Mapping
from textwrap import dedent, indent

from tests.support.jobs import PATIENCE, is_alive

PROGRAM = """
import asyncio, sys, threading
from pathlib import PosixPath
import psutil
from rheostat.infra.errors import ClusterFailed
from rheostat.infra.pools.cluster import RayCluster
from rheostat.infra.pools.embedded import Preload
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.worker import PoolSpec
{before}
async def main():
    async with RayCluster.open({options}) as cluster:
{body}
try:
    asyncio.run(main())
except ClusterFailed as error:
    print("ClusterFailed:", error, flush=True)
"""

COUNTING_POOL = 'pool = await cluster.pool(PoolSpec("role", "tests.support.workers:Counting"))'
"""Line of a driver that starts a pool of one worker."""

Driver = asyncio.subprocess.Process


async def start_driver(
    body: str, *, options: str = '"doomed"', before: str = "", environment: Mapping[str, str] | None = None
) -> Driver:
    """Start a program that opens a cluster with these options and runs the body in it.

    The program prints an error of the cluster in a line that begins with "ClusterFailed:".
    """
    program = PROGRAM.format(options=options, before=dedent(before), body=indent(dedent(body).strip(), " " * 8))
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE, env=environment)


async def read_line(process: Driver) -> str:
    """Return the next line that a program prints."""
    return (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode()


async def read_output(process: Driver, *, seconds: float = PATIENCE) -> str:
    """Return what a program prints until it ends."""
    output, _ = await asyncio.wait_for(process.communicate(), seconds)
    return output.decode()


async def until(holds: Callable[[], object], *, seconds: float = PATIENCE) -> bool:
    """Wait until a condition holds. Return False if it does not hold in time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not holds() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)
    return bool(holds())


async def wait_until_gone(*pids: int) -> bool:
    """Wait until no process runs. Return False if one still runs at the end."""
    return await until(lambda: not any(map(is_alive, pids)))
