"""Models and datasets on the Hugging Face Hub: their commits, and their files in the Hub's cache on this machine.

A name is resolved to a commit once, by the process that starts a run. Later processes read the files of this commit
from the cache. The cache, the tokens and the environment variables are those of huggingface_hub: HF_HOME, HF_HUB_CACHE,
HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. No file that could execute code is fetched.
"""

import fnmatch
import glob
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rheostat.infra.errors import BadInput
from rheostat.infra.store.hub_files import HubFile, cached_file, verify_files
from rheostat.infra.store.hub_names import HubAddress, is_hub_name, parse_hub_name
from rheostat.infra.store.hub_progress import show_download

if TYPE_CHECKING:
    from huggingface_hub.hf_api import HfApi, RepoFile

MODEL_FILES: Final = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "README.md")
"""Patterns of the files of a model that are downloaded: weights, configuration and tokenizer. Files that could execute
code, such as Python files and pickles, do not match."""
SKIPPED_MODEL_FILES: Final = (
    *("original/*", "onnx/*", "openvino/*", "coreml/*", "flax/*", "runs/*", "consolidated*"),
    *("*.fp16.safetensors", "*.bf16.safetensors", "*.non_ema.safetensors", "trainer_state.json"),
)
"""Patterns of files that are not downloaded, because they contain copies of the model in other formats."""
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
"""Suffixes of weight files that are never read, because loading them could execute code or requires another library."""
METADATA: Final = ("README.md", "config.json", "adapter_config.json")
"""Names of small files that are downloaded first, because they show which other files are needed."""
DOWNLOAD_TRIES: Final = 3
"""Maximum number of attempts to download a file that arrives incomplete or with a wrong digest."""
RESOLVE_SECONDS: Final = 30
"""Maximum time in seconds to wait until the Hub returns the commit of a name."""

logger = logging.getLogger(__name__)


def resolve_commit(address: HubAddress) -> str:
    """Return the commit to which the revision of an address refers now. The Hub is queried or, if HF_HUB_OFFLINE is
    set, the local cache.

    The result is kept for this process. Raises BadInput if the Hub or the cache does not have the repository.
    """
    if address.is_pinned:
        return address.revision
    if not is_offline():
        return _query_commit(address, os.environ.get("HF_ENDPOINT", ""), os.environ.get("HF_TOKEN", ""), cache_folder())
    with suppress(OSError):
        return (_repository_folder(address) / "refs" / (address.revision or "main")).read_text().strip()
    raise BadInput(
        f"{address.kind} {address.label} is not in the Hugging Face cache {cache_folder()}, and HF_HUB_OFFLINE is set. "
        f"Unset HF_HUB_OFFLINE, or run `hf download{_type_option(address)} {address.name}` where the Hub can be reached"
    )


@cache
def _query_commit(address: HubAddress, endpoint: str, token: str, folder: Path) -> str:
    """Query the Hub for the commit of an address. The other arguments are settings on which the result depends, so that
    the cached results are separate."""
    with _explained(address):
        info = _api().repo_info(
            address.name, repo_type=address.kind, revision=address.revision or None, timeout=RESOLVE_SECONDS
        )
    assert info.sha, "the Hub names the commit of every repository"
    reference = _repository_folder(address) / "refs" / (address.revision or "main")
    with suppress(OSError):  # offline processes find the commit here, as after `hf download`
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(info.sha)
    return info.sha


def fetch_snapshot(address: HubAddress, base: str = "") -> Path:
    """Return a local folder with the needed files of a model or dataset on the Hugging Face Hub, or the local path of a
    single file. Missing files are downloaded into the Hub's cache.

    Missing files are downloaded with a progress bar and verified, unless HF_HUB_OFFLINE is set. If the model is an
    adapter, its base model on the Hub is fetched too. `base` is the name of the base model with the recorded commit,
    as in `JobPath.base`, or empty. Raises BadInput if the files cannot be fetched.
    """
    address = address.pin(resolve_commit(address))
    if address.kind == "dataset" and not address.file:
        folder = fetch_files(address, split_files(address))
    elif address.file:
        folder = fetch_files(address, _files_below(address))
    else:
        folder = fetch_files(address, _model_files(address))
        find_hub_base(folder, base)
    return folder / address.file


