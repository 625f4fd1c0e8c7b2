"""Numbered records in a folder, with a chain (hash-linked list) of entries that reveals lost records. Records never
change.

A record is written under the next number if this number is free. If several processes write at the same time, exactly
one of them gets the number. After each record, a chain entry is written, with the digests of the record and of the
previous chain entry. If the newest record is deleted, its chain entry still exists. Readers therefore detect the loss,
instead of using the previous record.
"""

from collections.abc import Iterator, Sequence

from blake3 import blake3

from rheostat.infra.config import Settings
from rheostat.infra.errors import Damaged
from rheostat.infra.store.checksums import seal, unseal
from rheostat.infra.store.contracts import Store

_RECORDS = "records/"
_CHAIN = "chain/"


class ChainEntry(Settings):
    """Entry that protects one numbered record against loss and change. It contains digests of the record and of the
    previous entry."""

    number: int
    """Number of the record that this entry protects."""
    record: str
    """BLAKE3 digest of the record's file."""
    previous: str
    """BLAKE3 digest of the previous entry, or an empty string if this entry is the first."""


class NumberedRecords:
    """List of records with the numbers 1, 2, 3, … in a store. A hash chain of entries reveals lost or changed records.
    `owner` describes the list in messages."""

    def __init__(self, store: Store, owner: str) -> None:
        self.store, self.where = store, f"{owner} in {store.uri}"

    def read(self) -> list[bytes]:
        """Return the contents of all records in order.

        Raises Damaged if a record is missing, or differs from the digest in its chain entry.
        """
        # The chain is listed first: a writer publishes a record before its entry.
        named, numbers = max(self._numbers(_CHAIN), default=0), self._numbers(_RECORDS)
        for number in range(1, max(named, *numbers, 0) + 1):
            if number not in numbers:
                raise Damaged(
                    f"{self.where}: record {number} is missing. Restore {_key(number)!r} from a copy of the store."
                )
        contents = [self.store.read(_key(number)) for number in numbers]
        if named and self.store.read(f"{_CHAIN}{named:06d}.json") != _entries(contents)[named - 1]:
            for number, content in enumerate(contents, start=1):
                unseal(content, where=f"{self.where}: record {number}")  # raises Damaged with the name of the record
            raise Damaged(
                f"{self.where}: a record differs from the one that the chain names. Restore the records from a copy of "
                "the store."
            )
        return contents

    def put(self, number: int, content: bytes) -> bool:
        """Write the record with this number, and the chain entry that protects it. Return False and write nothing if
        another writer has already used the number."""
        if not self.store.put(_key(number), content):
            return False
        self._extend_chain()
        return True

    def check_chain(self) -> Iterator[str]:
        """Yield one line for each chain entry that is missing or does not match its record."""
        contents, numbers = self.read(), self._numbers(_CHAIN)
        expected = _entries(contents)
        for number in range(1, max(numbers, default=0) + 1):
            key = f"{_CHAIN}{number:06d}.json"
            if number not in numbers:
                yield f"{self.where}: {key!r} is missing"
            elif self.store.read(key) != expected[number - 1]:
                yield f"{self.where}: {key!r} does not match its record or the previous entry"

    def unprotected(self) -> int:
        """Return the number of the newest record if no chain entry protects it yet, otherwise 0.

        The loss of such a record would not be detected. Records that an older version of Rheostat wrote have no chain.
        When the next record is written, the missing entries of all earlier records are added.
        """
        named, newest = max(self._numbers(_CHAIN), default=0), max(self._numbers(_RECORDS), default=0)
        return newest if newest > named else 0

    def _extend_chain(self) -> None:
        """Write the chain entries that are missing. Several processes that do so at the same time write the same
        bytes."""
        contents, written = self.read(), self._numbers(_CHAIN)
        for number, entry in enumerate(_entries(contents), start=1):
            if number not in written:
                self.store.put(f"{_CHAIN}{number:06d}.json", entry)

    def _numbers(self, folder: str) -> list[int]:
        names = (name.removesuffix(".json") for name in self.store.children(folder.rstrip("/")))
        return sorted(int(name) for name in names if name.isdecimal())


def _entries(contents: Sequence[bytes]) -> list[bytes]:
    """Compute the contents of all chain entries from the contents of the records."""
    entries, previous = list[bytes](), ""
    for number, content in enumerate(contents, start=1):
        entry = ChainEntry(number=number, record=blake3(content).hexdigest(), previous=previous)
        entries.append(seal(entry.model_dump(mode="json")))
        previous = blake3(entries[-1]).hexdigest()
    return entries


def _key(number: int) -> str:
    return f"{_RECORDS}{number:06d}.json"
