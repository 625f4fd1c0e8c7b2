"""One iteration: generate and score in parallel, estimate and assign credit, update, seal."""

from prefect import tags

from flows.controllers import launch
from flows.generation import generate_and_score
from flows.update import update
from infra.store.manifests import Manifest
from tasks.auxiliary import estimate
from tasks.commit import retire_policies, seal_iteration
from tasks.credit import assign_credit
from tasks.placement.stage import place_update
from tasks.plan import plan_iteration, plan_next_wave
from tasks.run.batch import Batch
from tasks.run.iteration import Iteration
from tasks.run.session import Session


async def iteration(session: Session, number: int) -> Manifest:
    """Take the next prompts once round the loop; what is already in the store is not done again."""
    this = Iteration(session.run, number)
    with tags(this.key):
        wave: Batch | None = plan_iteration(session, this)
        while wave is not None:
            await generate_and_score(session, wave)
            wave = plan_next_wave(session, this, wave)
        await place_update(session, this)
        await estimate(session, this)
        await assign_credit(session, this)
        await launch(update, session, batch=this.key)
        sealed = seal_iteration(session, this)
        retire_policies(session, this)
    return sealed
