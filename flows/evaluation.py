"""Held-out evaluation of a policy as it is, by the same controllers as training."""

from prefect import flow

from flows.measurement import evaluation
from flows.session import hold
from flows.warmup import warmup
from tasks.config.run import RunConfig
from tasks.run.keys import evaluation_key
from tasks.views.metrics import Accuracy


@flow(name="evaluate", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def evaluate(config: RunConfig) -> Accuracy:
    """Measure the configured policy as it is on held-out problems."""
    async with hold(config, last=evaluation_key(0)) as session:
        if not session.is_over:
            await warmup(session.ref)
        return await evaluation(session, 0)
