"""Held-out accuracy of the policies before the first iteration, and of the policies after some iterations."""

from prefect import flow

from flows.generation import generate_and_score
from tasks.evaluation import is_summarized, summarize_evaluation, summarize_measurement
from tasks.plan import plan_evaluation, plan_measurement
from tasks.run.keys import evaluation_key
from tasks.run.session import RunRef, Session, session_of
from tasks.run.stages import within
from tasks.views.metrics import Accuracy


async def measure_policy(session: Session, policy: str) -> Accuracy | None:
    """Measure the policy with this manifest key. Return None if the rewards need models, which do not exist at this
    stage."""
    return None if session.settings.scoring.model_rewards else await measurement(session.ref, policy)


@flow(name="measurement", flow_run_name="held-out accuracy of {policy}")
async def measurement(run: RunRef, policy: str) -> Accuracy:
    """Generate and score one completion for each held-out problem."""
    session = session_of(run)
    batch = plan_measurement(session, policy)
    await generate_and_score(session, batch)
    return summarize_measurement(session, batch)


async def evaluation(session: Session, number: int) -> Accuracy:
    """Evaluate the policy after this number of iterations on the held-out problems, unless the result is already
    stored."""
    with within(evaluation_key(number)):
        batch = plan_evaluation(session, number)
        if not is_summarized(batch):
            await generate_and_score(session, batch)
        return await summarize_evaluation(session, batch)
