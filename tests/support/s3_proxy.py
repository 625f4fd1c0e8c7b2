"""A proxy between a store and an S3 server that injects faults of networks and servers."""

import http.client
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from rheostat.infra.store import bucket

ERRORS = ("500", "503", "403")
"""Answers of the proxy itself. The server does not receive the request."""
FAULTS = (*ERRORS[:2], "lost answer", "500 after", "duplicate", "cut answer", "cut request", "slow")
"""Faults that a store must tolerate."""
STALL_SECONDS = 2

Answer = tuple[int, list[tuple[str, str]], bytes]


@dataclass
class Fault:
    """Fault of requests whose `METHOD /path` matches the pattern: of each, or of this number of them."""

    kind: str
    """One of FAULTS or ERRORS, a status with an S3 error code such as "400 RequestTimeout", or `page` for a page of
    status 200 that is no answer of S3. If the fault does something else, `before` or `after` the server receives the
    request."""
    pattern: str = ""
    times: int = 10**9
    does: Callable[[], object] = lambda: None


@dataclass
class Weather:
    """Settings and log of a proxy. Tests change them while the proxy runs."""

    faults: list[Fault] = field(default_factory=list)
    share: float = 0
    """Share of all requests that have one of FAULTS."""
    seed: int = 0
    clock: timedelta = timedelta()
    """Time by which the server's clock is ahead."""
    deaf_to: tuple[str, ...] = ()
    """Headers that the proxy removes, as if the server did not know them."""
    seconds: float = 0
    """Additional seconds of each answer."""
    seen: list[str] = field(default_factory=list)
    """`METHOD /path` of all requests."""
    headers: list[set[str]] = field(default_factory=list)
    """Names of the headers of each request."""
    times: list[float] = field(default_factory=list)
    """Times of the requests, on the monotonic clock."""

    def __post_init__(self) -> None:
        self._turn, self._random = threading.Lock(), random.Random(self.seed)

    def between(self, first: str, last: str) -> list[str]:
        """Return the requests from after the first match of one pattern to the first match of another."""
        begin, end = (next(i for i, each in enumerate(self.seen) if re.search(key, each)) for key in (first, last))
        return self.seen[begin + 1 : end + 1]

    def time_of(self, pattern: str) -> float:
        """Return when the first request of a pattern arrived."""
        return next(at for each, at in zip(self.seen, self.times, strict=True) if re.search(pattern, each))

    def strike(self, request: str) -> Fault:
        """Return the fault of a request."""
        with self._turn:
            self.seen.append(request)
            self.times.append(time.monotonic())
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
            return Fault(self._random.choice(FAULTS) if self._random.random() < self.share else "")


@contextmanager
def s3_proxy(upstream: str) -> Iterator[tuple[str, Weather]]:
    """Run a proxy in front of a server. Yield its address and its settings."""
    weather = Weather()
    host = urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            weather.headers.append({name.lower() for name in self.headers})
            self._answer(weather.strike(f"{self.command} {self.path}"), body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve

        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def _answer(self, struck: Fault, body: bytes) -> None:
            fault = struck.kind
            time.sleep(weather.seconds)
            if fault == "before":
                struck.does()
            if fault == "page":
                return self._send((200, [("Content-Type", "text/html")], b"<html><body>Please log in</body></html>"))
            status, _, code = fault.partition(" ")
            if fault in ERRORS or (status.isdigit() and code[:1].isupper()):
                return self._send((int(status), [], f"<Error><Code>{code}</Code></Error>".encode()))
            if fault == "slow":
                time.sleep(STALL_SECONDS)
            answer = self._forward(body, sent=len(body) // 2 if fault == "cut request" else len(body))
            if fault == "after":
                struck.does()
            if fault == "duplicate":
                answer = self._forward(body, sent=len(body))
            if fault == "500 after":
                answer = (500, [], b"<Error/>")
            if answer is None or fault == "lost answer":
                self.close_connection = True
                return None
            return self._send(answer, cut=fault == "cut answer")

        def _forward(self, body: bytes, *, sent: int) -> Answer | None:
            """Send the request to the server. A request that is cut has no answer."""
            connection = http.client.HTTPConnection(host, timeout=60)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in weather.deaf_to:
                    connection.putheader(name, value)
            connection.endheaders()
            connection.send(body[:sent])
            if sent < len(body):
                connection.close()
                return None
            response = connection.getresponse()
            content = response.read()
            connection.close()
            return response.status, [self._later(*header) for header in response.getheaders()], content

        def _later(self, name: str, value: str) -> tuple[str, str]:
            if name.lower() in ("date", "last-modified"):
                return name, format_datetime(parsedate_to_datetime(value) + weather.clock, usegmt=True)
            return name, value

        def _send(self, answer: Answer, *, cut: bool = False) -> None:
            status, headers, content = answer
            lengths = [value for name, value in headers if name.lower() == "content-length"]
            length = lengths[0] if self.command == "HEAD" and lengths else str(len(content))
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            if status not in (204, 304):
                self.send_header("Content-Length", length)
            self.close_connection = self.close_connection or cut
            with suppress(OSError):  # nobody waits any more
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content[: len(content) // 2] if cut else content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # clients are killed in the middle of requests
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield address, weather
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
        for known in [each for each in bucket._quotes if urlsplit(each[0]).netloc == urlsplit(address).netloc]:
            del bucket._quotes[known]  # a later server may get the same port
