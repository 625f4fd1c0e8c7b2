"""Forks: runs that begin at an iteration of another run and share its stored objects, which are not copied.

The directory of a fork contains only the objects that the fork has written. Its record `fork.json` lists the objects
that it shares, by the run that stores them. `open_shared` combines both into one store, so that all readers of a run
also read forks. Each run that stores shared objects contains a small file `forks/NAME.json`, the mark of the fork NAME,
and does not delete an object as long as a fork shares it.

A fork is created in this order: its record, the marks, and then the check that no shared object was deleted. A run that
deletes objects first records the deletion and then reads the marks. So either the deleting run finds the mark and keeps
the objects, or the fork finds the record of the deletion and is not created.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, JsonValue

from rheostat.infra.config import Settings
from rheostat.infra.errors import Damaged
from rheostat.infra.store.checksums import SealedRecord
from rheostat.infra.store.contracts import Entry, Lease, LockState, Store, StoreTraits

FORK: Final = "fork.json"
"""Key of the record of a fork, in the directory of the fork."""
FORKS: Final = "forks/"
"""Prefix of the keys of marks, in the directory of a run whose objects are shared. The rest is the name of a fork."""
_DELETED: Final = "manifests/retention/run.json"
"""Key of the record that all data of a run was deleted."""


class SharedPart(Settings):
    """Consecutive shared iterations that were computed with one configuration."""

    iteration: Annotated[int, Field(ge=0)]
    """Last iteration of the part."""
    fingerprint: str
    """Fingerprint of the configuration."""
    config: dict[str, JsonValue]
    """Configuration with which the iterations were computed."""


class Fork(SealedRecord):
    """Record of a fork: the iteration of another run at which it begins, and the objects that it shares."""

    label = "record of a fork"

    parent: str
    """Name of the run from which the fork was made."""
    iteration: Annotated[int, Field(ge=0)]
    """Last iteration that the fork shares with its parent. If it is 0, only results from before the first iteration are
    shared, such as the initial policy and the prompts."""
    parts: list[SharedPart]
    """Shared iterations, in order. There are several parts if the parent is a fork itself."""
    shared: dict[str, list[str]]
    """Sorted keys of the shared objects, by name of the run that stores them. In a copy of the fork, which contains all
    objects itself, the only name is the empty string."""

    @property
    def point(self) -> str:
        """Run and iteration at which the fork begins, in the form `demo@12`."""
        return f"{self.parent}@{self.iteration}"

    def build_copy_record(self) -> "Fork":
        """Return the record for a copy of the fork that contains all objects."""
        return self.model_copy(update={"shared": {"": sorted(key for keys in self.shared.values() for key in keys)}})

    def inherits(self, key: str) -> bool:
        """Return whether an object was written by an earlier run and not by the fork. Also true in a copy of the
        fork, which contains the object itself."""
        return any(_has(keys, key) for keys in self.shared.values())


@dataclass(frozen=True, slots=True)
class SharedStore:
    """Store of a fork: its own objects, and objects of other runs that it shares. New objects are always written to the
    fork's own store. Shared objects are never deleted."""

    own: Store
    fork: Fork
    stores: Mapping[str, Store]
    """Stores of the runs whose objects are shared, by the name of the run."""

    @property
    def traits(self) -> StoreTraits:
        return self.own.traits

    @property
    def uri(self) -> str:
        return self.own.uri

    def requests(self) -> Mapping[str, int]:
        counts = [store.requests() for store in (self.own, *self.stores.values())]
        return {verb: sum(each.get(verb, 0) for each in counts) for each in counts for verb in each}

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        durable: bool = True,
        cache: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> bool:
        if self.is_shared(key):
            if not self.exists(key):
                raise Damaged(
                    f"{key!r} is missing from {self.owner(key).uri}, with which {self.uri} shares it. Restore the file "
                    "from a copy of that run."
                )
            return False
        return self.own.put(key, data, durable=durable, cache=cache, on_progress=on_progress)

    def sync(self, key: str) -> None:
        if not self.is_shared(key):  # shared objects are durable already
            self.own.sync(key)

    def find(self, key: str) -> bytes | None:
        return self.owner(key).find(key)

    def read(self, key: str) -> bytes:
        return self.owner(key).read(key)

    def entries(self, prefix: str) -> list[Entry]:
        found = self.own.entries(prefix)
        for name, store in self.stores.items():
            if keys := {*_below(self.fork.shared[name], prefix)}:
                found += [entry for entry in store.entries(prefix) if entry.key in keys]
        return sorted(found, key=lambda entry: entry.key)

    def children(self, folder: str) -> list[str]:
        prefix = f"{folder}/" if folder else ""
        shared = (key for name in self.stores for key in _below(self.fork.shared[name], prefix))
        return sorted({*self.own.children(folder), *(key.removeprefix(prefix).partition("/")[0] for key in shared)})

    def strays(self) -> list[str]:
        return self.own.strays()

    def locate(self, key: str) -> str:
        return self.owner(key).locate(key)

    def now(self) -> datetime:
        return self.own.now()

    def check(self) -> None:
        self.own.check()

    def exists(self, key: str) -> bool:
        return self.owner(key).exists(key)

    def exist(self, keys: Sequence[str]) -> list[bool]:
        found: dict[str, bool] = {}
        for store, some in self._grouped(keys):
            found |= dict(zip(some, store.exist(some), strict=True))
        return [found[key] for key in keys]

    def delete(self, key: str) -> None:
        if not self.is_shared(key):
            self.own.delete(key)

    def local_path(self, key: str) -> Path:
        return self.owner(key).local_path(key)

    def cached_copy(self, key: str) -> Path | None:
        return self.owner(key).cached_copy(key)

    def fetch(self, keys: Iterable[str], *, room: int | None = None) -> None:
        for store, some in self._grouped(keys):
            store.fetch(some, room=room)

    def staging(self) -> Store:
        return self.own.staging()

    def scratch(self) -> AbstractContextManager[Path]:
        return self.own.scratch()

    def lock(self, key: str) -> AbstractContextManager[Lease | None]:
        return self.own.lock(key)

    def lock_state(self, key: str) -> LockState:
        return self.own.lock_state(key)

    def is_shared(self, key: str) -> bool:
        """Return whether an object is stored by another run."""
        return any(_has(self.fork.shared[name], key) for name in self.stores)

    def owner(self, key: str) -> Store:
        """Return the store that contains an object, or would contain it: that of another run if the object is
        shared."""
        return next((store for name, store in self.stores.items() if _has(self.fork.shared[name], key)), self.own)

    def _grouped(self, keys: Iterable[str]) -> Iterator[tuple[Store, list[str]]]:
        groups: dict[int, tuple[Store, list[str]]] = {}
        for key in keys:
            store = self.owner(key)
            groups.setdefault(id(store), (store, []))[1].append(key)
        yield from groups.values()


