"""Requests to a bucket of an object service, such as S3. Requests are retried within a total time.

The response to a write can be lost although the server has written the object. If the write is then repeated, its
condition fails. Therefore every conditional write stores a random token. If a condition fails, the writer compares the
stored token with its own token, to find out whether the object is its own or was written by another process.
"""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

from rheostat.infra.errors import BadInput, StoreFailed
from rheostat.infra.store.object_service import TIMEOUTS, Requests, Service, Timeouts
from rheostat.infra.store.request_errors import CODE, STATUS, Unsettled, may_pass

if TYPE_CHECKING:  # obstore defines these types for type checkers only
    from obstore import GetResult
    from obstore.store import ObjectStore

TEMPORARY: Final = ".tmp"
"""Folder of probes: temporary objects with which this module tests the server. They do not belong to a store."""
_WRITER: Final = "rheostatwriter"
"""Name of the metadata with the random token of a write. Azure allows no dash in such names."""
RANGED_BYTES: Final = 64 << 20
"""Size in bytes of the first range of a download. If the object is larger, the rest is downloaded in parallel
ranges."""
_PART_BYTES: Final = 16 << 20
_STREAMS: Final = 8
_PARTS_IN_FLIGHT: Final = 4
"""Maximum number of parts of an upload that the server has not acknowledged yet."""
_ROUND: Final = 100
"""Common divisor of the page sizes of all known servers. A number of listed names that is not a multiple of it shows
that the last page was not empty, so the listing is complete."""
_RACERS: Final = 4
_EMPTY = "416"
"""HTTP status with which servers refuse to return a range of an empty object."""
_MACHINE_CREDENTIALS = "169.254."
"""Start of the addresses of cloud metadata services. The client requests them if no credentials are set."""
T = TypeVar("T")

_quotes: dict[tuple[str, str], bool] = {}
"""Whether servers need quotes around ETags in conditions, by (endpoint, address of the bucket), from earlier tests."""


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """Metadata of an object in a bucket: its size, ETag, time and writer."""

    bytes: int
    tag: str
    """ETag of the object, which changes with its content."""
    modified: datetime
    """Time of the last write by the server's clock, with a resolution of one second."""
    writer: str = ""
    """Random token that identifies the request that wrote the object."""


