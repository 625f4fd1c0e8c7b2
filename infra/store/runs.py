"""Runs: one directory of the store each, with one controller at a time and manifests that never change."""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from threading import RLock

from pydantic import JsonValue

from infra.config import Identified, difference
from infra.errors import BadInput, Conflict, Damaged, Fenced, RunChanged, RunHeld, StoreFailed
from infra.store.checksums import SealedRecord, seal, unseal
from infra.store.disk import Holding
from infra.store.epochs import Epoch, begin_epoch, newest_epoch
from infra.store.manifests import Manifest, decode_manifest
from infra.store.run_record import RECORD, RunRecord, has_results, new_record, read_record, replace_record
from infra.store.storage import Lease, Objects, Store, open_store

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
MANIFESTS, JOURNAL = "manifests/", "journal/"
LOCK, EXPECTED, ORDERS, TRACKERS = "lock", "expected/", "orders/", "trackers/"
HELD = (LOCK, EXPECTED, ORDERS, TRACKERS, "readers/")
"""Names of what live processes keep in a run for themselves, for controllers, or while they read."""
METRICS = "metrics.jsonl"
"""What a run made in numbers: the one file there that changes, since seals make it again."""
_NUMBERS = count(1)

KNOWN_MANIFESTS = 4096
"""Manifests that a process remembers of a run, some 10 kB each: those of a few iterations; others are read again."""
KNOWN_FOLDERS = 64
"""Folders of manifests of which a process remembers what is in them."""


