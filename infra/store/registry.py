"""Registries: the versions of a retrained policy, as numbered records that never change.

The newest record with a promotion or a rollback defines the champion, the policy that is in use. There is no separate
pointer to the champion, which could be lost, damaged or changed by two processes. A chain protects the records. Without
the chain, a loss of the newest record would go unnoticed, and the previous champion would be used again.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal

from pydantic import JsonValue, ValidationError

from infra.config import Settings
from infra.errors import BadInput, Damaged
from infra.store.bundles import CONTENTS, BundleRef, has_bundle
from infra.store.checksums import seal, unseal
from infra.store.numbered import NumberedRecords
from infra.store.storage import Store, open_store

REGISTRIES: Final = "registry"
"""Folder of a store with its registries, next to the runs."""
POLICIES: Final = "policies"
"""Prefix of the policy bundles in a registry."""
RETRAINS: Final = "retrains"
"""Folder of a registry with one record for each retrain, which is written when the retrain begins."""

Kind = Literal["promote", "rollback", "proposal", "refuse", "keep", "reject", "invalid"]


class RegistryRecord(Settings):
    """Record of a decision about a challenger, or of a rollback of the champion."""

    number: int
    """Number of the record, counted from 1 without gaps."""
    kind: Kind
    """Decision. `promote` and `rollback` change the champion. `proposal` waits for a signature, and `refuse` ends the
    wait. The other kinds keep the champion."""
    policy: str
    """Digest of the bundle with the policy's weights."""
    bundle: BundleRef | None = None
    """Copy of the policy's directory in the registry, or None if the files were not kept."""
    run: str
    """Name of the run that trained the policy."""
    iteration: int
    """Number of iterations for which the policy was trained in the run."""
    previous: int = 0
    """Number of the record that defined the previous champion, or 0 if there was no champion."""
    gate: JsonValue = None
    """Measurements and rules of the gate, or None if no gate was evaluated."""
    reason: str
    """Reason of the decision, in words."""
    who: str
    """Person or flow that requested the decision."""
    when: str
    """UTC time in ISO format, for people. No decision depends on it."""
    version: str
    """Version of the code that wrote the record."""

    @property
    def is_champion(self) -> bool:
        """Whether the record defines a new champion."""
        return self.kind in ("promote", "rollback")


MakeRecord = Callable[[int, RegistryRecord | None], RegistryRecord | None]
"""Function that builds a record from its number and the champion's record, or returns None to write nothing."""


class Registry:
    """Registry of policy versions, which has a name in a store."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.numbered = NumberedRecords(store, f"registry {name!r}")

    def records(self) -> list[RegistryRecord]:
        """Return all records in order. Raises Damaged if a record is missing, damaged, replaced or under the
        wrong number."""
        return [self._decode(number, content) for number, content in enumerate(self.numbered.read(), start=1)]

    def champion(self) -> RegistryRecord | None:
        """Return the record that set the champion, or None before the first promotion."""
        return champion_of(self.records())

    def canary(self) -> RegistryRecord | None:
        """Return the newest proposal that waits for a decision, or the champion's record if no proposal waits."""
        records = self.records()
        return next(reversed(waiting_proposals(records)), champion_of(records))

    def append(self, make: MakeRecord) -> RegistryRecord | None:
        """Append the record that `make` builds, and return it. If `make` returns None, nothing is written.

        If another process writes the next number first, `make` is called again with the new number and champion.
        """
        while True:
            records = self.records()
            record = make(len(records) + 1, champion_of(records))
            if record is None or self.numbered.put(record.number, seal(record.model_dump(mode="json"))):
                return record

    def locate(self, record: RegistryRecord) -> str:
        """Return the path or address of a record's policy. Raises BadInput if its files were deleted."""
        if record.bundle is None or not has_bundle(self.store, record.bundle):
            where = f"registry {self.name!r} in {self.store.uri}"
            raise BadInput(
                f"{where}: the policy files of record {record.number} were deleted, because promotion.keep keeps only "
                "the files of the newest promoted policies. Choose a newer record."
            )
        return self.store.locate(f"{record.bundle.key}/{CONTENTS}").rpartition("/")[0]

    def _decode(self, number: int, content: bytes) -> RegistryRecord:
        where = f"registry {self.name!r} in {self.store.uri}: record {number}"
        fields = unseal(content, where=where)
        try:
            record = RegistryRecord.model_validate(fields)
        except ValidationError as error:
            raise Damaged(f"{where}: the checksum is right, but the content is not a valid record: {error}") from error
        if record.number != number:
            raise Damaged(
                f"{where}: the file contains record {record.number} instead. Restore it from a copy of the store."
            )
        return record


def champion_of(records: Sequence[RegistryRecord]) -> RegistryRecord | None:
    """Return the last record that sets the champion, or None."""
    return next((record for record in reversed(records) if record.is_champion), None)


def waiting_proposals(records: Sequence[RegistryRecord]) -> list[RegistryRecord]:
    """Return the proposals that were compared with the present champion and were not refused."""
    champion, refused = champion_of(records), {record.run for record in records if record.kind == "refuse"}
    proposed = [record for record in records if record.kind == "proposal" and record.run not in refused]
    return [record for record in proposed if record.previous == (0 if champion is None else champion.number)]


def open_registry(store_uri: str, name: str) -> Registry:
    """Open the registry with this name in a store of runs. Nothing is written before the first record."""
    return Registry(open_store(f"{store_uri.rstrip('/')}/{REGISTRIES}/{name}"), name)


def registries(store_uri: str) -> list[str]:
    """Return the names of a store's registries."""
    return open_store(store_uri).children(REGISTRIES)


def open_existing_registry(store_uri: str, name: str) -> Registry:
    """Open an existing registry. Raises BadInput with the names of the existing registries if there is none."""
    names = registries(store_uri)
    if name not in names:
        raise BadInput(
            f"there is no registry {name!r} in {store_uri!r}; existing registries: {', '.join(names) or 'none'}"
        )
    return open_registry(store_uri, name)