@dataclass(frozen=True)
class Bucket:
    """Access to the objects in a bucket whose names start with a prefix.

    Methods raise StoreFailed if the server does not respond or refuses a request, and BadInput if the bucket or the
    credentials are missing.
    """

    uri: str
    service: Service = field(repr=False)
    endpoint: str = field(repr=False)
    """Address of the server, or "" for the service's own address."""
    client: "ObjectStore" = field(repr=False, compare=False)
    parts: "ObjectStore" = field(repr=False, compare=False)
    """Client for multipart uploads. It retries single parts, so that the whole upload need not be repeated."""
    timeouts: Timeouts = TIMEOUTS
    requests: Requests = field(default_factory=Requests, repr=False, compare=False)
    """Counter of the requests that were sent. Retries of single parts of an upload are not counted."""
    known: set[str] = field(default_factory=set, repr=False, compare=False)
    """Name of one existing object, if one is known. A listing that lacks this object is not trusted."""

    def create(self, name: str, body: bytes | Path) -> str | None:
        """Write an object in one request if the name is free. Return its ETag, or None if the name is taken."""
        return self._write(name, body, version="")

    def replace(self, name: str, body: bytes, *, version: str) -> str | None:
        """Replace an object if its ETag is `version`. Return the new ETag, or None if its ETag is another one."""
        return self._write(name, body, version=version if self.quotes_etags() else version.strip('"'))

    def upload(self, name: str, path: Path, *, on_progress: Callable[[], None] = lambda: None) -> str:
        """Upload a large file in parts and return its ETag. If the object exists, it is replaced at the end of the
        upload. `on_progress` is called after each part, and when the upload is complete."""
        token = secrets.token_hex(16)

        def attempt() -> str:
            self.requests.add("POST", 2)
            self.requests.add("PUT", -(-path.stat().st_size // _PART_BYTES))
            try:
                done = obstore.put(
                    self.parts,
                    name,
                    _read_parts(path, on_progress),
                    attributes={_WRITER: token},
                    use_multipart=True,
                    chunk_size=_PART_BYTES,
                    max_concurrency=_PARTS_IN_FLIGHT,
                )
                on_progress()
                return done["e_tag"] or ""
            except (BaseError, FileNotFoundError) as error:
                stored = self._find(name)
                if stored is not None and stored.writer == token:
                    return stored.tag
                if "NoSuchUpload" in str(error):  # the outcome of the upload is unknown
                    raise Unsettled(f"the server no longer knows the multipart upload of {name!r}") from error
                raise

        return self._retry(f"cannot write {name!r}", attempt)

    def find(self, name: str) -> ObjectHead | None:
        """Return the metadata of an object, or None if it does not exist."""
        return self._retry(f"cannot look up {name!r}", lambda: self._find(name))

    def read(self, name: str) -> tuple[bytes, ObjectHead] | None:
        """Return the content and the metadata of an object, or None if it does not exist."""

        def attempt() -> tuple[bytes, ObjectHead] | None:
            self.requests.add("GET")
            try:
                answer = obstore.get(self.client, name)
                return answer.bytes().to_bytes(), _read_head(answer)
            except FileNotFoundError:
                return None

        return self._retry(f"cannot read {name!r}", attempt)

    def download(self, name: str, path: Path) -> ObjectHead | None:
        """Download an object to a file. Return its metadata, or None if it does not exist.

        Parts of a large object are downloaded in parallel. Raises StoreFailed if the object changes during the
        download.
        """
        what = f"cannot read {name!r}"
        with path.open("wb", buffering=0) as file, ThreadPoolExecutor(_STREAMS) as threads:
            rest: list[Future[ObjectHead]] = []

            def beginning() -> ObjectHead | None:
                try:
                    answer = self._range(name, 0, RANGED_BYTES)
                except FileNotFoundError:
                    return None
                if not rest:
                    starts = range(RANGED_BYTES, answer.meta["size"], _PART_BYTES)
                    rest.extend(threads.submit(self._retry, what, partial(later, start)) for start in starts)
                return _write_body(answer, file.fileno())

            def later(start: int) -> ObjectHead:
                return _write_body(self._range(name, start, start + _PART_BYTES), file.fileno())

            first = self._retry(what, beginning)
            if any(part.result() != first for part in rest):
                raise StoreFailed(f"store {self.uri}: {name!r} was replaced during its download. Try again.")
            return first

    def _range(self, name: str, start: int, end: int) -> "GetResult":
        """Request the bytes from `start` to `end` (exclusive) of an object, or fewer if the object is shorter."""
        self.requests.add("GET")
        try:
            return obstore.get(self.client, name, options={"range": (start, end)})
        except BaseError as error:
            status = STATUS.search(str(error))
            if status is None or status[1] != _EMPTY:
                raise
        self.requests.add("GET")
        return obstore.get(self.client, name)

    def names(self, folder: str) -> list[tuple[str, int, datetime]]:
        """Return (name, size in bytes, time of last write) of all objects in a folder and its subfolders."""
        objects = self._list(folder, lambda: obstore.list(self.client, folder or None).collect())
        return [(each["path"], each["size"], each["last_modified"]) for each in objects]

    def children(self, folder: str) -> list[str]:
        """Return the names of the objects and folders directly in a folder."""

        def paths() -> list[str]:
            listing = obstore.list_with_delimiter(self.client, folder or None)
            return [*listing["common_prefixes"], *(each["path"] for each in listing["objects"])]

        return [path.rpartition("/")[2] for path in self._list(folder, paths)]

    def _list(self, folder: str, pages: Callable[[], Sequence[T]]) -> Sequence[T]:
        """List a folder with `pages`. If the result may be incomplete, check that the server's listings are correct,
        and list the folder again.

        The client library accepts every XML response with status 200, such as an error page of a proxy, as an empty
        page that ends the listing. Raises StoreFailed if the server repeatedly sends such responses.
        """
        what = f"cannot list {folder!r}"
        objects = self._retry(what, lambda: self._count_pages(pages()))
        if len(objects) % _ROUND:
            return objects
        self._retry(what, self._check_listing)
        return self._retry(what, lambda: self._count_pages(pages()))

    def _count_pages(self, objects: Sequence[T]) -> Sequence[T]:
        self.requests.add("LIST", max(1, -(-len(objects) // self.service.page_names)))
        return objects

    def _check_listing(self) -> None:
        """Raise Unsettled if a listing lacks an object that certainly exists. This is a known object or, if there is
        none, a new probe object.

        Nothing is checked if no object is known and this process is not allowed to write.
        """
        known, probe = next(iter(self.known), ""), f"{TEMPORARY}/{secrets.token_hex(8)}"
        if not known:
            try:
                self._write(probe, b"", version="")
            except StoreFailed:
                return
        name = known or probe
        self.requests.add("LIST")
        # Azurite ignores the offset, so the object may be on any page.
        pages = obstore.list(self.client, name.rpartition("/")[0] or None, offset=name[:-1])
        is_listed = any(each["path"] == name for page in pages for each in page)
        is_there = is_listed or self._find(name) is not None
        if not known:
            self.delete(probe)
        elif not is_there:
            self.known.discard(name)
        if is_there and not is_listed:
            raise Unsettled(
                f"the object {name!r} exists, but the server's listing lacks it: the response is not a "
                "ListBucketResult in XML"
            )

    def delete(self, name: str) -> None:
        """Delete an object. Do nothing if it does not exist."""
        self.requests.add("POST")  # the library deletes with POST requests
        self.known.discard(name)
        self._retry(f"cannot delete {name!r}", lambda: self._delete(name))

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):  # Azure reports a missing object, S3 does not
            obstore.delete(self.client, name)

    def now(self) -> datetime:
        """Return the current time of the server's clock, read from the modification time of a new probe object."""
        name = f"{TEMPORARY}/{secrets.token_hex(8)}"
        self.create(name, b"")
        probe = self.find(name)
        self.delete(name)
        if probe is None:
            raise StoreFailed(f"store {self.uri}: another program deleted the new test object {name!r}")
        return probe.modified

    def quotes_etags(self) -> bool:
        """Return whether ETags in conditions need quotes. The HTTP standard requires quotes, but some servers reject
        them.

        The first call in a process tests this. Raises BadInput if the server ignores the conditions of writes.
        """
        where = (self.endpoint, "/".join(self.uri.split("/")[:3]))
        if where not in _quotes:
            _quotes[where] = self._try_conditions()
        return _quotes[where]

    def _try_conditions(self) -> bool:
        name = f"{TEMPORARY}/{secrets.token_hex(8)}"
        bodies = [bytes([number]) for number in range(_RACERS)]
        with ThreadPoolExecutor(_RACERS) as racers:
            won = list(racers.map(lambda body: self._write(name, body, version="") is not None, bodies))
        found = self.read(name)
        if won.count(True) != 1 or found is None or found[0] != bodies[won.index(True)]:
            raise self._refusal(f"{won.count(True)} of {_RACERS} simultaneous writers of one new object succeeded")
        tag = found[1].tag
        if self._write(name, b"stale", version='"00000000000000000000000000000000"') is not None:
            raise self._refusal("If-Match with a wrong ETag did not prevent a write")
        forms = {True: tag, False: tag.strip('"')}
        quotes = next((quotes for quotes, form in forms.items() if self._write(name, b"new", version=form)), None)
        if quotes is None:
            raise self._refusal("If-Match with the right ETag prevented a write")
        self.delete(name)
        return quotes

    def _refusal(self, fault: str) -> BadInput:
        return BadInput(
            f"store {self.uri}: the server must support conditional writes ({self.service.page}), but {fault}"
        )

    def _write(self, name: str, body: bytes | Path, *, version: str) -> str | None:
        """Write an object if its ETag is `version`, or if its name is free and `version` is "". Return the new ETag, or
        None if the condition failed."""
        token = secrets.token_hex(16)

        def attempt() -> str | None:
            self.requests.add("PUT")
            try:
                done = obstore.put(
                    self.client,
                    name,
                    body,
                    mode={"e_tag": version} if version else "create",
                    attributes={_WRITER: token},
                    use_multipart=False,
                )
                return done["e_tag"] or ""
            except (AlreadyExistsError, PreconditionError) as error:
                stored = self._find(name)
                if stored is not None and stored.writer == token:
                    return stored.tag
                unchanged = stored.tag.strip('"') == version.strip('"') if stored is not None else not version
                if isinstance(error, AlreadyExistsError) and unchanged:  # 409: none of several simultaneous writers won
                    raise Unsettled(f"the server refused to write {name!r}, which is unchanged") from error
                return None

        return self._retry(f"cannot write {name!r}", attempt)

    def _find(self, name: str) -> ObjectHead | None:
        self.requests.add("HEAD")
        try:
            stored = _read_head(obstore.get(self.client, name, options={"head": True}))
        except FileNotFoundError:
            return None
        if not self.known and not name.startswith(f"{TEMPORARY}/"):  # probes are deleted again
            self.known.add(name)
        return stored

    def _retry(self, what: str, attempt: Callable[[], T]) -> T:
        retrying = Retrying(
            retry=retry_if_exception(may_pass),
            wait=wait_random_exponential(multiplier=0.2, max=10),
            stop=stop_before_delay(self.timeouts.total_seconds),
            reraise=True,
        )
        started = monotonic()
        try:
            return retrying(attempt)
        except (BaseError, OSError) as error:
            times, message = retrying.statistics["attempt_number"], str(error)
            code = CODE.search(message)
            if code is not None and code[1] == self.service.missing_bucket:
                raise BadInput(
                    f"store {self.uri}: the {self.service.bucket} does not exist. Create it, or check its name and the "
                    "endpoint."
                ) from error
            if _MACHINE_CREDENTIALS in message:
                raise BadInput(f"store {self.uri}: no credentials were found. {self.service.credentials}") from error
            raise StoreFailed(
                f"store {self.uri}: {what} ({times} attempt{'s' * (times > 1)} in {monotonic() - started:.1f} s): "
                f"{message.splitlines()[0].partition(': <')[0]}{f': {code[1]}' if code is not None else ''}"
            ) from error


def _read_parts(path: Path, on_progress: Callable[[], None]) -> Iterator[bytes]:
    """Yield the parts of a file that is uploaded. The client requests a part when the server has acknowledged an
    earlier one, so `on_progress` is called before each part."""
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            on_progress()
            yield part


def _read_head(answer: "GetResult") -> ObjectHead:
    meta = answer.meta
    writer = str(answer.attributes.get(_WRITER, ""))
    return ObjectHead(bytes=meta["size"], tag=meta["e_tag"] or "", modified=meta["last_modified"], writer=writer)


def _write_body(answer: "GetResult", descriptor: int) -> ObjectHead:
    """Write the bytes of a range of an object to the same offsets in a file. Raises BaseError if bytes are missing."""
    start, end = answer.range
    for piece in answer.stream():
        remaining = memoryview(piece)
        while remaining:
            written = os.pwrite(descriptor, remaining, start)
            remaining, start = remaining[written:], start + written
    if start != end:
        raise BaseError(f"the response ended at byte {start}, but it should end at byte {end}")
    return _read_head(answer)
