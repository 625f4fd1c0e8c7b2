"""Held-out accuracy of the policies that come before the first iteration."""

from prefect import flow

from flows.generation import generate_and_score
from tasks.evaluation import is_measurable, summarise_measurement
from tasks.plan import plan_measurement
from tasks.run.session import RunRef
from tasks.views.metrics import Accuracy


async def measured(run: RunRef, policy: str) -> Accuracy | None:
    """Measure the policy of that key, where a rule says what is right."""
    return await measurement(run, policy) if is_measurable(run) else None


@flow(name="measurement", flow_run_name="held-out accuracy of {policy}")
async def measurement(run: RunRef, policy: str) -> Accuracy:
    """Generate and score one completion for each held-out problem."""
    plan = await plan_measurement(run, policy)
    await generate_and_score(run, plan)
    return await summarise_measurement(run, plan)
