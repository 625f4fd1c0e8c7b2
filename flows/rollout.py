"""Rollout controller, which generates a slice of the shards of every batch."""

from prefect import flow
from prefect.client.schemas.objects import State

from rheostat.flows.controllers import controller_name
from rheostat.flows.run_access import run_controller
from rheostat.tasks.rollout import generate_shards
from rheostat.tasks.run.open_run import RunRef


@flow(name="rollout", flow_run_name=controller_name, persist_result=True, result_serializer="json")
async def rollout(run: RunRef, batch: str | None = None, controller: int = 0, first: int = 1) -> int | State[int]:
    """Generate and store the completions of planned batches as the rollout controller with the number `controller`,
    from iteration `first` on. Return the number of batches, or the state Crashed if the process that has locked the run
    no longer sends requests.

    Args:
        run: The run. Without an epoch (the number of the holder's lease) this flow locks the run itself.
        batch: Batch such as `it-0003` or `eval-0010` with a stored plan. None serves the requests of the run's holder.
        controller: Number of this controller among those that share each batch.
        first: Number of the first iteration for which this controller works.
    """
    return await run_controller(run, batch, work=generate_shards, slots="rollout")
