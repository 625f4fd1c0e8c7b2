"""A bucket of S3, or of any server that speaks it, asked with patience: an answer, or what was tried.

An answer may be lost after the server has written. So every conditional write carries a token of its own, and one whose
condition fails looks whose token stands there before it says that it has lost.
"""

import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store as Client
from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

from infra.errors import BadInput, StoreFailed
from infra.store.s3_errors import CODE, STATUS, Unsettled, may_pass

if TYPE_CHECKING:  # what obstore has for type checkers alone
    from obstore import GetResult

TEMPORARY: Final = ".tmp"
"""Folder of what is no object of a store: probes."""
_WRITER: Final = "rheostat-writer"
RANGED_BYTES: Final = 64 << 20
"""So much of an object comes in one answer; the rest of a larger one beside it, part by part."""
_PART_BYTES: Final = 16 << 20
_STREAMS: Final = 8
_PAGE: Final = 1000
"""Names in one answer to a listing."""
_ROUND: Final = 100
"""Divides the page size of every known server: only after a multiple may the last page of a listing have been empty."""
_RACERS: Final = 4
_EMPTY = "416"
"""What a range of an object without any bytes is answered with."""
_MACHINE_CREDENTIALS = "169.254."
"""Where a cloud's own machines are told who they are: asked where nothing else says it."""
T = TypeVar("T")

_quotes: dict[tuple[str, str], bool] = {}
"""Whether tags in conditions wear quotes, by endpoint and bucket: of those that this process has tried."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a server."""

    answer_seconds: float = 60
    """For one answer, or the next bytes of one."""
    total_seconds: float = 120
    """For an answer to one question, however often it is asked."""


PATIENCE: Final = Patience()


@dataclass(frozen=True, slots=True)
class Stored:
    """What stands under a name now."""

    bytes: int
    tag: str
    """Changes with the content."""
    modified: datetime
    """By the server's own clock, which cuts it to seconds."""
    writer: str = ""
    """Token of the conditional write that made it."""


class Requests:
    """Counts requests by verb, in whatever thread they are sent."""

    def __init__(self) -> None:
        self._turn, self._counts = Lock(), Counter[str]()

    def add(self, verb: str, count: int = 1) -> None:
        """Count requests that are about to be sent."""
        with self._turn:
            self._counts[verb] += count

    def so_far(self) -> dict[str, int]:
        """How many there have been."""
        with self._turn:
            return dict(self._counts)