class Run:
    """A run, open for reading; `hold` (or `join` in a process of its own) opens it for commits."""

    def __init__(self, store: Store, record: RunRecord, *, epoch: int = 0) -> None:
        self.store = store
        self.record = record
        self.epoch = epoch
        """Lease under which this process commits; 0 reads only."""
        self._lease: Lease | None = None
        self._known: OrderedDict[str, Manifest] = OrderedDict()
        """Those that were last asked for: manifests never change, and need not be read and verified each time."""
        self._alone = False
        """Whether nobody else commits under this epoch."""
        self._folders: OrderedDict[str, set[str]] = OrderedDict()
        """Keys of those folders that were last looked into, where nobody else adds any."""
        self._turn = RLock()
        """Of the threads that remember what is in the store."""
        self._epoch = Epoch(store, epoch, renewed=False)
        self._expected: dict[str, Manifest] = {}
        """Those that this process will commit, in order."""
        self._kept: dict[str, str] = {}
        """Where it keeps them meanwhile, in case it is killed."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.record.name

    def check_identity(self, config: Identified, *, besides: Collection[str] = ()) -> None:
        """Raise RunChanged, naming the settings that differ except `besides`, unless the run has the same identity."""
        recorded = self.record.config
        self._refuse(difference(config.normalize(recorded), config.identity(recorded), besides=besides))

    def _refuse(self, changes: str) -> None:
        if changes:
            raise RunChanged(
                f"run {self.name!r} in {self.store.uri} was made by another configuration: {changes}. Restore these "
                "settings to continue the run, or choose another name for a new one"
            )

    def check_free(self) -> None:
        """Raise RunHeld if a live process holds the run now."""
        with self.still():
            pass

    def holding(self) -> Holding:
        """Say who holds the run, or died with it; nothing is written."""
        return self.store.look_at(LOCK)

    @contextmanager
    def still(self) -> Iterator[Lease]:
        """Have nobody else hold the run meanwhile, without taking it for an epoch; RunHeld if a live process does."""
        with self.store.hold(LOCK) as lease:
            if lease is None:
                raise RunHeld(f"run {self.name!r} in {self.store.uri} is held by {_holder(self.store)}")
            yield lease

    @contextmanager
    def hold(self, *, alone: bool = False) -> Iterator["Run"]:
        """Take the run for this process and the next epoch; RunHeld if another live process has it.

        Who commits `alone`, with no process that joins, need not look for every manifest that is not there yet.
        """
        with self.still() as lease:
            self._lease, self.epoch, self._alone = lease, begin_epoch(self.store), alone
            self._epoch = Epoch(self.store, self.epoch, renewed=self.store.is_remote)
            try:
                yield self
            finally:
                self._lease, self.epoch, self._alone = None, 0, False
                self._folders.clear()

    def join(self, epoch: int) -> "Run":
        """Return the run for a process beside the holder: it commits under the holder's epoch until that is over."""
        newest = newest_epoch(self.store)
        if not 1 <= epoch <= newest:
            raise BadInput(f"run {self.name!r}: expected an epoch from 1 to {newest} to join, found {epoch}")
        return Run(self.store, self.record, epoch=epoch)

    def find(self, key: str) -> Manifest | None:
        """Return the manifest of that key, if it is committed, or expected in this process."""
        return self._expected.get(key) or self._committed(key)

    def _committed(self, key: str) -> Manifest | None:
        with self._turn:
            if (known := self._known.get(key)) is not None:
                return self._remember(known)
            if self._is_absent(key):
                return None
        content = self.store.find(f"{MANIFESTS}{key}.json")
        return None if content is None else self._checked(key, content)

    def has(self, key: str) -> bool:
        """Whether a manifest of that key is committed, or expected in this process; it is not read."""
        if key in self._expected or key in self._known:
            return True
        return not self._is_absent(key) and self.store.exists(f"{MANIFESTS}{key}.json")

    def _is_absent(self, key: str) -> bool:
        """Whether nobody can have committed it, as is known of those that lie deep: a batch has one for every shard."""
        folder = key.rpartition("/")[0]
        if not self._alone or "/" not in folder:
            return False
        with self._turn:  # what is committed meanwhile is remembered after the listing
            if folder not in self._folders:
                paths = records(self.store, f"{MANIFESTS}{folder}/")
                self._folders[folder] = {path.removeprefix(MANIFESTS).removesuffix(".json") for path in paths}
                while len(self._folders) > KNOWN_FOLDERS:
                    self._folders.popitem(last=False)
            return key not in self._folders[folder]

    def require(self, key: str) -> Manifest:
        """The manifest under `key`, which must be there. Raises Damaged if it is gone."""
        manifest = self.find(key)
        if manifest is None:
            raise Damaged(f"run {self.name!r}: manifest {key!r} is missing")
        return manifest

    def manifests(self, prefix: str = "") -> list[Manifest]:
        """Return the committed manifests whose key starts with the prefix, sorted by key."""
        paths = records(self.store, MANIFESTS + prefix)
        keys = sorted(path.removeprefix(MANIFESTS).removesuffix(".json") for path in paths)
        return [self.require(key) for key in keys]

    def folders(self, under: str = "") -> list[str]:
        """Return the sorted next parts of the keys of all manifests under a prefix, without looking at each.

        Such as `it-0003`; the last part of a key ends with `.json`.
        """
        return self.store.children(f"{MANIFESTS}{under}".rstrip("/"))

    def expect(self, manifest: Manifest) -> Manifest:
        """Have a manifest found in this process from now on; it is to be committed, and before what follows from it.

        If this process is killed before, the next one finds it under `left`, a power cut aside.
        """
        expected = manifest.model_copy(update={"run": self.record.fingerprint})
        self._expected[manifest.key] = expected
        kept = f"{EXPECTED}{next(_NUMBERS):06d}/{manifest.key}.json"
        if self._lease is not None and self.store.put(kept, expected.encode(), durable=False):
            self._kept[kept] = manifest.key
        return expected

    def left(self) -> Iterator[Manifest]:
        """Go through what a process before this one expected and did not commit, in order; Damaged if one is torn."""
        for path in records(self.store, EXPECTED):
            if path not in self._kept:
                key = path.removeprefix(EXPECTED).partition("/")[2].removesuffix(".json")
                if not self.has(key):
                    yield decode_manifest(self.store.read(path), key=key)

    def forget(self, *, left: bool = False) -> None:
        """Delete the copies of manifests that were expected and are committed, or of all that were `left`."""
        for path in records(self.store, EXPECTED) if left else list(self._kept):
            if self._kept.get(path) not in self._expected:
                self.store.delete(path)
                self._kept.pop(path, None)

    def expected(self) -> list[Manifest]:
        """Manifests that are found in this process and not committed yet, in the order in which they are to be."""
        return list(self._expected.values())

    def expects(self, parents: Collection[str]) -> bool:
        """Whether one of these digests is of a manifest that is not committed yet."""
        return any(manifest.digest in parents for manifest in self.expected())

    def commit(self, manifest: Manifest, *, promised: Collection[str] = ()) -> Manifest:
        """Publish a manifest and return the one that stands: this, or an equal one that another committed first.

        Bundles that are promised, by their names in it, may come later: whoever needs one can make it again.
        Conflict if a different result has the key, Fenced if a newer epoch began, Damaged if a part is not stored.
        """
        assert not self.expects(manifest.parents), f"{manifest.key}: expected a commit after those of its parents"
        manifest = manifest.model_copy(update={"run": self.record.fingerprint})
        absent = self._absent_part(manifest, promised) if self.epoch else None
        self.check_lease()
        winner = self._known.get(manifest.key) if absent is None else self._committed(manifest.key)
        if winner is None:
            if absent is not None:
                where = f"manifest {manifest.key!r} of run {self.name!r}"
                raise Damaged(f"{where}: its part {absent!r} is not in the store")
            provenance = manifest.provenance.model_copy(update={"epoch": self.epoch})
            manifest = manifest.model_copy(update={"provenance": provenance})
            if self.store.put(f"{MANIFESTS}{manifest.key}.json", manifest.encode()):
                self._expected.pop(manifest.key, None)
                self._check_overtaken(manifest, promised)
                return self._remember(manifest)
            winner = self.load(manifest.key)
        self._expected.pop(manifest.key, None)
        if winner.digest != manifest.digest:
            raise Conflict(
                f"manifest {manifest.key!r} of run {self.name!r}: {winner.digest} was committed "
                f"under epoch {winner.provenance.epoch}, epoch {self.epoch} made {manifest.digest}"
            )
        return winner

    def check_lease(self) -> None:
        """Raise Fenced once another process may have taken the run, so that this one may write no more."""
        if not self.epoch:
            raise BadInput(f"run {self.name!r} is open for reading: hold() or join() it before commits")
        self.check_held()
        if self._epoch.is_over():
            newest = newest_epoch(self.store)
            why = f"epoch {newest} has taken the run" if newest > self.epoch else "the run was deleted from the store"
            raise Fenced(f"run {self.name!r}: epoch {self.epoch} is over, {why}")
        self.check_held()

    def check_held(self) -> None:
        """Raise Fenced if another process has taken the run.

        The store is asked only if the lease was not renewed in time. Raises StoreFailed if the store does not answer.
        """
        if self._lease is not None:
            self._lease.check()

    def _check_overtaken(self, manifest: Manifest, promised: Collection[str]) -> None:
        """Take back what was committed while another process held the run, and deleted a part that nothing named."""
        try:
            self.check_held()
            overtaken = self._lease is None and self._epoch.is_over()
        except (Fenced, StoreFailed):
            overtaken = True
        if overtaken and (absent := self._absent_part(manifest, promised)) is not None:
            self.store.delete(f"{MANIFESTS}{manifest.key}.json")
            raise Fenced(f"manifest {manifest.key!r} of run {self.name!r}: its part {absent!r} was deleted meanwhile")

    def note(self, key: str, entry: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Write an entry of the journal and return the one that stands under the key: this, or an earlier one.

        The journal keeps what was measured and decided on the way. Results do not depend on it, so entries may differ
        between runs of the same digests.
        """
        self.check_lease()
        path = f"{JOURNAL}{key}.json"
        if self.store.put(path, seal(dict(entry))):
            return dict(entry)
        return self._noted(path)

    def put_record(self, key: str, record: SealedRecord) -> None:
        """Write a sealed record outside manifests and journal. Raises Conflict if another one has the key."""
        self.check_lease()
        if not self.store.put(key, record.seal()) and self.store.read(key) != record.seal():
            raise Conflict(f"{key!r} of run {self.name!r}: another record was written first")

    def noted(self, key: str) -> dict[str, JsonValue] | None:
        """Return the journal's entry of that key, if there is one."""
        path = f"{JOURNAL}{key}.json"
        content = self.store.find(path)
        return None if content is None else unseal(content, where=f"run {self.name!r}: {path}")

    def journal(self, prefix: str = "") -> dict[str, dict[str, JsonValue]]:
        """Return the journal's entries whose key starts with the prefix, sorted by key."""
        paths = records(self.store, JOURNAL + prefix)
        return {path.removeprefix(JOURNAL).removesuffix(".json"): self._noted(path) for path in paths}

    def _noted(self, path: str) -> dict[str, JsonValue]:
        return unseal(self.store.read(path), where=f"run {self.name!r}: {path}")

    def load(self, key: str) -> Manifest:
        """Read a manifest's file and check it. Raises Damaged where it is another run's, or not what was written."""
        return self._checked(key, self.store.read(f"{MANIFESTS}{key}.json"))

    def _checked(self, key: str, content: bytes) -> Manifest:
        manifest = decode_manifest(content, key=key)
        if manifest.run not in ("", self.record.fingerprint):
            raise Damaged(
                f"manifest {key!r} of run {self.name!r}: it was made under the configuration {manifest.run}, "
                f"the run's record has {self.record.fingerprint}"
            )
        return self._remember(manifest)

    def _remember(self, manifest: Manifest) -> Manifest:
        """Forget others in its favour, those first that were asked for longest ago."""
        with self._turn:
            self._known[manifest.key] = manifest
            self._known.move_to_end(manifest.key)
            if (folder := self._folders.get(manifest.key.rpartition("/")[0])) is not None:
                folder.add(manifest.key)
            while len(self._known) > KNOWN_MANIFESTS:
                self._known.popitem(last=False)
            return manifest

    def _absent_part(self, manifest: Manifest, promised: Collection[str]) -> str | None:
        parts = [shard.key for shard in manifest.shards]
        parts += [f"{bundle.key}/bundle.json" for name, bundle in manifest.bundles.items() if name not in promised]
        there = self.store.exist(parts)
        return next((key for key, is_there in zip(parts, there, strict=True) if not is_there), None)


def records(store: Objects, prefix: str) -> list[str]:
    """List manifests, leases or entries of the journal by their keys in the store; what else lies there is not ours."""
    return [entry.key for entry in store.entries(prefix) if entry.key.endswith(".json")]


def create_run(store_uri: str, name: str, config: Mapping[str, JsonValue]) -> Run:
    """Make a run, or open the one of that name.

    A run without results takes another configuration. Raises RunChanged if a run with results was made from another,
    RunHeld if a live process holds the run without results, and Damaged if there are manifests without a record: nobody
    can say whose they are.
    """
    store = run_store(store_uri, name)
    if not store.exists(RECORD):
        if store.children(MANIFESTS.rstrip("/")):
            raise Damaged(
                f"run {name!r} in {store_uri}: its manifests are there and {RECORD} is not; bring it back from a "
                "copy, or choose another name"
            )
        record = new_record(name, config)
        if store.put(RECORD, record.seal()):
            return Run(store, record)
    run = open_run(store_uri, name)
    changes = difference(run.record.config, config)
    if changes and not has_results(store):
        return _begin_anew(run, config)
    run._refuse(changes)
    return run


def _begin_anew(run: Run, config: Mapping[str, JsonValue]) -> Run:
    """Replace the record of a run without results, and delete the journal of its earlier configuration."""
    with run.hold():
        if has_results(run.store):  # another process was faster
            run._refuse(difference(run.record.config, config))
        logger.info("run %s made nothing under its earlier configuration and begins anew", run.name)
        record = replace_record(run.store, run.name, config)
    return Run(run.store, record)


def open_run(store_uri: str, name: str) -> Run:
    """Open an existing run for reading."""
    store = run_store(store_uri, name)
    if not store.exists(RECORD):
        raise BadInput(f"run {name!r}: expected one in {store_uri!r}, found {_some(list_runs(store_uri))}")
    return Run(store, read_record(store, name))


def list_runs(store_uri: str) -> list[str]:
    """Return the names of the runs in a store."""
    store = open_store(store_uri)
    names = [name for name in store.children("") if _NAME.fullmatch(name)]
    return [name for name in names if store.exists(f"{name}/{RECORD}")]


def run_store(store_uri: str, name: str) -> Store:
    """Open the part of a store where a run of that name lies, or would."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise BadInput(f"run name {name!r}: expected {_NAME.pattern} without '..'")
    return open_store(f"{store_uri.rstrip('/')}/{name}")


def _holder(store: Objects) -> str:
    try:
        holder = json.loads(store.read(LOCK))
        return f"process {holder['pid']} on {holder['host']}"
    except ValueError:  # it has the lock but has not written its name yet
        return "another process that is just starting"


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}" if names else "none"
