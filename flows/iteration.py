"""One iteration: generate and score in parallel, assign credit, update, seal."""

from prefect import flow

from flows.generation import generate_and_score
from flows.running import launch
from flows.update import update
from infra.manifests import Manifest
from tasks.placement import place_iteration
from tasks.scoring import assign_credit
from tasks.sealing import retire_policies, seal_iteration
from tasks.session import RunRef


@flow(name="iteration", flow_run_name="it-{number:04d}")
async def iteration(run: RunRef, number: int) -> Manifest:
    """Take the next prompts once round the loop; what is already in the store is not done again."""
    plan = await place_iteration(run, number)
    await generate_and_score(run, plan)
    await assign_credit(run, plan)
    await launch(update, run, batch=plan.key)
    sealed = await seal_iteration(run, plan)
    await retire_policies(run, number)
    return sealed
