"""Manifests: immutable JSON records of what each stage committed.

Readers use only the shards and bundles that a manifest names.
"""

import platform
import re
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, ValidationError

from infra.config import Settings, Since, encode_recorded, read_recorded
from infra.costs import Cost
from infra.errors import Damaged
from infra.store.bundles import BundleRef
from infra.store.checksums import MANIFEST_VERSION, record_digest, seal, unseal
from infra.store.shards import ShardRef

_KEY = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*")


def _checked_key(key: str) -> str:
    if not _KEY.fullmatch(key) or ".." in key or len(key) > 200:
        raise ValueError(
            f"manifest key {key!r} is not valid. It may have at most 200 characters: a-z, 0-9, '.', '_' and '-', in "
            "parts joined by '/'."
        )
    return key


ManifestKey = Annotated[str, AfterValidator(_checked_key)]


class Provenance(Settings):
    """Origin of a manifest: who committed it, when, and how long the work took. No result depends on these values."""

    epoch: int = 0
    """Epoch of the process that committed the manifest. `Run.commit` sets it."""
    worker: str = ""
    """Name of the worker that did the work, or an empty string."""
    host: str = ""
    """Host name of the machine that committed the manifest."""
    created: str = ""
    """UTC time of the commit in ISO format, for people. No decision depends on it."""
    seconds: dict[str, float] = {}
    """Durations in seconds, by name of the step."""
    requests: Annotated[dict[str, int], Since("0.1.0", before={})] = {}
    """Number of requests sent to the run's store, by HTTP verb. Empty unless the store is in a bucket."""
    costs: Annotated[dict[str, Cost], Since("0.1.0", before={})] = {}
    """Costs of an iteration or evaluation, by role. Only the last manifest of an iteration or evaluation has them."""
    alarms: Annotated[dict[str, str], Since("0.1.0", before={})] = {}
    """Messages of the alarms that an iteration raised, by name of the alarm. Only the iteration's last manifest has
    them."""


def provenance_here(
    *,
    worker: str = "",
    seconds: Mapping[str, float] | None = None,
    requests: Mapping[str, int] | None = None,
    costs: Mapping[str, Cost] | None = None,
    alarms: Mapping[str, str] | None = None,
) -> Provenance:
    """Return the provenance of a manifest that is created on this machine now."""
    created = datetime.now(UTC).isoformat(timespec="milliseconds")
    return Provenance(
        worker=worker,
        host=socket.gethostname(),
        created=created,
        seconds=dict(seconds or {}),
        requests=dict(requests or {}),
        costs=dict(costs or {}),
        alarms=dict(alarms or {}),
    )


def versions_here() -> dict[str, str]:
    """Return the installed versions of Python, pyarrow and torch, or "none" for a library that is not installed."""
    versions = {"python": platform.python_version()}
    for package in ("pyarrow", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


class Manifest(Settings):
    """Committed result of one step of a stage. A committed manifest never changes."""

    key: ManifestKey
    """Key of the manifest inside the run, such as `it-0003/rollout/0001`."""
    run: str = ""
    """Fingerprint of the configuration under which the manifest was created. `Run.commit` sets it."""
    shards: tuple[ShardRef, ...] = ()
    """Shards (tables) of the result, in order."""
    bundles: dict[str, BundleRef] = {}
    """Bundles (stored directories) of the result, by their role in this stage, such as `weights`."""
    parents: tuple[str, ...] = ()
    """Digests of the manifests from which this one was computed."""
    metrics: dict[str, float] = {}
    """Numbers that depend only on the inputs of the stage."""
    detail: dict[str, JsonValue] = {}
    """Other facts that depend only on the inputs of the stage."""
    provenance: Provenance = Field(default_factory=provenance_here)
    """Origin of the manifest: who committed it, when, and how long the work took. Not part of the digest."""

    @property
    def digest(self) -> str:
        """BLAKE3 of the canonical JSON of all fields except `provenance`. Equal results have equal digests."""
        return record_digest(self._result())

    def encode(self) -> bytes:
        """Encode the manifest as checksummed JSON with its fields, its digest and its provenance."""
        provenance = self.provenance.as_recorded()
        return seal({**self._result(), "digest": self.digest, "provenance": provenance}, version=MANIFEST_VERSION)

    def _result(self) -> dict[str, JsonValue]:
        without = {"provenance"} if self.run else {"provenance", "run"}
        result = encode_recorded(self.model_dump(mode="json", exclude=without), self)
        return {**result, "schema_version": str(MANIFEST_VERSION)}


def decode_manifest(data: bytes, *, key: str) -> Manifest:
    """Decode the file of a manifest.

    Raises Damaged if the checksum or the digest is wrong, or if the manifest is not the one with this key.
    """
    where = f"manifest {key!r}"
    record = unseal(data, where=where, version=MANIFEST_VERSION)
    expected = record.pop("digest", None)
    try:
        manifest = read_recorded(Manifest, record)
    except ValidationError as error:
        raise Damaged(
            f"{where}: the checksum is right, but the content is not a valid manifest. A newer version of Rheostat may "
            f"have written it: {error}"
        ) from error
    if manifest.digest != expected:
        raise Damaged(f"{where}: expected digest {expected}, found {manifest.digest}. Restore the file from a copy.")
    if manifest.key != key:
        raise Damaged(
            f"{where}: the file contains another manifest, {manifest.key!r}. Restore the file from a copy of the store."
        )
    return manifest
