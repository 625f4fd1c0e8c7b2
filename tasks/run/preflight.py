"""Everything that can be wrong with a run's inputs, found before anything is written, by whoever asks first.

The check reads tokenizers and model directories, so it runs in a process of its own: no flow process loads torch. Nor
does it need Prefect, which makes directories when it is imported.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from typing import Literal

import psutil

from infra.errors import BadInput, EndpointDown, WorkerFailed
from infra.processes.watch import LOOK_SECONDS, STILL_SECONDS, WatchedServer, apart
from infra.store.storage import open_store
from models.config.promotion import SuiteCheck
from tasks.config.run import RunConfig

PREFLIGHT = (sys.executable, "-P", "-m", "models.commands.preflight")
"""`-P`: a user's models.py in the working directory is not ours."""


async def preflight(
    config: RunConfig, *, part: Literal["run", "plan", "scoring"] = "run", checked: SuiteCheck | None = None
) -> dict[str, float]:
    """Check data, policy directory, rewards and lengths; or the rewards alone, where rollouts are stored already.

    The run in which a suite is evaluated is `checked` against what the retrain learns from, too.

    A store is asked to show that it keeps what stores promise. For a plan nothing is written, neither for that nor what
    the check would know the next time.
    """
    if part != "plan":
        await apart(open_store(config.store).check)
    document = config.model_dump(mode="json")
    if checked is not None:
        document["checked"] = checked.model_dump(mode="json")
    command, given = [*PREFLIGHT, part], json.dumps(document).encode()
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    checking = asyncio.ensure_future(process.communicate(given))
    check = WatchedServer("the input check", psutil.Process(process.pid), lambda: False, silent_seconds=STILL_SECONDS)
    try:
        while not (await asyncio.wait({checking}, timeout=LOOK_SECONDS))[0]:
            if check.failure() is not None and not (await asyncio.wait({checking}, timeout=1))[0]:
                raise WorkerFailed(str(check.problem))
    finally:
        if process.returncode is None:
            process.kill()
    answer, errors = checking.result()
    try:
        verdict = json.loads(answer)
    except ValueError:
        raise WorkerFailed(f"the input check ended with code {process.returncode}: {errors.decode()[-2000:]}") from None
    if not verdict["ok"]:
        raise (EndpointDown if verdict["is_down"] else BadInput)(verdict["error"])
    facts: dict[str, float] = verdict["facts"]
    return facts
