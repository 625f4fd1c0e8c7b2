"""Chain of a run: a hash-linked list of records, with which missing or replaced manifests are detected.

The chain has one record for each finished part of a run, such as the iteration `it-0003`. The record contains the
digests of the manifests and journal entries of this part, and the digest of the previous chain record. A deleted or
replaced manifest is detected through the chain record of its part, and a deleted chain record through the next one.
Only the loss of the last chain record cannot be detected. Before garbage is deleted or a run is copied,
`complete_manifests` checks that no record is missing.

Each rescoring and recredit of a run has a separate chain, in the folder `chain/rescore/NAME/` or
`chain/recredit/NAME/`, so that the chain of the run itself does not depend on them.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from threading import Lock

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.checksums import SealedRecord, record_digest
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import JOURNAL, Run, records

_CHAIN = "chain/"
_PLACEMENT = "placement/"
"""Prefix of the keys of journal entries (stored measurements and decisions) about placement, that is, about which role
got which workers."""
_NAME = re.compile(r"(\d{6,})-(.+)\.json")


class Link(SealedRecord):
    """Record of the chain, a hash-linked list of the finished parts of a run (such as iterations). The record contains
    digests of all records of one part, so that missing or changed records are detected."""

    label = "record of the chain"

    part: str
    """Name of the finished part of the run, for example `it-0003`."""
    follows: str
    """Key of the previous chain record, or an empty string if this record is the first."""
    previous: str
    """Digest of the previous chain record, or an empty string if this record is the first."""
    manifests: dict[str, str]
    """Digests of the part's manifests (records of results), by key."""
    journal: dict[str, str]
    """Digests of the part's journal entries (stored measurements and decisions), by key."""

    @property
    def digest(self) -> str:
        """Digest of this record, which the next chain record contains."""
        return record_digest(self.as_recorded())


def linked_parts(run: Run) -> list[str]:
    """Return the names of the finished parts of a run, such as `it-0003`, in the order of the chain, which is the
    hash-linked list of these parts."""
    return [name[2] for name in _names(run)]


class Chain:
    """Writer of the chain of a run, which must be locked. The chain is a hash-linked list with one record for each
    finished part of the run, such as an iteration.

    `below` is the prefix of the keys to which the chain is limited, such as `rescore/strict/` for the chain of a
    rescoring. Only one process appends to a chain. It reads the existing records once.
    """

    def __init__(self, run: Run, below: str = "") -> None:
        self._run, self._below, self._turn = run, below, Lock()
        self._parts: set[str] = set()
        self._last = ("", "")
        """Key and digest of the last chain record."""
        self._is_read = False

    def link(self, part: str, *, journal: Sequence[str] = ()) -> None:
        """Append a record for a finished part of the run, such as an iteration, unless the part already has one.
        Several threads may call this.

        The record lists the manifests of the part, and the journal entries whose keys start with one of the prefixes in
        `journal`. The first record of a chain lists all existing manifests and journal entries, or those below the
        prefix to which the chain is limited.
        """
        with self._turn:
            self._append(part, journal)

    def _append(self, part: str, journal: Sequence[str]) -> None:
        self._read()
        if part in self._parts:
            return
        run, (follows, previous) = self._run, self._last
        folder = f"{_CHAIN}{self._below}"
        number = 1 + int(follows.removeprefix(folder).partition("-")[0]) if follows else 1
        manifests = run.manifests(f"{self._below}{part}/" if follows else self._below)
        prefixes = journal if follows else [self._below]
        entries = {key: entry for prefix in prefixes for key, entry in run.journal(prefix).items()}
        link = Link(
            part=part,
            follows=follows,
            previous=previous,
            manifests={manifest.key: manifest.digest for manifest in manifests},
            journal={key: record_digest(entry) for key, entry in entries.items()},
        )
        key = f"{folder}{number:06d}-{part}.json"
        run.put_record(key, link)
        self._parts.add(part)
        self._last = (key, link.digest)

    def _read(self) -> None:
        if self._is_read:
            return
        names = _names(self._run, self._below)
        self._parts = {name[2] for name in names}
        if names:
            last = f"{_CHAIN}{self._below}{names[-1][0]}"
            self._last = (last, _read(self._run, last).digest)
        self._is_read = True


