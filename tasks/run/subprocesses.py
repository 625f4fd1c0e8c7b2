"""Everything that can be wrong with a run's inputs, found before anything is written, by whoever asks first.

The check reads tokenizers and model directories, so it runs in a process of its own: no flow process loads torch. Nor
does it need Prefect, which makes directories when it is imported.
"""

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel

from infra.errors import BadInput, WorkerFailed


async def preflight(config: BaseModel, *, part: Literal["run", "plan", "scoring"] = "run") -> dict[str, float]:
    """Check data, policy directory, rewards and lengths; or the rewards alone, where rollouts are stored already.

    For a plan nothing is written, not even what the check would know the next time.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # a user's models.py in the working directory is not ours
        "-m",
        "models.commands.preflight",
        part,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    answer, errors = await process.communicate(config.model_dump_json().encode())
    try:
        verdict = json.loads(answer)
    except ValueError:
        raise WorkerFailed(f"the input check ended with code {process.returncode}: {errors.decode()[-2000:]}") from None
    if not verdict["ok"]:
        raise BadInput(verdict["error"])
    facts: dict[str, float] = verdict["facts"]
    return facts
