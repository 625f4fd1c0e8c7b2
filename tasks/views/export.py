"""A run's policy as one directory of its own; needs neither Prefect's API nor a worker.

Base and adapter are merged in a process of its own: no flow process loads torch.
"""

import json
import sys
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from infra.config import Settings
from infra.errors import BadInput, WorkerFailed
from infra.processes.guard import guarded_directory
from infra.processes.watch import await_answer
from infra.store.bundles import fetch_bundle
from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.records.work import ExportWork
from tasks.run.keys import DPO, SFT, StageKey
from tasks.run.versions import policy_of
from tasks.views.metrics import sealed_iterations


class PolicyExport(Settings):
    """A policy that was written to a directory."""

    run: str
    """Name of its run."""
    iteration: int
    """Iterations after which it is the policy."""
    digest: str
    """Proves which policy of the run it is."""
    merged: bool
    """Whether an adapter was added to its base."""
    path: str
    """The directory, in Hugging Face format."""


def export_policy(
    run: Run, target: Path, *, iteration: int | None, dtype: Literal["float32", "bfloat16"] | None
) -> PolicyExport:
    """Write the policy after an iteration, by default the last sealed one, into a directory that is not there yet.

    The directory appears when it is whole. Raises BadInput before anything is written.
    """
    sealed = len(sealed_iterations(run))
    number = sealed if iteration is None else iteration
    if not 0 <= number <= sealed:
        raise BadInput(f"run {run.name!r}: no policy after iteration {number}, expected 0 to {sealed}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target}: expected a directory that is not there yet or is empty, found one with files in it")
    policy = policy_of(_policy(run, number))
    base = fetch_bundle(run.store, policy.weights)
    adapter = None if policy.adapter is None else fetch_bundle(run.store, policy.adapter)
    target.parent.mkdir(parents=True, exist_ok=True)
    with guarded_directory(f".{target.name}-", parent=target.parent) as scratch:
        written = scratch / "policy"
        written.mkdir()
        _ask(ExportWork(base=base, adapter=adapter, target=written, dtype=dtype))
        written.replace(target)
    return PolicyExport(
        run=run.name, iteration=number, digest=policy.digest, merged=adapter is not None, path=str(target)
    )


def _policy(run: Run, number: int) -> Manifest:
    """The policy's manifest. A run that was told to end after SFT or DPO has no initial policy yet, but that one."""
    keys = [StageKey.policy(number)] if number else [StageKey.policy(0), DPO, SFT]
    found = [manifest for key in keys if (manifest := run.find(key)) is not None]
    return found[0] if found else run.require(keys[0])


def _ask(work: ExportWork) -> None:
    command = [sys.executable, "-P", "-m", "models.commands.export"]
    code, answer, errors = await_answer("the export", command, TypeAdapter(ExportWork).dump_json(work))
    try:
        error = json.loads(answer)["error"]
    except ValueError:
        raise WorkerFailed(f"the export ended with code {code}: {errors.decode()[-2000:]}") from None
    if error:
        raise BadInput(error)