def check_chain(run: Run) -> Iterator[str]:
    """Check the chain of a run, the hash-linked list of its finished parts. Yield one line for each missing or changed
    record: of the chain itself, of a result, or of the journal (measurements and decisions)."""
    return _check_links(run, {manifest.digest for manifest in run.manifests()})


def complete_manifests(run: Run) -> list[Manifest]:
    """Return all manifests (records of results) of a run, after checking that no record is missing. No process may
    write to the run in the meantime.

    Raises Damaged with the first problem if a manifest, a chain record or a journal entry is missing although another
    record refers to it. Otherwise, all objects that the returned manifests do not name are garbage.
    """
    placed = [path.removeprefix(JOURNAL + _PLACEMENT) for path in records(run.store, JOURNAL + _PLACEMENT)]
    committed = run.manifests()
    problems = _find_missing(run, committed, placed)
    if (problem := next(problems, None)) is not None:
        raise Damaged(
            f"run {run.name!r} in {run.store.uri}: {problem}. Without this record it is unknown which objects the "
            "run still needs. Restore the record from a copy of the run, then run this command again."
        )
    return committed


def _find_missing(run: Run, committed: Sequence[Manifest], placed: Iterable[str]) -> Iterator[str]:
    """Yield one line for each missing record to which the chain, a manifest (record of a result) or the journal refers.
    `committed` are all manifests of the run, and `placed` are keys of placement entries in the journal."""
    digests = {manifest.digest for manifest in committed}
    yield from _check_links(run, digests)
    for manifest in committed:
        if run.inherits(manifest.key):  # a what-if run shares rollouts without the policies that generated them
            continue
        for parent in manifest.parents:
            if parent not in digests:
                yield f"manifest {manifest.key!r} names a parent with digest {parent}, but no manifest has this digest"
    keys = [manifest.key for manifest in (*committed, *run.leftover_manifests())]
    for part in sorted({path.rpartition("/")[0] for path in placed} - {""}):
        if not any(key.startswith(f"{part}/") for key in keys):
            yield f"the journal has placement entries of {part!r}, but no manifest of {part!r} exists"


def _check_links(run: Run, digests: Collection[str]) -> Iterator[str]:
    """Check the chain of a run and the chains of its rescorings and recredits."""
    paths = [path.removeprefix(_CHAIN) for path in records(run.store, _CHAIN)]
    for below in ["", *sorted({f"{folder}/" for path in paths if (folder := path.rpartition("/")[0])})]:
        yield from _check_one_chain(run, below, digests)


def _check_one_chain(run: Run, below: str, digests: Collection[str]) -> Iterator[str]:
    last, previous = "", ""
    for name in _names(run, below):
        key = f"{_CHAIN}{below}{name[0]}"
        try:
            link = _read(run, key)
        except (Damaged, BadInput) as error:
            yield str(error)
            return
        if link.follows != last:
            yield f"the record {link.follows!r} is missing, which {key!r} names as the previous record"
        elif link.previous != previous:
            yield f"{key!r} names digest {link.previous} for {last!r}, but its digest is {previous or 'none'}"
        last, previous = key, link.digest
        yield from (
            f"{key!r} names manifest {manifest!r} with digest {digest}, but it is missing or has changed"
            for manifest, digest in link.manifests.items()
            if digest not in digests
        )
        yield from _check_journal(run, link, key)


def _check_journal(run: Run, link: Link, key: str) -> Iterator[str]:
    for entry_key, digest in link.journal.items():
        entry = run.find_entry(entry_key)
        if entry is None or record_digest(entry) != digest:
            yield f"{key!r} names 'journal/{entry_key}.json' with digest {digest}, but it is missing or has changed"


def _read(run: Run, key: str) -> Link:
    return Link.unseal(run.store.read(key), where=f"{key!r} in {run.store.uri}")


def _names(run: Run, below: str = "") -> list[re.Match[str]]:
    """Return a regular-expression match for each file name of a chain, in order. Group 1 is the number of the record,
    and group 2 is the name of the part. `below` is the prefix of keys to which the chain is limited."""
    matches = (_NAME.fullmatch(name) for name in run.store.children(f"{_CHAIN}{below}".rstrip("/")))
    return sorted((name for name in matches if name is not None), key=lambda name: int(name[1]))