@dataclass(frozen=True)
class Bucket:
    """Names below a prefix of a bucket."""

    uri: str
    client: Client = field(repr=False, compare=False)
    parts: Client = field(repr=False, compare=False)
    """Asks again by itself for parts of what is large, which is not begun anew for one of them."""
    patience: Patience = PATIENCE
    requests: Requests = field(default_factory=Requests, repr=False, compare=False)
    """Those that were sent to it; what is asked again for the parts of an upload is not counted again."""
    known: set[str] = field(default_factory=set, repr=False, compare=False)
    """At most one name that this process has found in the bucket."""

    def create(self, name: str, body: bytes | Path) -> str | None:
        """Write in one request if the name is free, and return the tag; None if it is taken."""
        return self._write(name, body, version="")

    def replace(self, name: str, body: bytes, *, version: str) -> str | None:
        """Write in place of what has this tag, and return the new one; None if something else stands there."""
        return self._write(name, body, version=version if self.quotes_tags() else version.strip('"'))

    def upload(self, name: str, path: Path) -> str:
        """Write a large file in parts, and return the tag; it appears whole, in place of what stood there."""
        token = secrets.token_hex(16)

        def attempt() -> str:
            self.requests.add("POST", 2)
            self.requests.add("PUT", -(-path.stat().st_size // _PART_BYTES))
            try:
                done = obstore.put(
                    self.parts,
                    name,
                    path,
                    attributes={_WRITER: token},
                    use_multipart=True,
                    chunk_size=_PART_BYTES,
                    max_concurrency=4,
                )
                return done["e_tag"] or ""
            except (BaseError, FileNotFoundError) as error:
                found = self._find(name)
                if found is not None and found.writer == token:
                    return found.tag
                if "NoSuchUpload" in str(error):  # what became of it nobody knows
                    raise Unsettled(f"the upload of {name!r} is gone") from error
                raise

        return self._ask(f"cannot write {name!r}", attempt)

    def find(self, name: str) -> Stored | None:
        """Look what stands under a name."""
        return self._ask(f"cannot look for {name!r}", lambda: self._find(name))

    def read(self, name: str) -> tuple[bytes, Stored] | None:
        """Return the bytes under a name, and what they are."""

        def attempt() -> tuple[bytes, Stored] | None:
            self.requests.add("GET")
            try:
                answer = obstore.get(self.client, name)
                return answer.bytes().to_bytes(), _stored(answer)
            except FileNotFoundError:
                return None

        return self._ask(f"cannot read {name!r}", attempt)

    def download(self, name: str, path: Path) -> Stored | None:
        """Write the bytes under a name to a file, of many in parallel, and return what they are."""
        what = f"cannot read {name!r}"
        with path.open("wb", buffering=0) as file, ThreadPoolExecutor(_STREAMS) as threads:
            rest: list[Future[Stored]] = []

            def beginning() -> Stored | None:
                try:
                    answer = self._range(name, 0, RANGED_BYTES)
                except FileNotFoundError:
                    return None
                if not rest:
                    starts = range(RANGED_BYTES, answer.meta["size"], _PART_BYTES)
                    rest.extend(threads.submit(self._ask, what, partial(later, start)) for start in starts)
                return _written(answer, file.fileno())

            def later(start: int) -> Stored:
                return _written(self._range(name, start, start + _PART_BYTES), file.fileno())

            first = self._ask(what, beginning)
            if any(part.result() != first for part in rest):
                raise StoreFailed(f"store {self.uri}: {name!r} became another while it was read")
            return first

    def _range(self, name: str, start: int, end: int) -> "GetResult":
        """Ask for some of an object's bytes, as far as it has them."""
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
        """List names, sizes and times of change of all that is below a folder."""
        found = self._list(folder, lambda: obstore.list(self.client, folder or None).collect())
        return [(each["path"], each["size"], each["last_modified"]) for each in found]

    def children(self, folder: str) -> list[str]:
        """List the names directly below a folder."""

        def paths() -> list[str]:
            found = obstore.list_with_delimiter(self.client, folder or None)
            return [*found["common_prefixes"], *(each["path"] for each in found["objects"])]

        return [path.rpartition("/")[2] for path in self._list(folder, paths)]

    def _list(self, folder: str, pages: Callable[[], Sequence[T]]) -> Sequence[T]:
        """List a folder; if the last page may have been empty, have the server show that it lists, and list again.

        The client reads any XML of status 200 that is no ListBucketResult, such as a page of a proxy, as a page without
        names that ends the listing. Raises StoreFailed if the server keeps answering so.
        """
        what = f"cannot list {folder!r}"
        found = self._ask(what, lambda: self._count_pages(pages()))
        if len(found) % _ROUND:
            return found
        self._ask(what, self._check_listing)
        return self._ask(what, lambda: self._count_pages(pages()))

    def _count_pages(self, found: Sequence[T]) -> Sequence[T]:
        self.requests.add("LIST", max(1, -(-len(found) // _PAGE)))
        return found

    def _check_listing(self) -> None:
        """Raise Unsettled unless a listing has an object that is there: one that is known, or else a new one.

        Nothing is checked if no object is known and this process may write none.
        """
        known, probe = next(iter(self.known), ""), f"{TEMPORARY}/{secrets.token_hex(8)}"
        if not known:
            try:
                self._write(probe, b"", version="")
            except StoreFailed:
                return
        name = known or probe
        self.requests.add("LIST")
        first = next(iter(obstore.list(self.client, name.rpartition("/")[0] or None, offset=name[:-1])), [])
        is_listed = any(each["path"] == name for each in first)
        is_there = is_listed or self._find(name) is not None
        if not known:
            self.delete(probe)
        elif not is_there:
            self.known.discard(name)
        if is_there and not is_listed:
            raise Unsettled(f"a listing lacks {name!r}, which is there: expected a ListBucketResult, found other XML")

    def delete(self, name: str) -> None:
        """Free a name; one that is free already is fine."""
        self.requests.add("POST")  # how the library deletes
        self.known.discard(name)
        self._ask(f"cannot delete {name!r}", lambda: obstore.delete(self.client, name))

    def now(self) -> datetime:
        """Ask the server what time it is: that of something written now."""
        name = f"{TEMPORARY}/{secrets.token_hex(8)}"
        self.create(name, b"")
        found = self.find(name)
        self.delete(name)
        if found is None:
            raise StoreFailed(f"store {self.uri}: {name!r} was written and is gone")
        return found.modified

    def quotes_tags(self) -> bool:
        """Whether tags in conditions wear quotes, as the standard has it and some servers do not.

        Raises BadInput unless conditional writes hold, which is tried, once in a process, and not believed.
        """
        where = (str(self.client.config.get("endpoint")), str(self.client.config.get("bucket")))
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
            raise self._refusal(f"of {_RACERS} writers of one free name {won.count(True)} won")
        tag = found[1].tag
        if self._write(name, b"stale", version='"00000000000000000000000000000000"') is not None:
            raise self._refusal("If-Match with another tag did not stop a write")
        forms = {True: tag, False: tag.strip('"')}
        quotes = next((quotes for quotes, form in forms.items() if self._write(name, b"new", version=form)), None)
        if quotes is None:
            raise self._refusal("If-Match with the right tag stopped a write")
        self.delete(name)
        return quotes

    def _refusal(self, found: str) -> BadInput:
        return BadInput(f"store {self.uri}: expected a server that honours conditional puts, found that {found}")

    def _write(self, name: str, body: bytes | Path, *, version: str) -> str | None:
        """Write if the name is free, or if what stands there has that version; return the new tag if so."""
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
                found = self._find(name)
                if found is not None and found.writer == token:
                    return found.tag
                unchanged = found.tag.strip('"') == version.strip('"') if found is not None else not version
                if isinstance(error, AlreadyExistsError) and unchanged:  # 409: of writers at the same time none won
                    raise Unsettled(f"{name!r} is as it was, and the write was refused") from error
                return None

        return self._ask(f"cannot write {name!r}", attempt)

    def _find(self, name: str) -> Stored | None:
        self.requests.add("HEAD")
        try:
            stored = _stored(obstore.get(self.client, name, options={"head": True}))
        except FileNotFoundError:
            return None
        if not self.known and not name.startswith(f"{TEMPORARY}/"):  # probes come and go
            self.known.add(name)
        return stored

    def _ask(self, what: str, attempt: Callable[[], T]) -> T:
        retrying = Retrying(
            retry=retry_if_exception(may_pass),
            wait=wait_random_exponential(multiplier=0.2, max=10),
            stop=stop_before_delay(self.patience.total_seconds),
            reraise=True,
        )
        started = monotonic()
        try:
            return retrying(attempt)
        except (BaseError, OSError) as error:
            times, said = retrying.statistics["attempt_number"], str(error)
            code = CODE.search(said)
            if code is not None and code[1] == "NoSuchBucket":
                raise BadInput(f"store {self.uri}: expected a bucket that exists, found none of its name") from error
            if _MACHINE_CREDENTIALS in said:
                raise BadInput(
                    f"store {self.uri}: expected credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in the "
                    "profile that AWS_PROFILE names; found none, and none that are this machine's own"
                ) from error
            raise StoreFailed(
                f"store {self.uri}: {what}: asked {times} time{'s' * (times > 1)} in {monotonic() - started:.1f} s: "
                f"{said.splitlines()[0].partition(': <')[0]}{f': {code[1]}' if code is not None else ''}"
            ) from error


def _stored(answer: "GetResult") -> Stored:
    meta = answer.meta
    writer = str(answer.attributes.get(_WRITER, ""))
    return Stored(bytes=meta["size"], tag=meta["e_tag"] or "", modified=meta["last_modified"], writer=writer)


def _written(answer: "GetResult", descriptor: int) -> Stored:
    """Write an answer's bytes where they belong in a file. Raises BaseError unless all of them came."""
    start, end = answer.range
    for piece in answer.stream():
        left = memoryview(piece)
        while left:
            written = os.pwrite(descriptor, left, start)
            left, start = left[written:], start + written
    if start != end:
        raise BaseError(f"expected bytes up to {end}, found {start}")
    return _stored(answer)
