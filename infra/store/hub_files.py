"""Files of the Hugging Face Hub in the cache on this machine: comparison of their content with the digests of the Hub.

A downloaded file may be damaged if the process was killed or the machine lost power before the file was verified.
Therefore the cache records which files were verified, and every other file is verified when it is used.
"""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rheostat.infra.errors import BadInput

NOTES: Final = ".rheostat"
"""Name of the folder, in the cached folder of a repository, in which Rheostat stores its own files."""
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_verified: set[Path] = set()
"""Markers of the files that this process has verified, for a cache that is read-only."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """File of a repository, as the Hub lists it."""

    size: int
    """Size in bytes."""
    digest: str
    """SHA-256 digest (64 hexadecimal digits) of a file in Git LFS, or Git's SHA-1 digest of a blob (40 digits). Empty
    if the digest is not known."""


def cached_file(path: Path) -> HubFile:
    """Describe a file in the cache without a list from the Hub. In the cache, the file name of a blob is its digest."""
    blob = path.resolve()
    return HubFile(path.stat().st_size, blob.name if _DIGEST.fullmatch(blob.name) else "")


def verify_files(folder: Path, files: Mapping[str, HubFile], *, may_delete: bool) -> None:
    """Compare files in the cached folder of a commit with their sizes and digests, unless they were compared before.

    If a file differs and may be deleted, delete the file and raise OSError. Otherwise raise BadInput.
    """
    for name, file in files.items():
        path = folder / name
        blob = path.resolve()
        status = blob.stat()
        marker = folder.parent.parent / NOTES / "verified" / f"{file.digest}-{status.st_size}-{status.st_mtime_ns}"
        if not file.digest or marker in _verified or marker.exists():
            continue
        if status.st_size == file.size and _compute_digest(blob, kind=file.digest) == file.digest:
            _verified.add(marker)
            with suppress(OSError):
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()
        elif may_delete:
            path.unlink()
            blob.unlink(missing_ok=True)
            raise OSError(f"{name} was downloaded, but its digest is not the one that the Hub lists for this file")
        else:
            raise BadInput(
                f"{path} is damaged, because its digest is not the one that the Hub lists for this file. Delete "
                "the file and start again without HF_HUB_OFFLINE, so that it is downloaded again"
            )


def _compute_digest(path: Path, *, kind: str) -> str:
    """Return the digest of a file, of the same kind as another digest: SHA-256, or Git's SHA-1."""
    with path.open("rb") as content:
        digest = hashlib.sha256() if len(kind) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
        while block := content.read(2**20):
            digest.update(block)
    return digest.hexdigest()
