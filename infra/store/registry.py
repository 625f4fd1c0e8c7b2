"""Registries: the versions of a retrained policy, as numbered records that never change.

A record is written under the next free number, so exactly one of several writers gets each number. The champion is
determined by the highest record that promotes or rolls back. There is no pointer that could be torn, lost or moved by
two writers. After each record an entry of the chain is written, which contains the digests of the record and of the
previous entry. If the newest record is deleted, its entry shows the loss. Otherwise the previous champion would
silently be champion again.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from blake3 import blake3
from pydantic import JsonValue, ValidationError

from infra.config import Settings
from infra.errors import BadInput, Damaged
from infra.store.bundles import CONTENTS, BundleRef, has_bundle
from infra.store.checksums import seal, unseal
from infra.store.storage import Store, open_store

REGISTRIES: Final = "registry"
"""Folder of a store with its registries, next to the runs."""
POLICIES: Final = "policies"
"""Prefix of the policy bundles in a registry."""
RETRAINS: Final = "retrains"
"""Folder of a registry with one record per retrain of how the retrain began."""
_RECORDS: Final = "records/"
_CHAIN: Final = "chain/"

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
    """Number of iterations after which the run had this policy."""
    previous: int = 0
    """Number of the record that had set the champion until then, or 0 if there was no champion."""
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
        """Whether the record sets the champion."""
        return self.kind in ("promote", "rollback")


class RegistryLink(Settings):
    """Entry of a registry's chain. It is written after the record with the same number."""

    number: int
    """Number of the record."""
    record: str
    """BLAKE3 of the record's file, in hexadecimal."""
    previous: str
    """BLAKE3 of the previous entry, or an empty string in the first entry."""


MakeRecord = Callable[[int, RegistryRecord | None], RegistryRecord | None]
"""Function that builds a record from its number and the champion's record, or returns None to write nothing."""


class Registry:
    """Registry with one name in a store."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name

    def records(self) -> list[RegistryRecord]:
        """Return all records in order. Raises Damaged if a record is missing, torn, replaced or under the
        wrong number."""
        return [self._decode(number, content) for number, content in enumerate(self._contents(), start=1)]

    def check_chain(self) -> Iterator[str]:
        """Yield a line for each entry of the chain that is missing or does not match the records."""
        contents, numbers = self._contents(), _numbers(self.store, _CHAIN)
        expected = _links(contents)
        for number in range(1, max(numbers, default=0) + 1):
            key = f"{_CHAIN}{number:06d}.json"
            if number not in numbers:
                yield f"registry {self.name!r} in {self.store.uri}: {key!r} is missing"
            elif self.store.read(key) != expected[number - 1]:
                yield f"registry {self.name!r} in {self.store.uri}: {key!r} names another record or another entry"

    def unprotected(self) -> int:
        """Return the number of the newest record if the chain does not cover it, so that its loss would not be noticed,
        or 0.

        Registries of older versions have no chain. The next record adds the entries of all records.
        """
        numbers, newest = _numbers(self.store, _CHAIN), max(_numbers(self.store, _RECORDS), default=0)
        return newest if newest > max(numbers, default=0) else 0

    def champion(self) -> RegistryRecord | None:
        """Return the record that set the champion, or None before the first promotion."""
        return champion_of(self.records())

    def canary(self) -> RegistryRecord | None:
        """Return the newest proposal that waits for a decision, or the champion's record if no proposal waits."""
        records = self.records()
        return next(reversed(waiting_among(records)), champion_of(records))

    def append(self, make: MakeRecord) -> RegistryRecord | None:
        """Append the record that `make` builds, and return it. If `make` returns None, nothing is written.

        If another process writes the next number first, `make` is called again with the new number and champion.
        """
        while True:
            records = self.records()
            record = make(len(records) + 1, champion_of(records))
            if record is None or self.store.put(_key(record.number), seal(record.model_dump(mode="json"))):
                self._extend_chain()
                return record

    def locate(self, record: RegistryRecord) -> str:
        """Return the path or address of a record's policy. Raises BadInput if its files were deleted."""
        if record.bundle is None or not has_bundle(self.store, record.bundle):
            raise BadInput(f"registry {self.name!r} in {self.store.uri}: the files of record {record.number} are gone")
        return self.store.locate(f"{record.bundle.key}/{CONTENTS}").rpartition("/")[0]

    def _contents(self) -> list[bytes]:
        """Return the files of all records in order, after a comparison with the newest entry of the chain.

        The chain is listed first, because a record is written before its entry. Raises Damaged if a record is missing.
        """
        where = f"registry {self.name!r} in {self.store.uri}"
        named, numbers = max(_numbers(self.store, _CHAIN), default=0), _numbers(self.store, _RECORDS)
        for number in range(1, max(named, *numbers, 0) + 1):
            if number not in numbers:
                raise Damaged(
                    f"{where}: record {number} is missing; bring {_key(number)!r} back from a copy of the registry"
                )
        contents = [self.store.read(_key(number)) for number in numbers]
        if named and self.store.read(f"{_CHAIN}{named:06d}.json") != _links(contents)[named - 1]:
            for number, content in enumerate(contents, start=1):
                self._decode(number, content)  # raises an error that explains what is wrong with a torn record
            raise Damaged(
                f"{where}: the records are not those that the chain names: one was replaced; bring them back from a "
                "copy of the registry"
            )
        return contents

    def _extend_chain(self) -> None:
        """Write the missing entries of the chain. Processes that do this at the same time write the same entries."""
        contents, written = self._contents(), _numbers(self.store, _CHAIN)
        for number, link in enumerate(_links(contents), start=1):
            if number not in written:
                self.store.put(f"{_CHAIN}{number:06d}.json", link)

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


def _links(contents: Sequence[bytes]) -> list[bytes]:
    """Build the files of all entries of the chain from the files of all records."""
    links, previous = list[bytes](), ""
    for number, content in enumerate(contents, start=1):
        link = RegistryLink(number=number, record=blake3(content).hexdigest(), previous=previous)
        links.append(seal(link.model_dump(mode="json")))
        previous = blake3(links[-1]).hexdigest()
    return links


def _numbers(store: Store, folder: str) -> list[int]:
    """Return the sorted numbers of the files in a folder of the registry."""
    names = (name.removesuffix(".json") for name in store.children(folder.rstrip("/")))
    return sorted(int(name) for name in names if name.isdecimal())


def champion_of(records: Sequence[RegistryRecord]) -> RegistryRecord | None:
    """Return the last record that sets the champion, or None."""
    return next((record for record in reversed(records) if record.is_champion), None)


def waiting_among(records: Sequence[RegistryRecord]) -> list[RegistryRecord]:
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


def known_registry(store_uri: str, name: str) -> Registry:
    """Open an existing registry. Raises BadInput with the names of the existing registries if there is none."""
    names = registries(store_uri)
    if name not in names:
        raise BadInput(f"registry {name!r}: expected one in {store_uri!r}, found {', '.join(names) or 'none'}")
    return open_registry(store_uri, name)


def _key(number: int) -> str:
    return f"{_RECORDS}{number:06d}.json"
