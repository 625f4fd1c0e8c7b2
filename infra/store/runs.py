"""Runs. A run is a directory of a store with manifests that never change. One process at a time controls the run."""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from threading import RLock

from pydantic import JsonValue

from rheostat.infra.config import Identified, describe_difference
from rheostat.infra.errors import BadInput, Conflict, Damaged, Fenced, RunChanged, RunLocked, StoreFailed
from rheostat.infra.store.checksums import SealedRecord, seal, unseal
from rheostat.infra.store.contracts import Lease, LockState, Objects, Store
from rheostat.infra.store.epochs import Epoch, begin_epoch, newest_epoch
from rheostat.infra.store.forks import Fork, fork_of, forks_of, open_shared
from rheostat.infra.store.manifests import Manifest, decode_manifest
from rheostat.infra.store.run_record import RECORD, RunRecord, has_results, new_record, read_record, replace_record
from rheostat.infra.store.storage import open_store

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
MANIFESTS, JOURNAL = "manifests/", "journal/"
LOCK, PENDING, ORDERS, TRACKERS = "lock", "expected/", "orders/", "trackers/"
TRANSIENT = (LOCK, PENDING, ORDERS, TRACKERS, "readers/")
"""Names in a run's directory that only live processes use, so that copies of the run omit them."""
METRICS = "metrics.jsonl"
"""Name of the file with the metrics of each iteration. It is the only file of a run that changes."""
_NUMBERS = count(1)

KNOWN_MANIFESTS = 4096
"""Maximum number of manifests (records of results) that a process caches per run. Each has about 10 kB."""
KNOWN_FOLDERS = 64
"""Maximum number of folders for which a process caches the names of the manifests in the folder."""


