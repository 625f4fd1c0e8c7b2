"""Files at addresses of other object stores, such as gs://bucket/file, read through fsspec and the user's package."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from infra.errors import BadInput
from infra.store.cache import open_cache

PACKAGES: Final = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}
"""Name of the Python package that reads addresses, by scheme of the address, such as "gs" for gs://bucket/file."""


def fetch_address(address: str) -> Path:
    """Return the local path of a copy of the file or directory at an address such as gs://bucket/file. It is downloaded
    into the cache if necessary.

    A file is downloaded again if its size or version has changed. Files of a cached directory that no longer exist at
    the address are deleted. Raises BadInput if the package for the address is not installed, or if nothing can be read.
    """
    import fsspec

    scheme, _, name = address.partition("://")
    try:
        storage, root = fsspec.core.url_to_fs(address)
    except ImportError:
        raise BadInput(
            f"{address} needs the package {PACKAGES[scheme]}. Install it in Rheostat's environment: pip install "
            f"{PACKAGES[scheme]}"
        ) from None
    cache = open_cache()
    target = cache.root / scheme / name
    try:
        is_file = storage.isfile(root)
        found = {root: storage.info(root)} if is_file else storage.find(root, detail=True)
        paths = {key: target / os.path.relpath(key, root) if key != root else target for key in found}
        for key, path in paths.items():
            size, tag = int(found[key]["size"] or 0), _version_of(found[key])
            if not cache.is_current(path, size, tag):
                with cache.lock_download(path):
                    part = path.with_name(f".{path.name}.{os.getpid()}")
                    part.parent.mkdir(parents=True, exist_ok=True)
                    storage.get_file(key, str(part))
                    cache.add(part, path, tag)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{address} cannot be read: {reason}. Check the address and your credentials") from error
    if not paths:
        raise BadInput(
            f"{address} does not exist: there is neither a file nor a directory with files at this address. Check the "
            "address"
        )
    for other in target.rglob("*") if not is_file else ():
        if other.is_file() and other not in paths.values():
            other.unlink(missing_ok=True)
    return target


def _version_of(entry: Mapping[str, object]) -> str:
    """Return the text that identifies the content of an object: all that its store lists, such as ETag and time."""
    return repr(sorted(entry.items(), key=str))
