"""Proposal of a job for a data file and a policy, computed in a separate process."""

import json
import os
import sys
from collections.abc import Mapping

import psutil

from rheostat.infra.environments.gpus import gpu_memory, num_gpus
from rheostat.infra.errors import BadInput, WorkerFailed
from rheostat.infra.processes.watch import run_watched
from rheostat.models.config.proposals import JobProposal, ProposalRequest


def propose_job(name: str, folder: str, *, inputs: Mapping[str, str | None]) -> JobProposal:
    """Return a job for a data file and a policy, with sizes for this machine. `inputs` are the fields of a
    `ProposalRequest` that the user chose, such as `data` and `policy`.

    Raises BadInput if an input cannot be used or the user must decide something, and WorkerFailed if the process
    crashes.
    """
    memory = gpu_memory()
    gpus = 0 if memory is None else num_gpus()  # without nvidia-smi the job is sized for CPUs
    machine = {
        "gpus": gpus,
        "memory": (gpus and memory) or psutil.virtual_memory().total,
        "cores": len(os.sched_getaffinity(0)),
    }
    request = ProposalRequest.model_validate({"name": name, "folder": folder, **inputs, **machine})
    command = [sys.executable, "-P", "-m", "rheostat.models.proposals.command"]
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
