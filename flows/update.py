"""The update controller: all ranks learn from the iteration's samples."""

from prefect import flow

from flows.running import joined
from tasks.batches import read_plan
from tasks.session import RunRef
from tasks.update import update_policy
from tasks.versions import policy_of


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
