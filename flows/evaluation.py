"""Held-out evaluation of the policy after some iterations, by the same controllers as training."""

from prefect import flow

from flows.generation import generate_and_score
from flows.session import hold
from flows.warmup import warmup
from tasks.config.run import RunConfig
from tasks.evaluation import is_summarised, summarise_evaluation
from tasks.plan import plan_evaluation
from tasks.run.keys import evaluation_key
from tasks.run.session import Session
from tasks.run.stages import within
from tasks.views.metrics import Accuracy


async def evaluation(session: Session, number: int) -> Accuracy:
    """Generate and score what is asked of the held-out problems, unless that is done."""
    with within(evaluation_key(number)):
        batch = plan_evaluation(session, number)
        if not is_summarised(batch):
            await generate_and_score(session, batch)
        return await summarise_evaluation(session, batch)


@flow(name="evaluate", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def evaluate(config: RunConfig) -> Accuracy:
    """Measure the configured policy as it is on held-out problems."""
    async with hold(config, last=evaluation_key(0)) as session:
        if not session.is_over:
            await warmup(session.ref)
        return await evaluation(session, 0)
