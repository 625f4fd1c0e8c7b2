"""The chain of a run: for each finished part a record, which names all that it consists of, and the record before.

A manifest or an entry of the journal that is deleted, or replaced with a right seal, is missed by the record of its
part; such a record is missed by its successor. The last one alone has none: nothing in a store proves its own end.

What no manifest names is deleted, and left out of copies, only after `complete_manifests` has found none missing.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from threading import Lock

from infra.errors import BadInput, Damaged
from infra.store.checksums import SealedRecord, record_digest
from infra.store.manifests import Manifest
from infra.store.runs import JOURNAL, Run, records

_CHAIN = "chain/"
_PLACEMENT = "placement/"
"""Prefix of the journal's entries about the placement of a part, which are written after the plan of that part."""
_NAME = re.compile(r"(\d{6,})-(.+)\.json")


class Link(SealedRecord):
    """What a finished part of a run consists of."""

    label = "record of the chain"

    part: str
    """Such as `it-0003`."""
    follows: str
    """Key of the record before; empty for the first."""
    previous: str
    """Digest of the record before."""
    manifests: dict[str, str]
    """Digests by key."""
    journal: dict[str, str]
    """Digests of the journal's entries by key."""

    @property
    def digest(self) -> str:
        """What the record that follows names."""
        return record_digest(self.as_recorded())


def linked_parts(run: Run) -> list[str]:
    """Return the parts that have a record, in the chain's order."""
    return [name[2] for name in _names(run)]


class Chain:
    """The chain of a held run, for the one process that appends to it: what is there is read once."""

    def __init__(self, run: Run) -> None:
        self._run, self._turn = run, Lock()
        self._parts: set[str] = set()
        self._last = ("", "")
        """Key and digest of the last record."""
        self._is_read = False

    def link(self, part: str, *, journal: Sequence[str] = ()) -> None:
        """Append the record of a part, unless it has one: of its manifests, and of the journal below these prefixes.

        The first record names all that there is. Threads take turns.
        """
        with self._turn:
            self._append(part, journal)

    def _append(self, part: str, journal: Sequence[str]) -> None:
        self._read()
        if part in self._parts:
            return
        run, (follows, previous) = self._run, self._last
        number = 1 + int(follows.removeprefix(_CHAIN).partition("-")[0]) if follows else 1
        manifests = run.manifests(f"{part}/" if follows else "")
        prefixes = journal if follows else [""]
        entries = {key: entry for prefix in prefixes for key, entry in run.journal(prefix).items()}
        link = Link(
            part=part,
            follows=follows,
            previous=previous,
            manifests={manifest.key: manifest.digest for manifest in manifests},
            journal={key: record_digest(entry) for key, entry in entries.items()},
        )
        key = f"{_CHAIN}{number:06d}-{part}.json"
        run.put_record(key, link)
        self._parts.add(part)
        self._last = (key, link.digest)

    def _read(self) -> None:
        if self._is_read:
            return
        names = _names(self._run)
        self._parts = {name[2] for name in names}
        if names:
            last = f"{_CHAIN}{names[-1][0]}"
            self._last = (last, _read(self._run, last).digest)
        self._is_read = True


def check_chain(run: Run) -> Iterator[str]:
    """Compare every record with its predecessor and with what it names; yield one line per problem."""
    return _check_links(run, {manifest.digest for manifest in run.manifests()})


def complete_manifests(run: Run) -> list[Manifest]:
    """Return the committed manifests of a run that nobody writes to.

    Raises Damaged, with the first problem, if a manifest, a record of the chain or an entry of the journal is missing
    although another record names it. A caller may then conclude that what these manifests do not name is garbage.
    """
    placed = [path.removeprefix(JOURNAL + _PLACEMENT) for path in records(run.store, JOURNAL + _PLACEMENT)]
    committed = run.manifests()
    problems = _find_missing(run, committed, placed)
    if (problem := next(problems, None)) is not None:
        raise Damaged(
            f"run {run.name!r} in {run.store.uri}: {problem}: records of the run are missing, so nobody can tell what "
            "it still needs; restore them from a copy of the run, then give the command again"
        )
    return committed


def _find_missing(run: Run, committed: Sequence[Manifest], placed: Iterable[str]) -> Iterator[str]:
    """Yield a line per record that is missing and that the chain, a manifest or the journal names."""
    digests = {manifest.digest for manifest in committed}
    yield from _check_links(run, digests)
    for manifest in committed:
        for parent in manifest.parents:
            if parent not in digests:
                yield f"no manifest has the digest {parent}, which manifest {manifest.key!r} names as its parent"
    keys = [manifest.key for manifest in (*committed, *run.left())]
    for part in sorted({path.rpartition("/")[0] for path in placed} - {""}):
        if not any(key.startswith(f"{part}/") for key in keys):
            yield f"no manifest of {part!r} is there, whose placement the journal records"


def _check_links(run: Run, digests: Collection[str]) -> Iterator[str]:
    last, previous = "", ""
    for name in _names(run):
        key = f"{_CHAIN}{name[0]}"
        try:
            link = _read(run, key)
        except (Damaged, BadInput) as error:
            yield str(error)
            return
        if link.follows != last:
            yield f"{link.follows!r}: the record is missing, which {key!r} follows"
        elif link.previous != previous:
            yield f"{key!r}: expected {previous or 'none'} as the digest of {last!r}, found {link.previous}"
        last, previous = key, link.digest
        yield from (
            f"{key!r}: names manifest {manifest!r} with digest {digest}, which is gone or another"
            for manifest, digest in link.manifests.items()
            if digest not in digests
        )
        yield from _check_journal(run, link, key)


def _check_journal(run: Run, link: Link, key: str) -> Iterator[str]:
    for noted, digest in link.journal.items():
        entry = run.noted(noted)
        if entry is None or record_digest(entry) != digest:
            yield f"{key!r}: names 'journal/{noted}.json' with digest {digest}, which is gone or another"


def _read(run: Run, key: str) -> Link:
    return Link.unseal(run.store.read(key), where=f"{key!r} in {run.store.uri}")


def _names(run: Run) -> list[re.Match[str]]:
    """Name, number and part of every record, in order; what others left in the folder is none."""
    found = (_NAME.fullmatch(name) for name in run.store.children(_CHAIN.rstrip("/")))
    return sorted((name for name in found if name is not None), key=lambda name: int(name[1]))
