"""Run record (run.json) with the name and the configuration of a run, and the check whether a run has results."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from pydantic import JsonValue

from rheostat.infra.config import fingerprint_of
from rheostat.infra.errors import Damaged
from rheostat.infra.store.checksums import SealedRecord
from rheostat.infra.store.contracts import Objects
from rheostat.infra.store.manifests import versions_here

RECORD: Final = "run.json"
_LEFT_WITHOUT_RESULTS: Final = {
    "": {RECORD, "lock", "lease", "orders", "trackers", "journal", "report"},
    "journal": {"dependencies", "tags"},
    "report": {"goal", "steps"},
}
"""Names that may exist in the directory of a run that has no results, by folder. Processes create them before the first
result."""


class RunRecord(SealedRecord):
    """Content of run.json, which is written when a run is created and describes the run."""

    label = "run record"

    name: str
    """Name of the run."""
    fingerprint: str
    """Digest of the configuration. Every result contains it, and a run can only be resumed with the same
    fingerprint."""
    config: dict[str, JsonValue]
    """Configuration of the run, with all default values."""
    created: str
    """UTC time in ISO format at which the run was created, for people. No decision depends on it."""
    versions: dict[str, str]
    """Versions of Python and of the libraries on which results depend."""


def new_record(name: str, config: Mapping[str, JsonValue]) -> RunRecord:
    """Return the record of a run with this configuration that is created now on this machine."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    origin: dict[str, str] = {"fingerprint": fingerprint_of(config), "created": created}
    return RunRecord(name=name, config=dict(config), versions=versions_here(), **origin)


def replace_record(store: Objects, name: str, config: Mapping[str, JsonValue]) -> RunRecord:
    """Replace the record of a run that has no results, because its configuration has changed. Also delete its journal
    (stored measurements and decisions), which belongs to the earlier configuration.

    The caller must have locked the run.
    """
    for entry in store.entries("journal/"):
        store.delete(entry.key)
    store.delete(RECORD)
    record = new_record(name, config)
    store.put(RECORD, record.seal())
    return record


def read_record(store: Objects, name: str) -> RunRecord:
    """Read the record of a run. Raises Damaged if the record is incomplete, or if it was edited so that its fingerprint
    does not match its configuration."""
    record = RunRecord.unseal(store.read(RECORD), where=f"run {name!r}")
    if record.fingerprint != fingerprint_of(record.config):
        raise Damaged(
            f"run {name!r}: the record names the fingerprint {record.fingerprint}, but the configuration in the "
            f"record has the fingerprint {fingerprint_of(record.config)}, so the file was edited. Restore it from a "
            "copy of the store."
        )
    return record


def has_results(store: Objects) -> bool:
    """Return whether a run has stored any result. Files that exist before the first result, such as the run record and
    the lock, do not count.

    Before its first result, a run may contain the record, lock, epochs, orders, trackers, tags, dependencies and report
    goals. Any other file or folder counts as a result. If the listing does not contain the run record, True is
    returned.
    """
    children = {folder: store.children(folder) for folder in _LEFT_WITHOUT_RESULTS}
    return RECORD not in children[""] or any(
        not _LEFT_WITHOUT_RESULTS[folder].issuperset(children[folder]) for folder in children
    )
