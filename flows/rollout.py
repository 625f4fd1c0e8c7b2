"""The rollout controller: a slice of every batch's shards."""

from prefect import flow
from prefect.client.schemas.objects import State

from flows.controllers import controller_name
from flows.session import control
from tasks.rollout import generate_shards
from tasks.run.session import RunRef


@flow(name="rollout", flow_run_name=controller_name, persist_result=True, result_serializer="json")
async def rollout(run: RunRef, batch: str | None = None, controller: int = 0, first: int = 1) -> int | State[int]:
    """Have shards of planned batches generated and committed; return of how many batches.

    Args:
        run: The run; without an epoch this flow takes it over.
        batch: `it-0003` or `eval-0010`, whose plan is in the store; none has it follow the orders of the run's holder.
        controller: Number of this controller among its peers.
        first: Number of the iteration that it follows the run from.
    """
    return await control(run, batch, work=generate_shards, slots="rollout")
