"""Export of a policy from its run: a directory in Hugging Face format with a model card, and optionally an upload to
the Hub.

Exporting needs neither Prefect's API nor a worker, and works while the run continues, because retention keeps the files
of a policy while they are read. Base and adapter are merged in a separate process, because no flow process loads torch.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput, Damaged, EndpointDown, WorkerFailed
from rheostat.infra.processes.guard import guarded_directory
from rheostat.infra.processes.watch import run_watched
from rheostat.infra.renamed import with_present_names
from rheostat.infra.store.bundles import BundleRef, fetch_bundle, has_bundle
from rheostat.infra.store.dependencies import dependency_records
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.readers import keep_while_read
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import is_retired
from rheostat.infra.store.tombstones import find_tombstone
from rheostat.models.config.promotion import CardConfig
from rheostat.models.records.merges import MergeWork
from rheostat.models.records.versions import ModelVersion, policy_of
from rheostat.models.records.work import ExportWork
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.run.keys import DPO, SFT, StageKey
from rheostat.tasks.run.reverts import policy_key
from rheostat.tasks.views.card import CARD, model_card, shorten_path
from rheostat.tasks.views.metrics import evaluations_of, sealed_iterations

ATTEMPTS: Final = 5
"""Number of attempts to export the newest policy. An attempt fails if retention deletes the policy while it is
copied."""


class PolicyExport(Settings):
    """Result of exporting a policy to a directory in Hugging Face format."""

    run: str
    """Name of the run."""
    iteration: int
    """Number of the iteration that produced the policy. 0 is the initial policy."""
    digest: str
    """Digest of the policy, as listed by `rheostat show`."""
    merged: bool
    """Whether an adapter was merged into its base model."""
    path: str
    """Path of the directory in Hugging Face format."""
    pushed: str = ""
    """Address of the uploaded copy on the Hub. Empty if the policy was not uploaded."""


def export_policy(
    run: Run, target: Path, *, iteration: int | None, dtype: Literal["float32", "bfloat16"] | None
) -> PolicyExport:
    """Write the policy that a run has after an iteration to a new directory. By default it is the last completed one.

    While the files are copied, retention in an active run does not delete them. The directory appears only when it is
    complete. If retention deletes the files before the copy starts, the export is tried again with the newest policy,
    unless `iteration` is set.

    Raises BadInput before anything is written if there is no such policy, its files were deleted, or the directory has
    files.
    """
    for _ in range(1 if iteration is not None else ATTEMPTS):
        number, policy = policy_after(run, iteration)
        with keep_while_read(run.store, _bundles(policy)):
            if _write_policy(run, policy, target, number=number, dtype=dtype):
                merged = policy.adapter is not None
                return PolicyExport(
                    run=run.name, iteration=number, digest=policy.digest, merged=merged, path=str(target)
                )
    stone = find_tombstone(run)
    reason = "retention" if stone is None else f"{stone.why} ({stone.who})"
    policies = {each: policy_of(_policy_manifest(run, each)) for each in range(len(sealed_iterations(run)) + 1)}
    kept = [each for each, other in policies.items() if _is_there(run, other) and not _is_retired(run, other)]
    others = f"Policies with files: {', '.join(map(str, kept))}" if kept else "No other policy of the run has files."
    raise BadInput(
        f"Run {run.name!r}: the files of the policy after iteration {number} were deleted by {reason}. {others}"
    )


def _write_policy(
    run: Run, policy: ModelVersion, target: Path, *, number: int, dtype: Literal["float32", "bfloat16"] | None
) -> bool:
    """Write a policy to a new directory and return True. Return False if the policy's files are deleted, or may be
    deleted while they are read.

    Deletion removes the list of a bundle's contents first. If the list still exists after reading, all files were
    intact.
    """
    if _is_retired(run, policy):
        return False
    try:
        with new_directory(target) as directory:
            base = fetch_bundle(run.store, policy.weights)
            adapter = None if policy.adapter is None else fetch_bundle(run.store, policy.adapter)
            write_in_process(ExportWork(base=base, adapter=adapter, target=directory, dtype=dtype))
            if not _is_there(run, policy):
                raise Damaged("the files of the policy were deleted while they were exported. Choose a newer policy")
            (directory / CARD).write_text(card_of(run, policy, number=number))
    except (BadInput, Damaged, WorkerFailed, OSError):  # deleted files can cause any of these errors
        if _is_retired(run, policy) and not _is_there(run, policy):
            return False
        raise
    return True


def policy_after(run: Run, iteration: int | None) -> tuple[int, ModelVersion]:
    """Return the number of an iteration, by default the last completed one, and the policy after it. Raises BadInput if
    there is no such policy."""
    sealed = len(sealed_iterations(run))
    number = sealed if iteration is None else iteration
    if not 0 <= number <= sealed:
        raise BadInput(
            f"Run {run.name!r} has no policy after iteration {number}. Choose a number from 0 (the initial policy) to "
            f"{sealed}."
        )
    return number, policy_of(_policy_manifest(run, number))


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Run the block with a temporary directory that is renamed to `target` at the end of the block.

    Raises BadInput if `target` is a file or a directory with files in it.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(
            f"{target} must be a new or empty directory, but it is a file or contains files. Choose another directory."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with guarded_directory(f".{target.name}-", parent=target.parent) as scratch:
        directory = scratch / "policy"
        directory.mkdir()
        yield directory
        directory.replace(target)


def _is_there(run: Run, policy: ModelVersion) -> bool:
    return all(has_bundle(run.store, bundle) for bundle in _bundles(policy))


def _is_retired(run: Run, policy: ModelVersion) -> bool:
    return any(is_retired(run.store, bundle.digest) for bundle in _bundles(policy))


def _bundles(policy: ModelVersion) -> list[BundleRef]:
    return [bundle for bundle in (policy.weights, policy.adapter) if bundle is not None]


def card_of(run: Run, policy: ModelVersion, *, number: int) -> str:
    """Return the model card of a policy with the settings, data and accuracies that its run recorded."""
    promotion = run.record.config.get("promotion") or {}
    assert isinstance(promotion, dict)
    measured = [each for each in evaluations_of(run) if each.number in (0, number)]
    return model_card(
        CardConfig.model_validate(promotion.get("card") or {}),
        title=run.name,
        lineage=dict(_lineage_of(run, policy, number)),
        config=with_present_names(run.record.config, RunConfig),
        evaluations=[f"held-out accuracy after iteration {each.number}: {each.line()}" for each in measured],
    )


def _lineage_of(run: Run, policy: ModelVersion, number: int) -> Iterator[tuple[str, str]]:
    first = policy_of(_policy_manifest(run, 0))
    yield "run", run.name
    yield "fingerprint", run.record.fingerprint
    yield "iterations", str(number)
    yield "policy", policy.digest
    yield "initial policy", first.digest
    for record in dependency_records(run)[-1:]:
        yield from ((f"data {shorten_path(path)}", file.digest) for path, file in record.dependencies.data.items())
        yield from record.dependencies.hub.items()
        yield from ((name, version) for name, version in record.dependencies.libraries.items())


def _policy_manifest(run: Run, number: int) -> Manifest:
    """Return the stored record of the policy after an iteration. If the run ended after SFT or DPO, the trained policy
    is used as the initial policy."""
    keys = [policy_key(run, number)] if number else [StageKey.policy(0), DPO, SFT]
    manifests = [manifest for key in keys if (manifest := run.find(key)) is not None]
    return manifests[0] if manifests else run.require(keys[0])


def write_in_process(work: ExportWork | MergeWork) -> None:
    """Write an exported or merged policy in a separate process.

    Raises BadInput if the process rejects its input and WorkerFailed if it crashes.
    """
    command = [sys.executable, "-P", "-m", "rheostat.models.commands.export"]
    request = TypeAdapter[ExportWork | MergeWork](ExportWork | MergeWork).dump_json(work)
    code, answer, errors = run_watched("the export", command, request)
    try:
        error = json.loads(answer)["error"]
    except ValueError:
        raise WorkerFailed(
            f"The process that exports the policy failed with exit code {code}. Its last output is: "
            f"{errors.decode()[-2000:]}"
        ) from None
    if error:
        raise BadInput(error)


def hub_token(name: str) -> str:
    """Check the name for an upload to the Hub, and return the Hugging Face token of the user. Raises BadInput if the
    name is invalid or there is no token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # its docs export it

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise BadInput(
            f"--push {name!r} is not a valid name on the Hugging Face Hub ({error}). Write it like team/my-model."
        ) from error
    if (token := get_token()) is None:
        raise BadInput(
            f"--push {name} needs a Hugging Face token with write access. Set HF_TOKEN or run `hf auth login`. Or run "
            f"this command without --push, and upload the directory with `hf upload {name} DIR` elsewhere."
        )
    return token


def push_policy(exported: PolicyExport, name: str, *, token: str) -> PolicyExport:
    """Upload an exported directory to the Hub, into a private repository if the repository is new.

    Raises EndpointDown if the Hub refuses the upload or does not respond. The directory is kept.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token, library_name="rheostat")
    message = f"Policy {exported.iteration} of run {exported.run}"
    try:
        api.create_repo(name, private=True, exist_ok=True)
        pushed = api.upload_folder(repo_id=name, folder_path=exported.path, commit_message=message)
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise EndpointDown(
            f"The policy was written to {exported.path}, but it could not be pushed to the Hub: {why}. Push it with "
            f"`hf upload {name} {exported.path}`."
        ) from error
    return exported.model_copy(update={"pushed": pushed.repo_url.url})