def open_shared(own: Store, open_run_store: Callable[[str], Store]) -> Store:
    """Return the store of a run together with the objects that it shares, if the run is a fork, otherwise `own`.
    `open_run_store` opens the directory of another run of the same store by its name. Raises Damaged if the record of
    the fork is not valid."""
    content = own.find(FORK)
    if content is None:
        return own
    fork = Fork.unseal(content, where=f"{FORK!r} in {own.uri}")
    return SharedStore(own, fork, {name: open_run_store(name) for name in fork.shared if name})


def fork_of(store: Store) -> Fork | None:
    """Return the record of a fork if a store belongs to one, otherwise None."""
    return store.fork if isinstance(store, SharedStore) else None


def is_shared(store: Store, key: str) -> bool:
    """Return whether an object of a run is stored by another run, from which the run was forked."""
    return isinstance(store, SharedStore) and store.is_shared(key)


def owner_of(store: Store, key: str) -> Store:
    """Return the store that contains an object: that of another run if the object is shared, otherwise `store`."""
    return store.owner(key) if isinstance(store, SharedStore) else store


def forks_of(store: Store, name: str, open_run_store: Callable[[str], Store]) -> dict[str, Fork]:
    """Return the forks that share objects of a run, by their names. Forks whose data was deleted are left out. `store`
    and `name` are those of the run, and `open_run_store` opens the directory of another run by its name."""
    found: dict[str, Fork] = {}
    for child in store.children(FORKS.rstrip("/")):
        other = child.removesuffix(".json")
        directory = open_run_store(other)
        content = directory.find(FORK)
        if content is not None and not directory.exists(_DELETED):
            fork = Fork.unseal(content, where=f"{FORK!r} in {directory.uri}")
            if name in fork.shared:  # else the name was used again
                found[other] = fork
    return found


def _has(keys: Sequence[str], key: str) -> bool:
    at = bisect_left(keys, key)
    return at < len(keys) and keys[at] == key


def _below(keys: Sequence[str], prefix: str) -> Iterator[str]:
    """Yield the keys of a sorted sequence that start with a prefix."""
    for at in range(bisect_left(keys, prefix), len(keys)):
        if not keys[at].startswith(prefix):
            return
        yield keys[at]
