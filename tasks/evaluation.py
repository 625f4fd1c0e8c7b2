"""The result of a held-out evaluation."""

import logging

from prefect import task

from tasks.run.batch import BatchPlan
from tasks.run.keys import StageKey
from tasks.run.session import RunRef, session_of
from tasks.run.stages import record, required
from tasks.views.metrics import Accuracy, accuracy_of

logger = logging.getLogger(__name__)


@task(task_run_name="{plan.key} summary")
async def summarise_evaluation(run: RunRef, plan: BatchPlan) -> Accuracy:
    """Commit the accuracy of one evaluated policy."""
    accuracy = _commit(run, plan)
    logger.info("held-out accuracy after %d iterations: %s", accuracy.number, accuracy.line())
    return accuracy


@task(task_run_name="{plan.key} summary")
async def summarise_measurement(run: RunRef, plan: BatchPlan) -> Accuracy:
    """Commit the accuracy of a policy that comes before the first iteration."""
    accuracy = _commit(run, plan)
    logger.info("held-out accuracy of %s: %s", plan.policy, accuracy.line())
    return accuracy


def is_measurable(run: RunRef) -> bool:
    """Whether rules alone say what is right."""
    return not session_of(run).settings.scoring.served


def _commit(run: RunRef, plan: BatchPlan) -> Accuracy:
    scores = [required(run, plan.shard_key("scoring", shard)) for shard in range(plan.num_shards)]
    term = session_of(run).settings.scoring.terms[0]
    total = sum(m.metrics[f"term_{term}_sum"] for m in scores)
    squares = sum(m.metrics[f"term_{term}_squares"] for m in scores)
    problems = int(sum(m.metrics["count"] - m.metrics["missing"] for m in scores))
    manifest = record(
        run,
        StageKey.of(plan.key, "summary"),
        parents=[required(run, plan.plan_key), *scores],
        metrics={"accuracy": total / problems if problems else 0.0, "squares": squares, "problems": problems},
    )
    return accuracy_of(manifest)
