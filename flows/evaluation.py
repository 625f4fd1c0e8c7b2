"""Flow for the held-out evaluation of a policy without training, by the same controllers as training."""

from prefect import flow

from rheostat.flows.measurement import evaluate_iteration
from rheostat.flows.run_access import lock_run
from rheostat.flows.warmup import prepare_run
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.run.keys import evaluation_key
from rheostat.tasks.views.metrics import Accuracy


@flow(name="evaluate", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def evaluate(config: RunConfig) -> Accuracy:
    """Evaluate the configured policy on held-out problems, without training."""
    async with lock_run(config, final_key=evaluation_key(0)) as open_run:
        if not open_run.is_finished:
            await prepare_run(open_run.ref)
        return await evaluate_iteration(open_run, 0)
