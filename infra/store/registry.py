"""Registries: the versions of a policy that was retrained, as numbered records that never change.

The newest record that promotes or rolls back names the champion. There is no pointer to the champion that could be
torn, lost or moved by two processes. The records have a chain: without it, the loss of the newest record would silently
make the champion before the champion again.
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
"""Folder of a store in which registries lie beside the runs."""
POLICIES: Final = "policies"
"""Prefix of their bundles in a registry."""
RETRAINS: Final = "retrains"
"""Folder of a registry in which it says how each retrain began."""

Kind = Literal["promote", "rollback", "proposal", "refuse", "keep", "reject", "invalid"]


class RegistryRecord(Settings):
    """What became of one challenger, or who took the champion back."""

    number: int
    """Counted from 1, without gaps."""
    kind: Kind
    """`promote` and `rollback` change the champion; `proposal` waits for somebody to sign it, which `refuse` ends; the
    others keep the champion."""
    policy: str
    """Digest of the policy that it is about, as its run knows it."""
    bundle: BundleRef | None = None
    """Its directory in the registry; none where it was not kept."""
    run: str
    """Run that made it."""
    iteration: int
    """Iterations after which it is the run's policy."""
    previous: int = 0
    """Number of the record that said who was champion; 0 where there was none."""
    gate: JsonValue = None
    """What was measured, and by which rules; none where nobody asked."""
    reason: str
    """Why, in words."""
    who: str
    """Who asked for it: a person, or a flow."""
    when: str
    """UTC time in ISO format, for people; no decision compares it."""
    version: str
    """Of the code that wrote it."""

    @property
    def is_champion(self) -> bool:
        """Whether it says who is champion."""
        return self.kind in ("promote", "rollback")


MakeRecord = Callable[[int, RegistryRecord | None], RegistryRecord | None]
"""Makes a record of its number and of the one that says who is champion, or none."""


class Registry:
    """The versions under one name of a store."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name
        self.numbered = NumberedRecords(store, f"registry {name!r}")

    def records(self) -> list[RegistryRecord]:
        """Return all records in order. Raises Damaged if one is missing, torn, replaced or out of its place."""
        return [self._decode(number, content) for number, content in enumerate(self.numbered.read(), start=1)]

    def champion(self) -> RegistryRecord | None:
        """The record that says who is champion; none before the first promotion."""
        return champion_of(self.records())

    def canary(self) -> RegistryRecord | None:
        """The newest proposal that waits to be signed or refused; the champion where none does."""
        records = self.records()
        return next(reversed(waiting_among(records)), champion_of(records))

    def append(self, make: MakeRecord) -> RegistryRecord | None:
        """Append what is made of the next number and of the champion's record; made again where another came first.

        Where none is made, nothing is written.
        """
        while True:
            records = self.records()
            record = make(len(records) + 1, champion_of(records))
            if record is None or self.numbered.put(record.number, seal(record.model_dump(mode="json"))):
                return record

    def locate(self, record: RegistryRecord) -> str:
        """Say where the policy of a record lies: a path, or an address. Raises BadInput where its files are gone."""
        if record.bundle is None or not has_bundle(self.store, record.bundle):
            raise BadInput(f"registry {self.name!r} in {self.store.uri}: the files of record {record.number} are gone")
        return self.store.locate(f"{record.bundle.key}/{CONTENTS}").rpartition("/")[0]

    def _decode(self, number: int, content: bytes) -> RegistryRecord:
        where = f"registry {self.name!r} in {self.store.uri}: record {number}"
        fields = unseal(content, where=where)
        try:
            record = RegistryRecord.model_validate(fields)
        except ValidationError as error:
            raise Damaged(f"{where}: its seal is right but it is no record: {error}") from error
        if record.number != number:
            raise Damaged(f"{where}: it says that it is {record.number}")
        return record


def champion_of(records: Sequence[RegistryRecord]) -> RegistryRecord | None:
    """The last of the records that says who is champion."""
    return next((record for record in reversed(records) if record.is_champion), None)


def waiting_among(records: Sequence[RegistryRecord]) -> list[RegistryRecord]:
    """The proposals that were compared with the champion, and that nobody has refused."""
    champion, refused = champion_of(records), {record.run for record in records if record.kind == "refuse"}
    proposed = [record for record in records if record.kind == "proposal" and record.run not in refused]
    return [record for record in proposed if record.previous == (0 if champion is None else champion.number)]


def open_registry(store_uri: str, name: str) -> Registry:
    """Open the registry of that name in a store of runs; nothing is written before the first record."""
    return Registry(open_store(f"{store_uri.rstrip('/')}/{REGISTRIES}/{name}"), name)


def registries(store_uri: str) -> list[str]:
    """Names of the registries of a store."""
    return open_store(store_uri).children(REGISTRIES)


def known_registry(store_uri: str, name: str) -> Registry:
    """Open a registry that has a record. Raises BadInput with the names of those that there are."""
    names = registries(store_uri)
    if name not in names:
        raise BadInput(f"registry {name!r}: expected one in {store_uri!r}, found {', '.join(names) or 'none'}")
    return open_registry(store_uri, name)
