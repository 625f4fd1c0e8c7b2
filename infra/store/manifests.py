"""Manifests: immutable JSON records of results. Each stage commits a manifest that names its data and how it was
computed.

A result exists only if a manifest names it. Readers ignore all other data in the store.
"""

import platform
import re
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, ValidationError

from rheostat.infra.config import Settings, Since, encode_recorded, read_recorded
from rheostat.infra.costs import Cost
from rheostat.infra.errors import Damaged
from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.checksums import MANIFEST_VERSION, record_digest, seal, unseal
from rheostat.infra.store.shards import ShardRef

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
    """Information about how a result was computed: by whom, when, where, and how long it took. The digest of the result
    does not depend on it."""

    epoch: int = 0
    """Number of the epoch in which the result was committed. A new epoch begins whenever a process locks the run.
    `Run.commit` sets this field."""
    worker: str = ""
    """Name of the worker that computed the result, or an empty string if no worker was involved."""
    host: str = ""
    """Name of the machine on which the result was committed."""
    created: str = ""
    """UTC time of the commit in ISO format, for people. No decision depends on it."""
    seconds: dict[str, float] = {}
    """Duration in seconds of each step of the computation, by name of the step."""
    requests: Annotated[dict[str, int], Since("0.1.0", before={})] = {}
    """Number of requests to the run's store, by HTTP verb. Empty for a local store."""
    costs: Annotated[dict[str, Cost], Since("0.1.0", before={})] = {}
    """Costs of an iteration or evaluation, by role. Only the manifest of its last result contains them."""
    alarms: Annotated[dict[str, str], Since("0.1.0", before={})] = {}
    """Messages of the alarms that an iteration raised, by name of the alarm. Only the manifest of its last result
    contains them."""


def provenance_here(
    *,
    worker: str = "",
    seconds: Mapping[str, float] | None = None,
    requests: Mapping[str, int] | None = None,
    costs: Mapping[str, Cost] | None = None,
    alarms: Mapping[str, str] | None = None,
) -> Provenance:
    """Return the provenance (who, when, where) of a result that is being computed now on this machine, with these
    measurements."""
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
    """Return the versions of Python, pyarrow and torch. A library that is not installed has the version "none"."""
    versions = {"python": platform.python_version()}
    for package in ("pyarrow", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


class Manifest(Settings):
    """Record of one result that a stage has committed: its data, metrics, and the results that it was computed from. A
    manifest never changes."""

    key: ManifestKey
    """Key of the result in the run, such as `it-0003/rollout/0001`."""
    run: str = ""
    """Fingerprint (digest of the configuration) of the run. `Run.commit` sets this field."""
    shards: tuple[ShardRef, ...] = ()
    """References to the tables (shards) of the result, in order. For example, they contain the completions of some
    prompts."""
    bundles: dict[str, BundleRef] = {}
    """References to the folders (bundles) of the result. Keys are their purposes in this stage, such as `weights`."""
    parents: tuple[str, ...] = ()
    """Digests of the manifests of the results that were used to compute this result."""
    metrics: dict[str, float] = {}
    """Metrics of the result, by name. They depend only on the inputs of the stage."""
    detail: dict[str, JsonValue] = {}
    """Additional information about the result that other stages need. It depends only on the inputs of the stage."""
    provenance: Provenance = Field(default_factory=provenance_here)
    """Information about how the result was computed: by whom, when and where. The digest does not depend on it."""

    @property
    def digest(self) -> str:
        """BLAKE3 digest of the canonical JSON of all fields except `provenance`. Equal results have equal digests."""
        return record_digest(self._result())

    def encode(self) -> bytes:
        """Encode this record as checksummed JSON, with all fields and the digest."""
        provenance = self.provenance.as_recorded()
        return seal({**self._result(), "digest": self.digest, "provenance": provenance}, version=MANIFEST_VERSION)

    def _result(self) -> dict[str, JsonValue]:
        without = {"provenance"} if self.run else {"provenance", "run"}
        result = encode_recorded(self.model_dump(mode="json", exclude=without), self)
        return {**result, "schema_version": str(MANIFEST_VERSION)}


def decode_manifest(data: bytes, *, key: str) -> Manifest:
    """Decode a manifest (record of a result) from the content of its file. `key` is the key that it must have. Raises
    Damaged if the checksum, digest or key is wrong."""
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
        raise Damaged(
            f"{where}: the manifest must have the digest {expected}, but it has {manifest.digest}. Restore the file "
            "from a copy of the store."
        )
    if manifest.key != key:
        raise Damaged(
            f"{where}: the file contains the manifest of another key, {manifest.key!r}. Restore the file from a copy "
            "of the store."
        )
    return manifest
