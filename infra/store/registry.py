"""Registries: the versions of a policy that was retrained, as numbered records that never change.

A record is put under the next number if nobody has it, so of many writers exactly one wins each. The champion is what
the highest record says that promotes or rolls back: there is no pointer that could be torn, lost or moved by two.

After each record comes an entry of the chain, which names the record and the entry before by their digests. A newest
record that is deleted is missed by its entry; otherwise the champion before would silently be champion again.
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
"""Folder of a store in which registries lie beside the runs."""
POLICIES: Final = "policies"
"""Prefix of their bundles in a registry."""
RETRAINS: Final = "retrains"
"""Folder of a registry in which it says how each retrain began."""
_RECORDS: Final = "records/"
_CHAIN: Final = "chain/"

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


class RegistryLink(Settings):
    """Entry of a registry's chain, which is written after the record of the same number."""

    number: int
    """Number of the record."""
    record: str
    """BLAKE3 of the record's file."""
    previous: str
    """BLAKE3 of the entry before, or an empty string in the first entry."""


MakeRecord = Callable[[int, RegistryRecord | None], RegistryRecord | None]
"""Makes a record of its number and of the one that says who is champion, or none."""


class Registry:
    """The versions under one name of a store."""

    def __init__(self, store: Store, name: str) -> None:
        self.store, self.name = store, name

    def records(self) -> list[RegistryRecord]:
        """Return all records in order. Raises Damaged if one is missing, torn, replaced or out of its place."""
        return [self._decode(number, content) for number, content in enumerate(self._contents(), start=1)]

    def check_chain(self) -> Iterator[str]:
        """Yield a line per entry of the chain that is missing or names other records than there are."""
        contents, numbers = self._contents(), _numbers(self.store, _CHAIN)
        expected = _links(contents)
        for number in range(1, max(numbers, default=0) + 1):
            key = f"{_CHAIN}{number:06d}.json"
            if number not in numbers:
                yield f"registry {self.name!r} in {self.store.uri}: {key!r} is missing"
            elif self.store.read(key) != expected[number - 1]:
                yield f"registry {self.name!r} in {self.store.uri}: {key!r} names another record or another entry"

    def unprotected(self) -> int:
        """Number of the newest record if no entry of the chain names it, so that its loss would not be noticed; or 0.

        Registries of an older Rheostat have no chain. The next record adds the entries of all.
        """
        numbers, newest = _numbers(self.store, _CHAIN), max(_numbers(self.store, _RECORDS), default=0)
        return newest if newest > max(numbers, default=0) else 0

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
            if record is None or self.store.put(_key(record.number), seal(record.model_dump(mode="json"))):
                self._extend_chain()
                return record

    def locate(self, record: RegistryRecord) -> str:
        """Say where the policy of a record lies: a path, or an address. Raises BadInput where its files are gone."""
        if record.bundle is None or not has_bundle(self.store, record.bundle):
            raise BadInput(f"registry {self.name!r} in {self.store.uri}: the files of record {record.number} are gone")
        return self.store.locate(f"{record.bundle.key}/{CONTENTS}").rpartition("/")[0]

    def _contents(self) -> list[bytes]:
        """Return the files of all records in order, after a look at the chain, which names at least the newest.

        The chain is listed first: a record is there before its entry is.
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
                self._decode(number, content)  # which says what is wrong with a torn one
            raise Damaged(
                f"{where}: the records are not those that the chain names: one was replaced; bring them back from a "
                "copy of the registry"
            )
        return contents

    def _extend_chain(self) -> None:
        """Write the entries that are missing; processes that do so at the same time write the same."""
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
    """Return the files of the chain's entries for the files of all records: they follow from these alone."""
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


def _key(number: int) -> str:
    return f"{_RECORDS}{number:06d}.json"
