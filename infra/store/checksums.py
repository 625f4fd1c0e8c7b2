"""Sealed JSON: small records in which every changed bit is found."""

import json
from collections.abc import Mapping

from blake3 import blake3
from pydantic import JsonValue

from infra.errors import BadInput, Damaged

SCHEMA_VERSION = "1"
"""Layout of every record and shard in a store, `major` or `major.minor`; a minor version only adds."""


def canonical_json(value: JsonValue | Mapping[str, JsonValue]) -> bytes:
    """Encode with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def record_digest(value: Mapping[str, JsonValue]) -> str:
    """Return the BLAKE3 of the canonical JSON."""
    return blake3(canonical_json(value)).hexdigest()


def seal(record: Mapping[str, JsonValue]) -> bytes:
    """Encode a record with its schema version and the digest of all of it."""
    versioned = {**record, "schema_version": SCHEMA_VERSION}
    return canonical_json({**versioned, "seal": record_digest(versioned)})


def unseal(data: bytes, *, where: str) -> dict[str, JsonValue]:
    """Decode what `seal` wrote; Damaged if a single bit differs, BadInput if a newer Rheostat wrote it."""
    try:
        record = json.loads(data, parse_constant=_refuse_constant)
    except ValueError as error:
        raise Damaged(f"{where}: expected sealed JSON, found {len(data)} bytes that are none: {error}") from error
    if not isinstance(record, dict) or "seal" not in record:
        raise Damaged(f"{where}: expected sealed JSON, found no seal")
    expected = record.pop("seal")
    found = record_digest(record)
    # The bytes are compared too, since a changed space or escape decodes to the same record.
    if expected != found or canonical_json({**record, "seal": found}) != data:
        raise Damaged(f"{where}: expected seal {expected}, found {found} over {len(data)} bytes")
    check_version(str(record.pop("schema_version", "none")), where=where)
    return record


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_version(version: str, *, where: str) -> None:
    """Refuse what a newer major version wrote: this reader cannot know what it means."""
    if version.partition(".")[0] != SCHEMA_VERSION:
        raise BadInput(f"{where}: written with schema version {version}, this reader knows {SCHEMA_VERSION}")