def split_files(address: HubAddress) -> list[str]:
    """Return the paths in the repository of the files that contain a dataset's split, in order.

    Raises BadInput, with the list of configurations or splits, if the choice is missing or ambiguous.
    """
    from rheostat.infra.store.hub_splits import choose_files

    address = address.pin(resolve_commit(address))
    folder = fetch_files(address, METADATA)
    return choose_files(address, folder, tuple(list_files(address)))


def fetch_files(address: HubAddress, files: Sequence[str]) -> Path:
    """Return the folder in the Hub's cache that contains these files of a repository. Missing files are downloaded. The
    revision of the address must be a commit.

    Files that the repository does not have are skipped. Each file is compared with its digest once, also if it was in
    the cache before. A file with another digest is downloaded again.
    """
    listed = list_files(address)
    names, folder = [name for name in files if name in listed], _snapshot_folder(address)
    for attempt in range(1, DOWNLOAD_TRIES + 1):
        missing = [name for name in names if not (folder / name).exists()]
        if missing and is_offline():
            raise _not_cached(address)
        with _explained(address, is_last=attempt == DOWNLOAD_TRIES):
            if missing:
                _download(address, missing)
            verify_files(folder, {name: listed[name] for name in names}, may_delete=not is_offline())
            return folder
    raise AssertionError("the download loop ended without a result and without an error")


def _download(address: HubAddress, names: Sequence[str]) -> None:
    from huggingface_hub import snapshot_download

    logger.info("fetching files of %s %s from the Hugging Face Hub", address.kind, address.label)
    with show_download(f"{address.kind} {address.name}") as bars:
        snapshot_download(
            address.name,
            repo_type=address.kind,
            revision=address.revision,
            cache_dir=cache_folder(),
            allow_patterns=[glob.escape(name) for name in names],
            endpoint=_endpoint(),
            library_name="rheostat",
            tqdm_class=bars,
        )


def list_files(address: HubAddress) -> dict[str, HubFile]:
    """Return the files of a repository by path, from the cache or from the Hub. The revision of the address must be a
    commit.

    Raises BadInput if the Hub cannot be reached and the cache has no file of this commit.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(
            address.name, repo_type=address.kind, revision=address.revision, cache_dir=cache_folder()
        )
    except CachedRepoTreeNotFoundError:
        folder = _snapshot_folder(address)
        if folder.is_dir():  # downloaded by an older version of huggingface_hub
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            return {path.relative_to(folder).as_posix(): cached_file(path) for path in paths}
        if is_offline():
            raise _not_cached(address) from None
        return _query_files(address, os.environ.get("HF_ENDPOINT", ""), os.environ.get("HF_TOKEN", ""))
    return {file.path: _describe_file(file) for file in tree}


@cache
def _query_files(address: HubAddress, endpoint: str, token: str) -> dict[str, HubFile]:
    """Query the Hub for the files of a commit. The other arguments are settings on which the result depends, so that
    the cached results are separate."""
    from huggingface_hub import RepoFile

    with _explained(address):
        tree = _api().list_repo_tree(address.name, repo_type=address.kind, revision=address.revision, recursive=True)
        return {file.path: _describe_file(file) for file in tree if isinstance(file, RepoFile)}


def _describe_file(file: "RepoFile") -> HubFile:
    return HubFile(file.size, file.blob_id) if file.lfs is None else HubFile(file.lfs.size, file.lfs.sha256)


def find_hub_base(directory: Path, recorded: str = "") -> Path | None:
    """Return a local folder with the base model of an adapter, downloaded if necessary. Return None unless
    `adapter_config.json` in this directory names a base model on the Hugging Face Hub.

    A local directory of the same name comes first. `recorded` is the name of the base model with the commit that a run
    recorded, as in `JobPath.base`. If it is empty, the commit is resolved. The files are fetched by `fetch_snapshot`.
    """
    name, commit = recorded.partition("@")[0], recorded.rpartition("@")[2]
    base = HubAddress("model", name, commit) if recorded else base_address(directory)
    return None if base is None else fetch_snapshot(base)


def base_address(directory: Path) -> HubAddress | None:
    """Return the address of the base model of an adapter on the Hugging Face Hub. Return None if this directory
    contains no adapter, or if the base model is a local directory."""
    try:
        settings = json.loads((directory / "adapter_config.json").read_text())
        name, revision = settings["base_model_name_or_path"], settings.get("revision")
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if (directory / "config.json").exists() or not isinstance(name, str) or not is_hub_name(name):
        return None
    if (directory / name / "config.json").is_file():
        return None
    address = parse_hub_name(name, "model")
    return address.pin(revision) if isinstance(revision, str) and revision and not address.revision else address


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set, which forbids access to the Hugging Face Hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def cache_folder() -> Path:
    """Return the folder of the Hugging Face Hub's cache, as set by HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home) / "hub").expanduser()


