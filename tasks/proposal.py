"""Proposal of a job for a data file and a policy, computed in a separate process."""

import json
import os
import sys

import psutil

from infra.environments.find import gpu_memory, num_gpus
from infra.errors import BadInput, WorkerFailed
from infra.processes.watch import run_watched
from models.config.proposals import JobProposal, ProposalRequest


def propose_job(
    name: str,
    folder: str,
    *,
    data: str,
    policy: str,
    judge: str | None,
    prompt_column: str | None,
    answer_column: str | None,
) -> JobProposal:
    """Return a job for a data file and a policy, with sizes for this machine.

    Raises BadInput if an input cannot be used or the user must decide something, and WorkerFailed if the process
    crashes.
    """
    gpus = num_gpus()
    request = ProposalRequest(
        name=name,
        folder=folder,
        data=data,
        policy=policy,
        judge=judge,
        prompt_column=prompt_column,
        answer_column=answer_column,
        gpus=gpus,
        memory=(gpus and gpu_memory()) or psutil.virtual_memory().total,
        cores=len(os.sched_getaffinity(0)),
    )
    command = [sys.executable, "-P", "-m", "models.proposals.command"]
    code, answer, errors = run_watched("the proposal of a job", command, request.model_dump_json().encode())
    try:
        result = json.loads(answer)
    except ValueError:
        raise WorkerFailed(
            f"The process that analyzes the data and the model failed with exit code {code}. Its last output is: "
            f"{errors.decode()[-2000:]}"
        ) from None
    if result["error"]:
        raise BadInput(result["error"])
    return JobProposal.model_validate(result["proposal"])
