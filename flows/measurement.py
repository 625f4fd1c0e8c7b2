"""Held-out accuracy of policies before the first iteration and after any iteration."""

from prefect import flow

from rheostat.flows.generation import generate_and_score
from rheostat.tasks.evaluation import is_summarized, summarize_evaluation, summarize_measurement
from rheostat.tasks.plan import plan_evaluation, plan_measurement
from rheostat.tasks.run.keys import evaluation_key
from rheostat.tasks.run.open_run import OpenRun, RunRef, get_open_run
from rheostat.tasks.run.stages import tag_tasks
from rheostat.tasks.views.metrics import Accuracy


async def measure_policy(open_run: OpenRun, policy: str) -> Accuracy | None:
    """Measure the accuracy of a stored policy on held-out problems before the first iteration. `policy` is the key of
    the policy in the store. Return None if a reward needs a model, because reward models do not exist at this point."""
    return None if open_run.settings.scoring.model_rewards else await measure_heldout_accuracy(open_run.ref, policy)


@flow(name="measurement", flow_run_name="held-out accuracy of {policy}")
async def measure_heldout_accuracy(run: RunRef, policy: str) -> Accuracy:
    """Generate and score completions of a stored policy for the held-out problems, and store the accuracy. `policy` is
    the key of the policy in the run's store."""
    open_run = get_open_run(run)
    batch = plan_measurement(open_run, policy)
    await generate_and_score(open_run, batch)
    return summarize_measurement(open_run, batch)


async def evaluate_iteration(open_run: OpenRun, number: int) -> Accuracy:
    """Evaluate the policy after `number` iterations on the held-out problems, and return its accuracy. If the result is
    already stored, nothing is generated again."""
    with tag_tasks(evaluation_key(number)):
        batch = plan_evaluation(open_run, number)
        if not is_summarized(batch):
            await generate_and_score(open_run, batch)
        return await summarize_evaluation(open_run, batch)
