"""Flow for the held-out evaluation of a policy without training, by the same controllers as training."""

from prefect import flow

from flows.measurement import evaluation
from flows.session import hold
from flows.warmup import warmup
from tasks.config.run import RunConfig
from tasks.run.keys import evaluation_key
from tasks.views.metrics import Accuracy


@flow(name="evaluate", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def evaluate(config: RunConfig) -> Accuracy:
    """Evaluate the configured policy on held-out problems, without training."""
    async with hold(config, last=evaluation_key(0)) as session:
        if not session.is_over:
            await warmup(session.ref)
        return await evaluation(session, 0)
