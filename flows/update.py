"""The update controller: all ranks learn from the iteration's samples."""

from prefect import flow

from flows.session import joined
from tasks.plan import read_plan
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
    async with joined(run) as here:
        updated = await update_policy(here, read_plan(here, batch))
    return policy_of(updated).digest
