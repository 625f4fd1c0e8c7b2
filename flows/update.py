"""The update controller: all ranks learn from an iteration's samples."""

from collections.abc import Sequence

from prefect import flow
from prefect.client.schemas.objects import State

from flows.controllers import controller_name
from flows.session import control
from tasks.run.batch import Batch
from tasks.run.iteration import Iteration
from tasks.run.session import RunRef, Session
from tasks.update import update_policy


@flow(name="update", flow_run_name=controller_name, persist_result=True, result_serializer="json")
async def update(run: RunRef, batch: str | None = None, first: int = 1) -> int | State[int]:
    """Commit the next policy versions; return how many.

    Args:
        run: The run; without an epoch this flow takes it over.
        batch: `it-0003`, whose credit is in the store; none has it follow the orders of the run's holder.
        first: Number of the iteration that it follows the run from.
    """
    return await control(run, batch, work=learn)


async def learn(session: Session, batch: Batch, shards: Sequence[int]) -> None:
    """Have the ranks learn from an iteration whose credit is in the store, from all of its shards."""
    await update_policy(session, Iteration(session.run, batch.plan.number))
