"""Files in buckets, such as s3://bucket/file, that are only read. They are read through fsspec: S3 through s3fs, other
stores through a package that the user installs. Copies are kept in the cache of this machine."""

import base64
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tenacity import Retrying, retry_if_not_exception_type, stop_after_attempt, wait_random_exponential

from rheostat.infra.errors import BadInput
from rheostat.infra.store.cache import Cache, open_cache
from rheostat.infra.store.disk import scratch_directory, sweep

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
"""Name of the Python package that reads addresses, by scheme of the address, such as "s3" for s3://bucket/file."""
DOWNLOAD_TRIES: Final = 3
"""Maximum number of attempts to download a file whose transfer is interrupted. The packages also retry each request."""
_PART_BYTES: Final = 16 << 20
"""Size in bytes of the parts in which s3fs downloads a large file."""
_STREAMS: Final = 8
"""Number of parts that s3fs downloads at the same time."""


def fetch_address(address: str) -> Path:
    """Return the local path of a copy of the file or directory at an address such as s3://bucket/file. It is downloaded
    into the cache if necessary.

    A file is downloaded again if its size or version has changed. Files of a cached directory that no longer exist at
    the address are deleted. Raises BadInput if the package for the address is not installed, or if nothing can be read.
    """
    scheme, _, name = address.partition("://")
    if "/" not in name.strip("/") or ".." in name.split("/"):
        raise BadInput(f"{address} is not the address of a file in a bucket. Write it like {scheme}://bucket/name")
    local = open_cache()
    target = local.root / scheme / name
    try:
        storage, root = open_filesystem(address)
        entries = _list_files(storage, root)
        paths = {key: target.joinpath(*_split_name(key, root)) for key in entries}
        for key, path in paths.items():
            _copy_file(storage, entries[key], path, local, key=key)
    except BadInput:
        raise
    except Exception as error:  # every package has exceptions of its own, for example for missing credentials
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        check = "the address and your credentials"
        if scheme == "s3":
            check = "the address, your credentials (AWS_PROFILE or AWS_ACCESS_KEY_ID) and AWS_ENDPOINT_URL"
        raise BadInput(f"{address} cannot be read: {reason}. Check {check}.") from error
    if not paths:
        raise BadInput(
            f"{address} does not exist: there is neither a file nor a directory with files at this address. Check the "
            "names of the bucket and the file."
        )
    for other in target.rglob("*") if target not in paths.values() else ():
        if other.is_file() and other not in paths.values():
            other.unlink(missing_ok=True)
    return target


def open_filesystem(address: str) -> "tuple[AbstractFileSystem, str]":
    """Return the fsspec file system for an address in a bucket, and the path of the address in this file system.

    Raises BadInput if the package for the address is not installed.
    """
    import fsspec

    scheme = address.partition("://")[0]
    try:
        if scheme == "s3":
            settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
            storage = _open_s3(tuple(sorted(settings.items())), os.getpid())
            return storage, storage._strip_protocol(address)
        storage, root = fsspec.core.url_to_fs(address)
    except ImportError:
        raise BadInput(
            f"{address} needs the package {PACKAGES[scheme]}. Install it in Rheostat's environment: pip install "
            f"{PACKAGES[scheme]}"
        ) from None
    return storage, root


@cache
def _open_s3(settings: tuple[tuple[str, str], ...], process: int) -> "AbstractFileSystem":
    """Open S3 with the settings of botocore: environment variables, profiles, single sign-on, and roles. `settings` are
    the environment variables of AWS. They and the process ID are arguments so that a change opens a new client.

    The variables of the run store that botocore does not read are passed on: the region, and the key of SSE-C.
    """
    from s3fs import S3FileSystem

    environment = dict(settings)
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    encryption: dict[str, object] = {}
    if environment.get("AWS_SERVER_SIDE_ENCRYPTION", "").lower() == "sse-c":
        key = base64.b64decode(environment.get("AWS_SSE_CUSTOMER_KEY_BASE64", ""))
        encryption = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": key}
    return S3FileSystem(
        anon=environment.get("AWS_SKIP_SIGNATURE", "").lower() in {"1", "true"},
        client_kwargs={"region_name": region} if region else {},
        s3_additional_kwargs=encryption,
        default_block_size=_PART_BYTES,
        max_concurrency=_STREAMS,
        skip_instance_cache=True,
    )


def _list_files(storage: "AbstractFileSystem", root: str) -> dict[str, Mapping[str, object]]:
    """Return the entries of the file at this path, or of all files below this path, by their paths. The result is empty
    if there are none."""
    storage.invalidate_cache()
    try:
        entry = storage.info(root)
        if entry["type"] == "file":
            return {root: entry}
        found = storage.find(root, detail=True).items()
    except FileNotFoundError:
        return {}
    return {key: entry for key, entry in found if entry["type"] == "file" and not key.endswith("/")}


def _split_name(key: str, root: str) -> list[str]:
    """Return the names of the folders and of the file that lead from `root` to an object. Raises BadInput if they could
    lead out of the folder, because anyone who writes to the bucket chooses them."""
    parts = key.removeprefix(root).split("/")[1:]
    if key != root and not {"", ".", ".."}.isdisjoint(parts or [""]):
        raise BadInput(f"{key!r}: the name of this object cannot be a path below a folder. Rename the object.")
    return parts


def _copy_file(
    storage: "AbstractFileSystem", entry: Mapping[str, object], path: Path, local: Cache, *, key: str
) -> None:
    """Download a file into the cache, unless the cache has a copy of this version of the file."""
    size, tag = int(str(entry["size"] or 0)), _find_version(entry)
    if local.is_current(path, size, tag):
        return
    with local.lock_download(path), scratch_directory(local.root) as scratch:
        if local.is_current(path, size, tag):  # another process has downloaded it while this one waited
            return
        sweep(local.root)
        for attempt in Retrying(
            stop=stop_after_attempt(DOWNLOAD_TRIES),
            retry=retry_if_not_exception_type((FileNotFoundError, PermissionError)),
            wait=wait_random_exponential(max=10),
            reraise=True,
        ):
            with attempt:
                part = scratch / "file"
                storage.get_file(key, str(part))
                if size and part.stat().st_size != size:
                    raise OSError(f"{part.stat().st_size:,} of {size:,} bytes arrived. The file may have changed")
        local.add(part, path, tag)


def _find_version(entry: Mapping[str, object]) -> str:
    """Return the text that identifies the content of an object: its ETag, or all that its store lists."""
    tag = entry.get("ETag") or entry.get("etag")
    return str(tag) if tag else repr(sorted(entry.items(), key=str))