class Run:
    """Run in a store, with its results (manifests). `open_run` opens it for reading. To write, a process locks the run
    with `lock`, or works for the process that has the lock by calling `join`."""

    def __init__(self, store: Store, record: RunRecord, *, epoch: int = 0) -> None:
        self.store = store
        self.record = record
        self.epoch = epoch
        """Epoch in which this process commits, or 0 if the run is only open for reading."""
        self._lease: Lease | None = None
        self._known: OrderedDict[str, Manifest] = OrderedDict()
        """Most recently used manifests by key. They never change, so they are verified only once."""
        self._is_sole_writer = False
        """Whether no other process commits in this epoch."""
        self._folders: OrderedDict[str, set[str]] = OrderedDict()
        """Keys in the most recently listed manifest folders. Only used if no other process commits."""
        self._turn = RLock()
        """Lock that protects the cached manifests and folders, because several threads use them."""
        self._epoch = Epoch(store, epoch, renewed=False)
        self._expected: dict[str, Manifest] = {}
        """Pending manifests (computed but not committed yet) by key, in the order in which they will be committed."""
        self._pending_paths: dict[str, str] = {}
        """Keys of the pending manifests, by path of their copy for the next process."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.record.name

    @property
    def fork(self) -> Fork | None:
        """Record of the fork that this run is, or None if the run is no fork."""
        return fork_of(self.store)

    def config_at(self, iteration: int) -> dict[str, JsonValue]:
        """Return the recorded configuration with which an iteration is computed. For an iteration that a fork shares,
        this is the configuration of the earlier run."""
        parts = [] if self.fork is None else self.fork.parts
        return next((part.config for part in parts if iteration <= part.iteration), self.record.config)

    def inherits(self, key: str) -> bool:
        """Return whether this run is a fork that shares a result with an earlier run."""
        return self.fork is not None and self.fork.inherits(f"{MANIFESTS}{key}.json")

    def check_identity(self, config: Identified, *, ignored: Collection[str] = ()) -> None:
        """Raise RunChanged if settings that determine results differ from those of the run. The message lists them.
        Differences whose dotted keys are all in `ignored` are allowed."""
        self._refuse(describe_difference(*self.settings_beside(config), ignored=ignored))

    def settings_beside(self, config: Identified) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
        """Return the recorded settings that determine results, and those of a configuration. Both have present names
        of keys, so that they can be compared."""
        recorded, present = self.record.config, config.present_names
        return present(config.normalize(recorded)), present(config.identity(recorded))

    def _refuse(self, changes: str) -> None:
        if changes:
            raise RunChanged(
                f"run {self.name!r} in {self.store.uri} was created with another configuration: {changes}. Restore "
                "these settings to continue the run, or choose another name for a new run."
            )

    def check_unlocked(self) -> None:
        """Raise RunLocked if a live process has locked the run."""
        with self.lock_without_epoch():
            pass

    def lock_state(self) -> LockState:
        """Return whether the run is free, locked by a live process, or left locked by a process that died."""
        return self.store.lock_state(LOCK)

    @contextmanager
    def lock_without_epoch(self) -> Iterator[Lease]:
        """Lock the run during the block without beginning a new epoch, which would prevent other processes from
        committing. Raises RunLocked if a live process has the lock."""
        with self.store.lock(LOCK) as lease:
            if lease is None:
                raise RunLocked(f"run {self.name!r} in {self.store.uri} is locked by {_holder(self.store)}")
            yield lease

    @contextmanager
    def lock(self, *, sole_writer: bool = False) -> Iterator["Run"]:
        """Lock the run during the block, and begin its next epoch, so that earlier processes can no longer commit.
        Raises RunLocked if a live process has the lock. Set `sole_writer` if no other process will `join` the run."""
        with self.lock_without_epoch() as lease:
            self._lease, self.epoch, self._is_sole_writer = lease, begin_epoch(self.store), sole_writer
            self._epoch = Epoch(self.store, self.epoch, renewed=self.store.traits.expires_locks)
            try:
                yield self
            finally:
                self._lease, self.epoch, self._is_sole_writer = None, 0, False
                self._folders.clear()

    def join(self, epoch: int) -> "Run":
        """Return the run for commits on behalf of the process that has the lock, in the same epoch (lock period).
        Raises BadInput if the epoch has not begun. Commits raise Fenced after a newer epoch has begun."""
        newest = newest_epoch(self.store)
        if not 1 <= epoch <= newest:
            raise BadInput(f"run {self.name!r} has no epoch (lock period) {epoch}. Its epochs are 1 to {newest}")
        return Run(self.store, self.record, epoch=epoch)

    def find(self, key: str) -> Manifest | None:
        """Return the manifest (record of a result) with this key, committed or pending in this process, or None."""
        return self._expected.get(key) or self._find_committed(key)

    def _find_committed(self, key: str) -> Manifest | None:
        with self._turn:
            if (known := self._known.get(key)) is not None:
                return self._remember(known)
            if self._is_absent(key):
                return None
        content = self.store.find(f"{MANIFESTS}{key}.json")
        return None if content is None else self._check_manifest(key, content)

    def has(self, key: str) -> bool:
        """Return whether a manifest (record of a result) with this key is committed, or pending in this process."""
        if key in self._expected or key in self._known:
            return True
        return not self._is_absent(key) and self.store.exists(f"{MANIFESTS}{key}.json")

    def _is_absent(self, key: str) -> bool:
        """Return True if the cached listing of a folder shows that a manifest is not committed. Return False if it may
        be committed. Only folders inside an iteration are cached, because they have one manifest per shard."""
        folder = key.rpartition("/")[0]
        if not self._is_sole_writer or "/" not in folder:
            return False
        with self._turn:  # manifests committed during the listing are added after it
            if folder not in self._folders:
                paths = records(self.store, f"{MANIFESTS}{folder}/")
                self._folders[folder] = {path.removeprefix(MANIFESTS).removesuffix(".json") for path in paths}
                while len(self._folders) > KNOWN_FOLDERS:
                    self._folders.popitem(last=False)
            return key not in self._folders[folder]

    def require(self, key: str) -> Manifest:
        """Return the manifest (record of a result) with this key. Raises Damaged if there is none, committed or
        pending."""
        manifest = self.find(key)
        if manifest is None:
            raise Damaged(f"run {self.name!r}: manifest {key!r} is missing. Restore it from a copy of the run.")
        return manifest

    def manifests(self, prefix: str = "") -> list[Manifest]:
        """Return the committed manifests (records of results) whose keys start with a prefix, sorted by key."""
        paths = records(self.store, MANIFESTS + prefix)
        keys = sorted(path.removeprefix(MANIFESTS).removesuffix(".json") for path in paths)
        return [self.require(key) for key in keys]

    def folders(self, under: str = "") -> list[str]:
        """Return the sorted names in a folder of manifest keys, such as `it-0003` in the root folder. Names of
        manifests end with `.json`. No manifest is read."""
        return self.store.children(f"{MANIFESTS}{under}".rstrip("/"))

    def add_pending(self, manifest: Manifest) -> Manifest:
        """Register a manifest that is computed but not committed yet, so that `find` returns it in this process. It
        must be committed before manifests that depend on it. If this process is killed first, the next process gets it
        from `leftover_manifests`, except after a power failure."""
        expected = manifest.model_copy(update={"run": self.record.fingerprint})
        self._expected[manifest.key] = expected
        kept = f"{PENDING}{next(_NUMBERS):06d}/{manifest.key}.json"
        if self._lease is not None and self.store.put(kept, expected.encode(), durable=False):
            self._pending_paths[kept] = manifest.key
        return expected

    def leftover_manifests(self) -> Iterator[Manifest]:
        """Yield the manifests (records of results) that an earlier process computed but did not commit, in order.
        Raises Damaged if one of them is incomplete."""
        for path in records(self.store, PENDING):
            if path not in self._pending_paths:
                key = path.removeprefix(PENDING).partition("/")[2].removesuffix(".json")
                if not self.has(key):
                    yield decode_manifest(self.store.read(path), key=key)

    def delete_pending_copies(self, *, every_copy: bool = False) -> None:
        """Delete stored copies of pending manifests that are committed now, or all copies if `every_copy` is set."""
        for path in records(self.store, PENDING) if every_copy else list(self._pending_paths):
            if self._pending_paths.get(path) not in self._expected:
                self.store.delete(path)
                self._pending_paths.pop(path, None)

    def pending_manifests(self) -> list[Manifest]:
        """Return the manifests (records of results) that are not committed yet, in the order of their commits."""
        return list(self._expected.values())

    def has_pending(self, digests: Collection[str]) -> bool:
        """Return whether a manifest that is not committed yet has one of these digests."""
        return any(manifest.digest in digests for manifest in self.pending_manifests())

    def commit(self, manifest: Manifest, *, deferred: Collection[str] = ()) -> Manifest:
        """Commit a manifest (record of a result) and return it, or the stored manifest if an equal one is committed
        already. Bundles named in `deferred` may be stored later. Raises Conflict if a different result is committed
        under the key, Fenced if another process has locked the run, and Damaged if a shard or another bundle is not
        stored."""
        assert not self.has_pending(manifest.parents), f"{manifest.key} must be committed after its parents"
        manifest = manifest.model_copy(update={"run": self.record.fingerprint})
        absent = self._absent_part(manifest, deferred) if self.epoch else None
        self.check_lease()
        winner = self._known.get(manifest.key) if absent is None else self._find_committed(manifest.key)
        if winner is None:
            if absent is not None:
                where = f"manifest {manifest.key!r} of run {self.name!r}"
                raise Damaged(f"{where} cannot be committed, because its object {absent!r} is not in the store")
            provenance = manifest.provenance.model_copy(update={"epoch": self.epoch})
            manifest = manifest.model_copy(update={"provenance": provenance})
            if self.store.put(f"{MANIFESTS}{manifest.key}.json", manifest.encode()):
                self._expected.pop(manifest.key, None)
                self._check_overtaken(manifest, deferred)
                return self._remember(manifest)
            winner = self.load(manifest.key)
        self._expected.pop(manifest.key, None)
        if winner.digest != manifest.digest:
            raise Conflict(
                f"manifest {manifest.key!r} of run {self.name!r} was already committed with digest {winner.digest}, "
                f"but epoch {self.epoch} computed {manifest.digest}. Have code, libraries or data changed?"
            )
        return winner

    def check_lease(self) -> None:
        """Raise Fenced if another process may have locked the run, so that this process may no longer write. Raises
        BadInput if the run is only open for reading."""
        if not self.epoch:
            raise BadInput(f"run {self.name!r} is open for reading only. Call lock() or join() before you commit")
        self.check_lock()
        if self._epoch.is_over():
            newest = newest_epoch(self.store)
            why = "another process has locked the run" if newest > self.epoch else "the run was deleted"
            raise Fenced(f"run {self.name!r}: epoch {self.epoch} of this process is over, because {why}")
        self.check_lock()

    def check_lock(self) -> None:
        """Raise Fenced if another process has locked the run, or StoreFailed if the store does not respond. The store
        is only queried if the lock was not renewed in time."""
        if self._lease is not None:
            self._lease.check()

    def _check_overtaken(self, manifest: Manifest, deferred: Collection[str]) -> None:
        """Delete a new manifest and raise Fenced if another process has meanwhile locked the run and deleted its
        data."""
        try:
            self.check_lock()
            overtaken = self._lease is None and self._epoch.is_over()
        except (Fenced, StoreFailed):
            overtaken = True
        if overtaken and (absent := self._absent_part(manifest, deferred)) is not None:
            self.store.delete(f"{MANIFESTS}{manifest.key}.json")
            raise Fenced(f"manifest {manifest.key!r} of run {self.name!r}: another process has deleted {absent!r}")

    def write_entry(self, key: str, entry: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Write a journal entry, unless the key already has one. Return the stored entry. The journal contains
        measurements and decisions of a run. Results do not depend on it, so that runs with equal digests may have
        different entries."""
        self.check_lease()
        path = f"{JOURNAL}{key}.json"
        if self.store.put(path, seal(dict(entry))):
            return dict(entry)
        return self._read_entry(path)

    def put_record(self, key: str, record: SealedRecord) -> None:
        """Write a checksummed record that is neither a manifest nor a journal entry. Raises Conflict if the key has
        another record."""
        self.check_lease()
        if not self.store.put(key, record.seal()) and self.store.read(key) != record.seal():
            raise Conflict(f"{key!r} of run {self.name!r}: another process has already written a different record")

    def find_entry(self, key: str) -> dict[str, JsonValue] | None:
        """Return the journal entry (measurement or decision) with this key, or None if there is none."""
        path = f"{JOURNAL}{key}.json"
        content = self.store.find(path)
        return None if content is None else unseal(content, where=f"run {self.name!r}: {path}")

    def journal(self, prefix: str = "") -> dict[str, dict[str, JsonValue]]:
        """Return the journal entries (measurements and decisions) whose keys start with a prefix, sorted by key."""
        paths = records(self.store, JOURNAL + prefix)
        return {path.removeprefix(JOURNAL).removesuffix(".json"): self._read_entry(path) for path in paths}

    def _read_entry(self, path: str) -> dict[str, JsonValue]:
        return unseal(self.store.read(path), where=f"run {self.name!r}: {path}")

    def load(self, key: str) -> Manifest:
        """Read and verify a manifest (record of a result). Raises Damaged if it has changed or belongs to another
        run."""
        return self._check_manifest(key, self.store.read(f"{MANIFESTS}{key}.json"))

    def _check_manifest(self, key: str, content: bytes) -> Manifest:
        manifest = decode_manifest(content, key=key)
        inherited = [] if self.fork is None else [part.fingerprint for part in self.fork.parts]
        if manifest.run not in ("", self.record.fingerprint, *inherited):
            raise Damaged(
                f"manifest {key!r} of run {self.name!r} was created by a configuration with fingerprint "
                f"{manifest.run}, but the records of the run name {', '.join((self.record.fingerprint, *inherited))}. "
                "Restore run.json and fork.json from a copy."
            )
        return self._remember(manifest)

    def _remember(self, manifest: Manifest) -> Manifest:
        """Cache a manifest, and remove the least recently used ones if there are more than `KNOWN_MANIFESTS`."""
        with self._turn:
            self._known[manifest.key] = manifest
            self._known.move_to_end(manifest.key)
            if (folder := self._folders.get(manifest.key.rpartition("/")[0])) is not None:
                folder.add(manifest.key)
            while len(self._known) > KNOWN_MANIFESTS:
                self._known.popitem(last=False)
            return manifest

    def _absent_part(self, manifest: Manifest, deferred: Collection[str]) -> str | None:
        parts = [shard.key for shard in manifest.shards]
        parts += [f"{bundle.key}/bundle.json" for name, bundle in manifest.bundles.items() if name not in deferred]
        existence = self.store.exist(parts)
        return next((key for key, is_there in zip(parts, existence, strict=True) if not is_there), None)


