"""Creation of the HTML report at the end of a run, in a separate process, with a link in Prefect."""

import asyncio
import json
import logging
import sys

from prefect.artifacts import acreate_link_artifact

from rheostat.infra.errors import WorkerFailed
from rheostat.infra.processes.watch import run_watched
from rheostat.tasks.run.keys import artifact_key
from rheostat.tasks.run.open_run import OpenRun

logger = logging.getLogger(__name__)


async def publish_report(open_run: OpenRun) -> str | None:
    """Create the HTML report of a run in a separate process, so that this process loads no completions, and link it in
    Prefect.

    Return the location of the report, or None if it failed. A failure is logged and does not stop the run.
    """
    run, request = open_run.run, {"store": open_run.ref.store, "name": open_run.run.name}
    command = [sys.executable, "-P", "-m", "rheostat.tasks.views.report.run"]
    try:
        code, output, errors = await asyncio.to_thread(run_watched, "the report", command, json.dumps(request).encode())
        answer = json.loads(output) if output else {"error": f"code {code}: {errors.decode(errors='replace')[-500:]}"}
    except WorkerFailed as error:
        answer = {"error": str(error)}
    if "error" in answer:
        logger.warning("the report was not written: %s. Write it with `rheostat report %s`", answer["error"], run.name)
        return None
    path = run.store.locate(answer["key"])
    link = path if "://" in path else f"file://{path}"
    description = f"Report of run {run.name}. `rheostat report {run.name} --open` writes a new one and opens it."
    await acreate_link_artifact(
        link=link, link_text=path, key=f"{artifact_key(run.name)}-report", description=description
    )
    return path
