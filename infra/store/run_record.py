"""The record of a run, run.json: what the run is, and whether anything was made under its configuration yet."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from pydantic import JsonValue

from infra.config import fingerprint_of
from infra.errors import Damaged
from infra.store.checksums import SealedRecord
from infra.store.manifests import versions_here
from infra.store.storage import Objects

RECORD: Final = "run.json"
_LEFT_WITHOUT_RESULTS: Final = {
    "": {RECORD, "lock", "lease", "orders", "trackers", "journal", "report"},
    "journal": {"dependencies", "tags"},
    "report": {"goal", "steps"},
}
"""Names, by folder of a run, that a process may leave which fails before it has made anything."""


class RunRecord(SealedRecord):
    """Content of run.json, which is written once when the run is created."""

    label = "run record"

    name: str
    """Name of the run."""
    fingerprint: str
    """Digest of the configuration, which all manifests carry; a run is only resumed under the same."""
    config: dict[str, JsonValue]
    """The resolved configuration."""
    created: str
    """UTC time in ISO format, for people; no decision compares it."""
    versions: dict[str, str]
    """Versions of Python and of the libraries that results depend on."""


def new_record(name: str, config: Mapping[str, JsonValue]) -> RunRecord:
    """Return the record of a run that is made now on this machine."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    made: dict[str, str] = {"fingerprint": fingerprint_of(config), "created": created}
    return RunRecord(name=name, config=dict(config), versions=versions_here(), **made)


def replace_record(store: Objects, name: str, config: Mapping[str, JsonValue]) -> RunRecord:
    """Replace the record of a run without results, and delete the journal of its earlier configuration.

    The caller holds the run.
    """
    for entry in store.entries("journal/"):
        store.delete(entry.key)
    store.delete(RECORD)
    record = new_record(name, config)
    store.put(RECORD, record.seal())
    return record


def read_record(store: Objects, name: str) -> RunRecord:
    """Read the record of a run. Raises Damaged if it is torn, or if its fingerprint is not its configuration's."""
    record = RunRecord.unseal(store.read(RECORD), where=f"run {name!r}")
    if record.fingerprint != fingerprint_of(record.config):
        raise Damaged(
            f"run {name!r}: its record has the fingerprint {record.fingerprint}, its configuration has "
            f"{fingerprint_of(record.config)}"
        )
    return record


def has_results(store: Objects) -> bool:
    """Whether anything was made or placed in a run, beyond what a process leaves that fails before that.

    Such a process leaves the record, epochs, tags, dependencies and the goal. A file or folder of any other name counts
    as a result, and so does a listing that lacks the record.
    """
    found = {folder: store.children(folder) for folder in _LEFT_WITHOUT_RESULTS}
    return RECORD not in found[""] or any(
        not _LEFT_WITHOUT_RESULTS[folder].issuperset(found[folder]) for folder in found
    )