def records(store: Objects, prefix: str) -> list[str]:
    """Return the keys of all JSON files in a store that start with a prefix."""
    return [entry.key for entry in store.entries(prefix) if entry.key.endswith(".json")]


def create_run(store_uri: str, name: str, config: Mapping[str, JsonValue]) -> Run:
    """Create a run with this configuration, or open the existing run with this name. If the run has no results, its
    configuration is replaced. Raises RunChanged if a run with results has another configuration, RunLocked if a live
    process has locked a run without results, and Damaged if there are manifests but no run record."""
    store = run_store(store_uri, name)
    if not store.exists(RECORD):
        if store.children(MANIFESTS.rstrip("/")):
            raise Damaged(
                f"run {name!r} in {store_uri} has manifests, but {RECORD} is missing. Restore {RECORD} from a copy, or "
                "choose another name."
            )
        record = new_record(name, config)
        if store.put(RECORD, record.seal()):
            return Run(run_store(store_uri, name), record)  # opened again, because its directory exists now
    run = open_run(store_uri, name)
    changes = describe_difference(run.record.config, config)
    if changes and not has_results(store):
        return _replace_run(run, config)
    run._refuse(changes)
    return run


def _replace_run(run: Run, config: Mapping[str, JsonValue]) -> Run:
    """Replace the configuration of a run that has no results, and delete its journal."""
    with run.lock():
        if has_results(run.store):  # another process has committed results meanwhile
            run._refuse(describe_difference(run.record.config, config))
        logger.info("run %s has no results under its earlier configuration and starts from the beginning", run.name)
        record = replace_record(run.store, run.name, config)
    return Run(run.store, record)


