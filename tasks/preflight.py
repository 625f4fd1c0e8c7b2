"""The input check as a task: a run started from anywhere else than the command line is checked too."""

from prefect import task
from pydantic import BaseModel

from tasks.inputs import preflight


@task(task_run_name="check inputs")
async def check_inputs(config: BaseModel) -> dict[str, float]:
    """Return what the check found out (sizes and memory estimates). Raises BadInput in one line."""
    return await preflight(config)
