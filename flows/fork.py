"""Flow that begins a run at an iteration of another run, and trains it."""

import asyncio

from prefect import flow

from rheostat.flows.train import train
from rheostat.tasks.forks.creation import create_fork, request_fork
from rheostat.tasks.preparation import check_and_adapt
from rheostat.tasks.run.preflight import mark_as_checked
from rheostat.tasks.views.summary import RunSummary


@flow(name="fork", flow_run_name="{name}", validate_parameters=True)
async def fork(
    point: str, name: str, overrides: list[str] | None = None, store: str = "./runs", accept_change: bool = False
) -> RunSummary:
    """Begin a run after an iteration of another run, and train it. The iterations before are shared, not copied. If the
    flow is started again, it continues the run.

    Args:
        point: Parent run and last shared iteration, such as `demo@12`.
        name: Name of the new run.
        overrides: Settings of the later iterations that differ, such as `update.learning_rate=1e-4`.
        store: Store that contains both runs.
        accept_change: Continue even if reward code or library versions have changed since the fork was created.
    """
    planned = await asyncio.to_thread(request_fork, store, point, name, overrides=overrides or [])
    config = await check_and_adapt(planned.config)
    await asyncio.to_thread(create_fork, planned)
    with mark_as_checked():
        return await train(config, accept_change=accept_change)