def _model_files(address: HubAddress) -> list[str]:
    """Return the files of a model that must be downloaded. Raises BadInput if the model has no weights in safetensors
    files."""
    fetch_files(address, METADATA)
    files = list_files(address)
    chosen = [name for name in files if _matches(name, MODEL_FILES) and not _matches(name, SKIPPED_MODEL_FILES)]
    if not any(name.endswith(".safetensors") for name in chosen):
        pickles = [name for name in files if name.endswith(PICKLES)]
        why = f"only {pickles[0]}, which is not read because it may execute code" if pickles else "no weights"
        raise BadInput(
            f"model {address.label} on the Hub has {why}, but weights are only read from safetensors files. Choose a "
            "repository with such files, or convert the model to safetensors and set the path of its directory"
        )
    return chosen


def _files_below(address: HubAddress) -> list[str]:
    fetch_files(address, METADATA)
    found = [name for name in list_files(address) if name == address.file or name.startswith(f"{address.file}/")]
    found = [name for name in found if not name.endswith((".py", *PICKLES))]
    if not found:
        raise BadInput(
            f"{address.text()}: the {address.kind} {address.name} has no file or folder {address.file} that can be "
            "read. Check the path"
        )
    return found


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _not_cached(address: HubAddress) -> BadInput:
    return BadInput(
        f"files of {address.kind} {address.label} are missing from the Hugging Face cache {cache_folder()}, and "
        "this process may not download (HF_HUB_OFFLINE). Start the run again without this variable, or use one "
        "HF_HOME on all machines"
    )


@contextmanager
def _explained(address: HubAddress, *, is_last: bool = True) -> Iterator[None]:
    """Run the block, and convert errors of the Hub to BadInput with a one-line explanation. If `is_last` is false, an
    incomplete download is only logged, because it is repeated."""
    from httpx2 import TransportError
    from huggingface_hub import errors

    what, where = f"{address.kind} {address.label}", _endpoint() or "https://huggingface.co"
    try:
        yield
    except errors.GatedRepoError:
        raise BadInput(
            f"{what} is gated, and your token has no access to it. Accept its conditions on {where}/{_page(address)}, "
            "and set HF_TOKEN or run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise BadInput(
            f"{what}: the repository has no revision {address.revision!r}. Correct the name after @"
        ) from None
    except errors.RepositoryNotFoundError:
        raise BadInput(
            f"{what} is neither a local path nor a repository that your token may read at {where}. Check the "
            "spelling. For a private or gated repository, set HF_TOKEN or run `hf auth login`"
        ) from None
    except errors.HfHubHTTPError as error:
        if (code := error.response.status_code) in (401, 403):
            raise BadInput(
                f"{what}: {where} refused the access token (HTTP {code}). Check the token in HF_TOKEN"
            ) from None
        raise BadInput(f"{what}: {where} responded with HTTP {code}. Run the same command again later") from None
    except errors.OfflineModeIsEnabled:
        raise BadInput(
            f"{what} is not in the cache {cache_folder()}, and HF_HUB_OFFLINE is set, so it is not downloaded. Unset "
            "HF_HUB_OFFLINE"
        ) from None
    except (OSError, TransportError, errors.LocalEntryNotFoundError) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        if not is_last:
            logger.warning("%s: the download has failed and is repeated: %s", what, reason)
            return
        raise BadInput(
            f"{what} is not a local path, and it could not be fetched from {where}: {reason}. Check the network and "
            "HF_ENDPOINT, or the path"
        ) from None


def _api() -> "HfApi":
    from huggingface_hub import HfApi

    return HfApi(endpoint=_endpoint(), library_name="rheostat")


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _repository_folder(address: HubAddress) -> Path:
    return cache_folder() / f"{address.kind}s--{address.name.replace('/', '--')}"


def _snapshot_folder(address: HubAddress) -> Path:
    return _repository_folder(address) / "snapshots" / address.revision


def _type_option(address: HubAddress) -> str:
    return " --repo-type dataset" if address.kind == "dataset" else ""


def _page(address: HubAddress) -> str:
    return f"datasets/{address.name}" if address.kind == "dataset" else address.name
