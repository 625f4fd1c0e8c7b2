"""Manifests: what a stage committed. Readers see only the shards and bundles that a manifest names."""

import platform
import re
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, ValidationError

from infra.config import Settings, Since, omit_unchanged_keys, read_recorded
from infra.costs import Cost
from infra.errors import Damaged
from infra.store.bundles import BundleRef
from infra.store.checksums import MANIFEST_VERSION, record_digest, seal, unseal
from infra.store.shards import ShardRef

_KEY = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*")


def _checked_key(key: str) -> str:
    if not _KEY.fullmatch(key) or ".." in key or len(key) > 200:
        raise ValueError(f"manifest key {key!r}: expected at most 200 of a-z 0-9 . _ - in parts joined by '/'")
    return key


ManifestKey = Annotated[str, AfterValidator(_checked_key)]


class Provenance(Settings):
    """Who made a manifest, when and how fast; none of it decides anything."""

    epoch: int = 0
    """Lease of the controller that committed it; stamped by the run."""
    worker: str = ""
    """Name of the worker that did the work."""
    host: str = ""
    """Machine that committed it."""
    created: str = ""
    """UTC time of the commit in ISO format, for people; no decision compares it."""
    seconds: dict[str, float] = {}
    """Durations by name."""
    requests: Annotated[dict[str, int], Since("0.1.0", before={})] = {}
    """Requests to the run's store by verb, where it is in a bucket."""
    costs: Annotated[dict[str, Cost], Since("0.1.0", before={})] = {}
    """What an iteration or an evaluation took, by role, in the manifest that ends it."""
    alarms: Annotated[dict[str, str], Since("0.1.0", before={})] = {}
    """What of an iteration was beyond the bounds of alarms, by their names, in the manifest that ends it."""


def provenance_here(
    *,
    worker: str = "",
    seconds: Mapping[str, float] | None = None,
    requests: Mapping[str, int] | None = None,
    costs: Mapping[str, Cost] | None = None,
    alarms: Mapping[str, str] | None = None,
) -> Provenance:
    """Return the provenance of what is made on this machine now."""
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
    """Return the versions of Python and of the libraries that results depend on, as they are on this machine."""
    versions = {"python": platform.python_version()}
    for package in ("pyarrow", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


class Manifest(Settings):
    """The result of one stage step, complete and final once committed."""

    key: ManifestKey
    """Name inside the run, such as `it-0003/rollout/0001`."""
    run: str = ""
    """Fingerprint of the configuration that it was made under; stamped by the run."""
    shards: tuple[ShardRef, ...] = ()
    """Tables, in order."""
    bundles: dict[str, BundleRef] = {}
    """Directories by what they are to this stage, such as `weights`."""
    parents: tuple[str, ...] = ()
    """Digests of the manifests that it was made from."""
    metrics: dict[str, float] = {}
    """Numbers that follow from the inputs alone."""
    detail: dict[str, JsonValue] = {}
    """Other facts that follow from the inputs alone."""
    provenance: Provenance = Field(default_factory=provenance_here)
    """Who made it, when and how fast: not part of the digest."""

    @property
    def digest(self) -> str:
        """BLAKE3 of the canonical JSON of everything but provenance: equal results have equal digests."""
        return record_digest(self._result())

    def encode(self) -> bytes:
        """Return the sealed file: the result, its digest, its provenance."""
        made = self.provenance.as_recorded()
        return seal({**self._result(), "digest": self.digest, "provenance": made}, version=MANIFEST_VERSION)

    def _result(self) -> dict[str, JsonValue]:
        without = {"provenance"} if self.run else {"provenance", "run"}
        result = omit_unchanged_keys(self.model_dump(mode="json", exclude=without), self)
        return {**result, "schema_version": str(MANIFEST_VERSION)}


def decode_manifest(data: bytes, *, key: str) -> Manifest:
    """Decode a manifest's file; Damaged unless seal, digest and the key that it was stored under are right."""
    where = f"manifest {key!r}"
    record = unseal(data, where=where, version=MANIFEST_VERSION)
    expected = record.pop("digest", None)
    try:
        manifest = read_recorded(Manifest, record)
    except ValidationError as error:
        raise Damaged(f"{where}: its seal is right but it is no manifest: {error}") from error
    if manifest.digest != expected:
        raise Damaged(f"{where}: expected digest {expected}, found {manifest.digest}")
    if manifest.key != key:
        raise Damaged(f"{where}: expected a manifest of that key, found {manifest.key!r}")
    return manifest
