"""Checksummed JSON for small records. If any bit of a record changes, this is detected when the record is read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final, Self

from blake3 import blake3
from pydantic import JsonValue, ValidationError

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.errors import BadInput, Damaged

FIRST_VERSION: Final = 1
"""Schema version of all records and shards whose format has not changed since the first release."""

MIN_THREADED_BYTES: Final = 64 * 2**20
"""Size in bytes from which several threads compute the digest of a file."""

MANIFEST_VERSION: Final = FIRST_VERSION
"""Schema version of new manifests (records of results). It is a part of a manifest's digest."""


def canonical_json(value: JsonValue | Mapping[str, JsonValue]) -> bytes:
    """Encode a value as canonical JSON, with sorted keys and without spaces. Equal values always give equal bytes.
    Raises ValueError if the value contains NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def record_digest(value: Mapping[str, JsonValue]) -> str:
    """Compute the BLAKE3 digest of a record's canonical JSON, as hexadecimal text."""
    return blake3(canonical_json(value)).hexdigest()


def seal(record: Mapping[str, JsonValue], *, version: int = FIRST_VERSION) -> bytes:
    """Encode a record as checksummed JSON. The key `seal` contains a digest of the record and its schema version."""
    versioned = {**record, "schema_version": str(version)}
    return canonical_json({**versioned, "seal": record_digest(versioned)})


def unseal(data: bytes, *, where: str, version: int = FIRST_VERSION) -> dict[str, JsonValue]:
    """Decode a record that `seal` encoded, of schema version `version` or older. `where` names the record in messages.

    Raises Damaged if any bit has changed, and BadInput if a newer version of Rheostat wrote the record.
    """
    try:
        record = json.loads(data, parse_constant=_refuse_constant)
    except ValueError as error:
        raise Damaged(
            f"{where}: expected JSON with a checksum, found {len(data)} bytes that are not JSON: {error}. Restore the "
            "file from a copy of the store."
        ) from error
    if not isinstance(record, dict) or "seal" not in record:
        raise Damaged(f"{where}: the checksum (the key 'seal') is missing. Restore the file from a copy of the store.")
    expected = record.pop("seal")
    found = record_digest(record)
    # The bytes are compared too, since a changed space or escape decodes to the same record.
    if expected != found or canonical_json({**record, "seal": found}) != data:
        raise Damaged(
            f"{where}: expected checksum {expected}, found {found} over {len(data)} bytes. Restore the file from a "
            "copy of the store."
        )
    check_version(str(record.pop("schema_version", "none")), where=where, newest=version)
    return record


class SealedRecord(Settings):
    """Base class of records that are stored as checksummed JSON. Each kind of record has its own schema version.

    A key that was added later has a `Since` annotation, and is not written while it has its default value. Therefore
    the digests of older records do not change. Any other change of the keys requires the next schema version, and code
    in the record class that reads the previous versions.
    """

    schema_version: ClassVar[int] = FIRST_VERSION
    """Schema version of new records."""
    label: ClassVar[str]
    """Name of this kind of record in messages, such as "run record"."""

    def seal(self) -> bytes:
        """Encode the record as checksummed JSON."""
        return seal(self.as_recorded(), version=self.schema_version)

    @classmethod
    def unseal(cls, data: bytes, *, where: str) -> Self:
        """Decode a record of this kind, of the current or an older schema version. `where` names the record in
        messages.

        Raises Damaged if the bytes have changed or contain another kind of record, and BadInput if a newer version of
        Rheostat wrote them.
        """
        fields = unseal(data, where=where, version=cls.schema_version)
        try:
            return read_recorded(cls, fields)
        except ValidationError as error:
            raise Damaged(
                f"{where}: the checksum is right, but the content is not a valid {cls.label}: {error}"
            ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_version(version: str, *, where: str, newest: int) -> int:
    """Return the major schema version of a record, such as 1 for "1.2". `where` names the record in messages.

    Raises BadInput unless the major version is between 1 and `newest`, because the content could not be interpreted.
    """
    major = version.partition(".")[0]
    if not major.isdecimal() or not 1 <= int(major) <= newest:
        supported = "1" if newest == 1 else f"1 to {newest}"
        raise BadInput(
            f"{where} has schema version {version}, but this version of Rheostat reads only {supported}. "
            "Use the version of Rheostat that wrote it, or a newer one (see `rheostat --version`)."
        )
    return int(major)


def digest_file(path: Path) -> str:
    """Return the BLAKE3 digest of a file. A large file, such as weights, is read by one thread for each usable CPU.

    These threads belong to this call. With blake3.AUTO, the threads would belong to the process, and a process that is
    forked from it later would wait for them forever.
    """
    threads = len(os.sched_getaffinity(0)) if path.stat().st_size >= MIN_THREADED_BYTES else 1
    return blake3(max_threads=threads).update_mmap(path).hexdigest()
