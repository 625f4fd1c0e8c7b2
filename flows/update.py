"""The update controller: all ranks learn from the iteration's samples."""

from prefect import flow

from flows.running import joined
from tasks.plan import BatchPlan
from tasks.session import RunRef
from tasks.update import update_policy


@flow(name="update", flow_run_name="{plan.key} update", persist_result=True, result_serializer="json")
async def update(run: RunRef, plan: BatchPlan) -> str:
    """Commit the next policy version; return its weights digest."""
    async with joined(run) as here:
        updated = await update_policy(here, plan)
    return updated.bundles["weights"].digest
