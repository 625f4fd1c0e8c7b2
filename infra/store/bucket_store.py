"""Run store in a bucket of an object service that supports conditional writes."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar

from blake3 import blake3

from rheostat.infra.config import read_number_variable
from rheostat.infra.errors import BadInput, Damaged, StoreFailed
from rheostat.infra.store.bucket import TEMPORARY, Bucket
from rheostat.infra.store.cache import Cache, open_cache
from rheostat.infra.store.contracts import Entry, LockState, Store, StoreTraits, check_key, is_key
from rheostat.infra.store.disk import make_directory, scratch_directory, sweep
from rheostat.infra.store.lease import LEASE_SECONDS, BucketLease, acquire_lease, read_lease_state
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.object_service import TIMEOUTS, Service, Timeouts

if TYPE_CHECKING:  # obstore defines these types for type checkers only
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

WHOLE_BYTES = 128 << 20
"""Maximum size in bytes of a file that is written in one conditional request. Larger files are uploaded in parts.

No server guarantees that uploads in parts are conditional. Only files of bundles are that large. Their names contain a
digest of their content, so writing such a file twice stores the same bytes.
"""

MAX_PARALLEL = 16
"""Maximum number of requests that are sent in parallel for several objects."""

MAX_KNOWN_COPIES = 2**16
"""Maximum number of paths in `_known_copies`. When this number is reached, the set is cleared, and copies are checked
again at their next use."""

T = TypeVar("T")

_known_copies: set[Path] = set()
"""Paths of local copies of objects that are known to exist in the store, because this process has put, fetched or read
the objects."""


@dataclass(frozen=True, slots=True)
class BucketStore:
    """Store in a bucket. Each object is written by one conditional request. Objects that were read or written have
    copies in a cache on this machine."""

    traits: ClassVar[StoreTraits] = StoreTraits(
        sends_requests=True, downloads=True, can_append=False, expires_locks=True, check_writes=True
    )
    bucket: Bucket
    cache: Cache
    lease_seconds: float = LEASE_SECONDS

    @property
    def uri(self) -> str:
        return self.bucket.uri

    def requests(self) -> Mapping[str, int]:
        return self.bucket.requests.counts()

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        durable: bool = True,
        cache: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> bool:
        check_key(key)
        self.bucket.quotes_etags()
        if isinstance(data, bytes) or data.stat().st_size <= WHOLE_BYTES:
            tag = self.bucket.create(key, data)
        else:
            tag = None if self.exists(key) else self.bucket.upload(key, data, on_progress=on_progress)
        if tag is not None and (cache or isinstance(data, Path)):
            self._keep(key, data, tag)
        return tag is not None

    def sync(self, key: str) -> None:
        check_key(key)  # an object that the server has acknowledged is durable

    def find(self, key: str) -> bytes | None:
        check_key(key)
        stored = self.bucket.read(key)
        return None if stored is None else stored[0]

    def read(self, key: str) -> bytes:
        content = self.find(key)
        if content is None:
            raise self._missing(key)
        return content

    def entries(self, prefix: str) -> list[Entry]:
        if prefix:
            check_key(prefix.removesuffix("/"))
        names = self.bucket.names(prefix.rpartition("/")[0])
        return sorted(
            (Entry(*named) for named in names if named[0].startswith(prefix) and is_key(named[0])),
            key=lambda entry: entry.key,
        )

    def children(self, folder: str) -> list[str]:
        if folder:
            check_key(folder)
        return sorted(name for name in self.bucket.children(folder) if is_key(name))

    def strays(self) -> list[str]:
        names = (name for name, *_ in self.bucket.names(""))
        return sorted(name for name in names if not is_key(name) and not name.startswith(f"{TEMPORARY}/"))

    def locate(self, key: str) -> str:
        if not self.exists(key):
            raise self._missing(key)
        return f"{self.uri}/{key}"

    def now(self) -> datetime:
        return self.bucket.now()

    def check(self) -> None:
        self.bucket.quotes_etags()

    def exists(self, key: str) -> bool:
        check_key(key)
        return self.bucket.find(key) is not None

    def exist(self, keys: Sequence[str]) -> list[bool]:
        return _call_in_parallel(self.exists, keys)

    def delete(self, key: str) -> None:
        check_key(key)
        _known_copies.discard(self._cached(key))
        self._cached(key).unlink(missing_ok=True)
        self.bucket.delete(key)

    def local_path(self, key: str) -> Path:
        check_key(key)
        path = self._cached(key)
        if path.exists():
            stored = self.bucket.find(key)
            if stored is None:
                raise self._missing(key)
            if not self.cache.is_current(path, stored.bytes, stored.tag):
                path.unlink(missing_ok=True)
        if not path.exists():
            self._download(key, path)
        _remember_copy(path)
        return path

    def cached_copy(self, key: str) -> Path | None:
        check_key(key)
        path = self._cached(key)
        return path if path in _known_copies and self.cache.touch(path) else None

    def fetch(self, keys: Iterable[str], *, room: int | None = None) -> None:
        missing = []
        for key in keys:
            _remember_copy(self._cached(key))
            if self.cached_copy(key) is None:
                missing.append(key)
        with self._disk_failures():
            if missing and room is not None and not self.cache.make_room(room):
                return
        _call_in_parallel(self.local_path, missing)

    def staging(self) -> LocalStore:
        return LocalStore(self._cached_root)

    def _download(self, key: str, path: Path) -> None:
        """Download an object into the cache, at `path`. Do nothing if another process has downloaded it while this
        process waited for the lock."""
        with self.scratch() as scratch, self.cache.lock_download(path):
            if not path.exists():
                fetched = self.bucket.download(key, scratch / "object")
                if fetched is None:
                    raise self._missing(key)
                with self._disk_failures():
                    self.cache.add(scratch / "object", path, fetched.tag)

    def lock(self, key: str) -> AbstractContextManager[BucketLease | None]:
        check_key(key)
        with self._disk_failures():
            sweep(self.cache.root)
        return acquire_lease(self.bucket, key, seconds=self.lease_seconds)

    def lock_state(self, key: str) -> LockState:
        check_key(key)
        return read_lease_state(self.bucket, key)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        with self._disk_failures():
            make_directory(self.cache.root)
        with scratch_directory(self.cache.root) as directory:
            yield directory

    def _keep(self, key: str, data: bytes | Path, tag: str) -> None:
        """Add a copy of an object that was just written to the cache, so that this machine need not download it. `tag`
        is its ETag."""
        with self.scratch() as scratch, self._disk_failures():
            kept = scratch / "object"
            if isinstance(data, bytes):
                kept.write_bytes(data)
            else:
                try:
                    kept.hardlink_to(data)
                except OSError:  # the file is on another disk
                    shutil.copyfile(data, kept)
            self.cache.add(kept, self._cached(key), tag)
            _remember_copy(self._cached(key))

    def _cached(self, key: str) -> Path:
        return self._cached_root / key

    @property
    def _cached_root(self) -> Path:
        return self.cache.root / blake3(self.uri.encode()).hexdigest()[:16]

    def _missing(self, key: str) -> Damaged:
        return Damaged(f"{key!r} is missing from {self.uri}. Restore the file from a copy of the store.")

    @contextmanager
    def _disk_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreFailed(
                f"store {self.uri}: the local cache in {self.cache.root} failed: {error}. Check its permissions and "
                "the free space, or set RHEOSTAT_CACHE to another directory."
            ) from error


def _remember_copy(path: Path) -> None:
    if len(_known_copies) >= MAX_KNOWN_COPIES:
        _known_copies.clear()
    _known_copies.add(path)


def _call_in_parallel(ask: Callable[[str], T], keys: Sequence[str]) -> list[T]:
    """Call a function for each key, with at most `MAX_PARALLEL` calls at the same time. Return the results in order."""
    if len(keys) < 2:
        return [ask(key) for key in keys]
    with ThreadPoolExecutor(min(MAX_PARALLEL, len(keys)), thread_name_prefix="bucket") as threads:
        return list(threads.map(ask, keys))


PART_RETRIES: Final = 10
"""Maximum number of times that the upload of one part of a large file is retried."""


def connect_bucket(
    uri: str,
    service: Service,
    open_client: "Callable[[ClientConfig, RetryConfig], ObjectStore]",
    *,
    endpoint: str,
    timeouts: Timeouts,
) -> Bucket:
    """Return access to the bucket and prefix at this address. `open_client` opens a client with these settings."""
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=min(5, timeouts.answer_seconds)),
        "read_timeout": timedelta(seconds=timeouts.answer_seconds),
        "timeout": timedelta(seconds=10 * timeouts.answer_seconds),
    }

    def client(retries: int) -> "ObjectStore":
        return open_client(
            options, {"max_retries": retries, "retry_timeout": timedelta(seconds=timeouts.total_seconds)}
        )

    return Bucket(uri, service, endpoint, client(0), client(PART_RETRIES), timeouts)


def open_bucket_store(
    uri: str,
    connect: Callable[[str, str, str, Timeouts], Bucket],
    *,
    seconds_variable: str,
    timeouts: Timeouts | None,
    lease_seconds: float | None,
) -> Store:
    """Open the store at an address `scheme://bucket/prefix`. `connect` opens the bucket of one object service, from the
    address, the name of the bucket, the prefix and the time limits. The environment variable `seconds_variable` is the
    default time limit of requests, and RHEOSTAT_LEASE_SECONDS that of leases.

    Raises BadInput if the address is not valid.
    """
    if timeouts is None:
        total = read_number_variable(seconds_variable, TIMEOUTS.total_seconds)
        timeouts = Timeouts(answer_seconds=min(TIMEOUTS.answer_seconds, total / 2), total_seconds=total)
    if lease_seconds is None:
        lease_seconds = read_number_variable("RHEOSTAT_LEASE_SECONDS", LEASE_SECONDS)
    scheme, _, name = uri.partition("://")
    bucket, _, prefix = name.rstrip("/").partition("/")
    if not bucket or not all(map(is_key, (bucket, prefix or "none"))):
        raise BadInput(f"store {uri!r} must have the form {scheme}://bucket/prefix")
    address = f"{scheme}://{bucket}/{prefix}".rstrip("/")
    return BucketStore(connect(address, bucket, prefix, timeouts), open_cache(), lease_seconds)