def open_run(store_uri: str, name: str) -> Run:
    """Open an existing run for reading. Raises BadInput if the run does not exist."""
    store = run_store(store_uri, name)
    if not store.exists(RECORD):
        raise BadInput(f"there is no run {name!r} in {store_uri!r}. Existing runs: {_join_names(list_runs(store_uri))}")
    return Run(store, read_record(store, name))


def list_runs(store_uri: str) -> list[str]:
    """Return the names of all runs in a store."""
    store = open_store(store_uri)
    names = [name for name in store.children("") if _NAME.fullmatch(name)]
    return [name for name in names if store.exists(f"{name}/{RECORD}")]


def run_store(store_uri: str, name: str) -> Store:
    """Open the directory of a run as a separate store. The store of a fork includes the objects that it shares with
    other runs. Raises BadInput if the name is not valid."""
    if not _NAME.fullmatch(name) or ".." in name:
        allowed = "Use up to 64 characters (a-z 0-9 . _ -) without '..', starting with a letter or digit."
        raise BadInput(f"the run name {name!r} is not valid. {allowed}")
    home = store_uri.rstrip("/")
    return open_shared(open_store(f"{home}/{name}"), lambda other: open_store(f"{home}/{other}"))


def run_forks(run: Run) -> dict[str, Fork]:
    """Return the forks that share objects of a run, by their names. Forks whose data was deleted are left out."""
    home = run.store.uri.rpartition("/")[0]
    return forks_of(run.store, run.name, lambda other: open_store(f"{home}/{other}"))


def objects_of_forks(run: Run, *, without: str = "") -> frozenset[str]:
    """Return the keys of the objects in a run's directory that forks share, so that they must not be deleted. The fork
    named `without` is left out."""
    forks = (fork for name, fork in run_forks(run).items() if name != without)
    return frozenset(key for fork in forks for key in fork.shared.get(run.name, ()))


def _holder(store: Objects) -> str:
    try:
        holder = json.loads(store.read(LOCK))
        return f"process {holder['pid']} on {holder['host']}. Wait until it ends, or stop it"
    except ValueError:  # the process has the lock but has not written its name yet
        return "a process that is just starting. Wait until it ends, or stop it"


def _join_names(names: list[str]) -> str:
    return f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}" if names else "none"
