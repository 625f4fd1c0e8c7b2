"""One iteration: generate and score in parallel, estimate and assign credit, update, seal."""

from prefect import flow

from flows.generation import generate_and_score
from flows.session import launch
from flows.update import update
from infra.store.manifests import Manifest
from tasks.auxiliary import estimate
from tasks.commit import retire_policies, seal_iteration
from tasks.credit import assign_credit
from tasks.placement.stage import place_update
from tasks.plan import plan_iteration, plan_next_wave
from tasks.run.batch import BatchPlan
from tasks.run.session import RunRef


@flow(name="iteration", flow_run_name="it-{number:04d}")
async def iteration(run: RunRef, number: int) -> Manifest:
    """Take the next prompts once round the loop; what is already in the store is not done again."""
    first = await plan_iteration(run, number)
    wave: BatchPlan | None = first
    while wave is not None:
        await generate_and_score(run, wave)
        wave = await plan_next_wave(run, wave)
    await place_update(run, number)
    await estimate(run, number)
    await assign_credit(run, number)
    await launch(update, run, batch=first.key)
    sealed = await seal_iteration(run, number)
    await retire_policies(run, number)
    return sealed
