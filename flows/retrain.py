"""The scheduled retrain: the main job, each time as a run of its own."""

from datetime import datetime

from prefect import flow
from prefect.runtime import flow_run

from flows.train import train
from tasks.config.run import RunConfig
from tasks.reporting import RunSummary


@flow(name="retrain", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def retrain(config: RunConfig, accept_change: bool = False) -> RunSummary:
    """Train a policy under the configured name and the day that the run is scheduled for, such as `run-20261123`.

    Triggered again on the same day it continues that day's run; later, `train` continues it by its full name.

    Args:
        config: The run.
        accept_change: Go on although code of targets, data files or libraries are not those of the run.
    """
    return await train(dated(config, flow_run.scheduled_start_time), accept_change=accept_change)


def dated(config: RunConfig, day: datetime) -> RunConfig:
    """The configuration with the day, in UTC, at the end of the run's name."""
    return RunConfig.model_validate({**config.model_dump(), "name": f"{config.name}-{day:%Y%m%d}"})
