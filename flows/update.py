"""Update controller, which runs the optimizer steps of an iteration on all ranks."""

from collections.abc import Sequence

from prefect import flow
from prefect.client.schemas.objects import State

from rheostat.flows.controllers import controller_name
from rheostat.flows.run_access import run_controller
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.open_run import OpenRun, RunRef
from rheostat.tasks.update import update_policy


@flow(name="update", flow_run_name=controller_name, persist_result=True, result_serializer="json")
async def update(run: RunRef, batch: str | None = None, first: int = 1) -> int | State[int]:
    """Train and store the next version of the policy for each requested batch, from iteration `first` on. Return the
    number of new versions, or the state Crashed if the process that has locked the run no longer sends requests.

    Args:
        run: The run. Without an epoch (the number of the holder's lease) this flow locks the run itself.
        batch: Batch such as `it-0003` with stored credit. None serves the requests of the run's holder.
        first: Number of the first iteration for which this controller works.
    """
    return await run_controller(run, batch, work=train_policy)


async def train_policy(open_run: OpenRun, batch: Batch, shards: Sequence[int]) -> None:
    """Train the policy on all samples of an iteration, with all update ranks, which must find the samples in the store.
    `shards` is ignored."""
    await update_policy(open_run, Iteration(open_run.run, batch.plan.number))
