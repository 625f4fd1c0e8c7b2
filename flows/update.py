"""The update controller: all ranks learn from the iteration's samples."""

from prefect import flow

from flows.session import joined
from tasks.run.batch import Batch
from tasks.run.iteration import Iteration
from tasks.run.session import RunRef
from tasks.run.versions import policy_of
from tasks.update import update_policy


@flow(name="update", flow_run_name="{batch} update", persist_result=True, result_serializer="json")
async def update(run: RunRef, batch: str) -> str:
    """Commit the next policy version; return its digest.

    Args:
        run: The run; without an epoch this flow takes it over.
        batch: `it-0003`; its credit is in the store.
    """
    async with joined(run) as session:
        planned = Batch.read(session.run, batch).plan
        updated = await update_policy(session, Iteration(session.run, planned.number))
    return policy_of(updated).digest
