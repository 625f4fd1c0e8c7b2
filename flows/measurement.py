"""Held-out accuracy of the policies that come before the first iteration."""

from prefect import flow

from flows.generation import generate_and_score
from tasks.evaluation import summarise_measurement
from tasks.plan import plan_measurement
from tasks.run.session import RunRef, Session, session_of
from tasks.views.metrics import Accuracy


async def measured(session: Session, policy: str) -> Accuracy | None:
    """Measure the policy of that key, where rules alone say what is right."""
    return None if session.settings.scoring.model_rewards else await measurement(session.ref, policy)


@flow(name="measurement", flow_run_name="held-out accuracy of {policy}")
async def measurement(run: RunRef, policy: str) -> Accuracy:
    """Generate and score one completion for each held-out problem."""
    session = session_of(run)
    batch = plan_measurement(session, policy)
    await generate_and_score(session, batch)
    return summarise_measurement(session, batch)
