"""Registries: the versions of a retrained policy, stored as numbered records that never change.

The newest promotion or rollback record defines the champion, the policy that is in use. There is no separate pointer to
the champion that could be lost, damaged, or changed by two processes at once. A chain (hash-linked list) protects the
records. Without it, the loss of the newest record would not be noticed, and the previous champion would be used again.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal

from pydantic import JsonValue, ValidationError

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import CONTENTS, BundleRef, has_bundle
from rheostat.infra.store.checksums import seal, unseal
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.numbered import NumberedRecords
from rheostat.infra.store.storage import open_store

REGISTRIES: Final = "registry"
"""Name of the folder in a store that contains the registries. It is next to the folders of the runs."""
POLICIES: Final = "policies"
"""Prefix of the keys under which a registry stores the files of policies."""
RETRAINS: Final = "retrains"
"""Name of the folder in a registry that contains one record for each retrain, written when the retrain begins."""

Kind = Literal["promote", "rollback", "proposal", "refuse", "keep", "reject", "invalid"]


class RegistryRecord(Settings):
    """Record of a decision in a registry, such as that a new policy (challenger) becomes the champion, or that an
    earlier champion is restored."""

    number: int
    """Number of the record. Records are numbered from 1 without gaps."""
    kind: Kind
    """Kind of decision. `promote` and `rollback` change the champion. `proposal` waits for a person's approval, and
    `refuse` rejects a proposal. All other kinds do not change the champion."""
    policy: str
    """Digest of the weights of the policy that the decision is about."""
    bundle: BundleRef | None = None
    """Reference to the copy of the policy's files in the registry, or None if the files were not copied."""
    run: str
    """Name of the run that trained the policy."""
    iteration: int
    """Number of iterations that the run had completed when it produced this policy."""
    previous: int = 0
    """Number of the record that defined the champion before this decision, or 0 if there was no champion."""
    gate: JsonValue = None
    """Measurements and rules of the promotion gate, which compares challenger and champion. None if they were not
    compared."""
    reason: str
    """Reason for the decision, as text for people."""
    who: str
    """Person or flow that requested the decision."""
    when: str
    """UTC time of the decision in ISO format, for people. No decision depends on it."""
    version: str
    """Version of the Rheostat code that wrote the record."""

    @property
    def is_champion(self) -> bool:
        """Whether this record makes its policy the champion."""
        return self.kind in ("promote", "rollback")


MakeRecord = Callable[[int, RegistryRecord | None], RegistryRecord | None]
"""Function that builds the next record of a registry. Its arguments are the number of the new record and the record of
the present champion (or None). It returns None if no record should be written."""


class Registry:
    """Versions of one policy in a store, with a record of each decision about which version is the champion."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.numbered = NumberedRecords(store, f"registry {name!r}")

    def records(self) -> list[RegistryRecord]:
        """Return all records in order. Raises Damaged if a record is missing, damaged, replaced, or has the wrong
        number."""
        return [self._decode(number, content) for number, content in enumerate(self.numbered.read(), start=1)]

    def champion(self) -> RegistryRecord | None:
        """Return the record that defines the present champion, or None before the first promotion."""
        return champion_of(self.records())

    def canary(self) -> RegistryRecord | None:
        """Return the newest proposal that a person can still approve. If there is none, return the record of the
        champion."""
        records = self.records()
        return next(reversed(waiting_proposals(records)), champion_of(records))

    def append(self, make: MakeRecord) -> RegistryRecord | None:
        """Append the record that `make` builds, and return it. If `make` returns None, write nothing and return None.

        If another process uses the next number first, `make` is called again with the new number and the new champion.
        """
        while True:
            records = self.records()
            record = make(len(records) + 1, champion_of(records))
            if record is None or self.numbered.put(record.number, seal(record.model_dump(mode="json"))):
                return record

    def locate(self, record: RegistryRecord) -> str:
        """Return the path or address of the files of a record's policy. Raises BadInput if the files were deleted."""
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
            raise Damaged(
                f"{where}: the checksum is right, but the content is not a valid record of a registry. A newer "
                f"version of Rheostat may have written it: {error}"
            ) from error
        if record.number != number:
            raise Damaged(
                f"{where}: the file contains record {record.number} instead of this one. Restore the file from a copy "
                "of the store."
            )
        return record


def champion_of(records: Sequence[RegistryRecord]) -> RegistryRecord | None:
    """Return the record that defines the present champion, which is the last promotion or rollback, or None if there is
    none."""
    return next((record for record in reversed(records) if record.is_champion), None)


def waiting_proposals(records: Sequence[RegistryRecord]) -> list[RegistryRecord]:
    """Return the proposals that a person can still approve. A proposal can be approved if it was compared with the
    present champion and was not refused."""
    champion, refused = champion_of(records), {record.run for record in records if record.kind == "refuse"}
    proposed = [record for record in records if record.kind == "proposal" and record.run not in refused]
    return [record for record in proposed if record.previous == (0 if champion is None else champion.number)]


def open_registry(store_uri: str, name: str) -> Registry:
    """Open the registry with this name, whether it exists or not. Nothing is written to the store until the first
    record is appended."""
    return Registry(open_store(f"{store_uri.rstrip('/')}/{REGISTRIES}/{name}"), name)


def registries(store_uri: str) -> list[str]:
    """Return the names of all registries in a store."""
    return open_store(store_uri).children(REGISTRIES)


def open_existing_registry(store_uri: str, name: str) -> Registry:
    """Open the registry with this name. If it does not exist, raise BadInput with the names of the existing
    registries."""
    names = registries(store_uri)
    if name not in names:
        raise BadInput(
            f"there is no registry {name!r} in {store_uri!r}. Existing registries: {', '.join(names) or 'none'}"
        )
    return open_registry(store_uri, name)
