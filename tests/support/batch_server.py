"""A small server with the batch routes of a vLLM server and without a model. Tests can spoil its answers."""

import base64
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from rheostat.infra.store.checksums import canonical_json
from rheostat.models.records.seeds import derive_seed

KEY = "the servers' key"
ABOUT = {
    "vllm": "0.32.0",
    "torch": "2.13.0",
    "transformers": "5.0",
    "python": "3.11",
    "platform": "cpu",
    "device": "",
    "dtype": "float32",
    "logprobs": "processed",
    "max_model_len": 256,
    "tensor_parallel": 1,
    "lora_rank": 0,
    "sleeps": False,
    "tells_experts": True,
}
Line = dict[str, object] | bytes | None
"""An object, raw bytes, or None for the end of the connection."""


@dataclass
class BatchServer:
    """Serves the policy loaded last. `spoil` may change the lines of the n-th answer of generate, counted from 0."""

    digest_of: Callable[[str], str]
    spoil: Callable[[int, list[Line]], list[Line]] = lambda number, lines: lines
    about: dict[str, object] = field(default_factory=lambda: dict(ABOUT))
    url: str = ""
    digest: str = ""
    proofs: list[str] = field(default_factory=list)
    """Answers to the next proofs of the policy. Later proofs are true."""
    loads: int = 0
    asked: list[dict] = field(default_factory=list)
    """Bodies of the requests to generate, except the first test request of the engine."""
    steps: int = 1000
    """Steps so far, also those for earlier callers."""
    healthy: bool = True
    token_logprob: float = -1.0
    """Factor: the log-prob of a continuation is this number times the number of tokens up to its end."""
    refusal: tuple[int, str] | None = None
    """Status and reason with which all work is refused, except the first test request of the engine."""

    def answer(self, path: str, body: dict) -> tuple[int, list[Line]]:
        match path:
            case "/rheostat/about":
                return 200, [self.about]
            case "/rheostat/load":
                self.loads += 1
                known, self.digest = self.digest, self.digest_of(body["directory"])
                return 200, [{"digest": self.digest, "bytes": 0 if known == self.digest else 7, "seconds": 0.1}]
            case "/rheostat/proof":
                return 200, [{"digest": self.proofs.pop(0) if self.proofs else self.digest}]
            case "/rheostat/sleep":
                return 200, [{"slept": False}]
            case _ if body["digest"] != self.digest:
                return 409, [{"error": "another policy is served", "digest": self.digest}]
            case _ if self.refusal is not None:
                return self.refusal[0], [{"error": self.refusal[1]}]
            case "/rheostat/likelihoods":
                found = [
                    [self.token_logprob * (len(one["tokens"]) + len(two)) for two in body["continuations"]]
                    for one in body["prompts"]
                ]
                self.steps += 1
                return 200, [{"logprobs": encoded(np.array(found, "<f8"))} | self._counts()]
            case _:
                return 200, self._generated(body)

    def _counts(self) -> dict[str, object]:
        sums = {"steps": self.steps, "sequences": 2.0 * self.steps, "sequences_squared": 4.0 * self.steps}
        return {"done": True} | sums | {"seconds": 0.5 * self.steps, "sequence_seconds": 1.0 * self.steps}

    def _generated(self, body: dict) -> list[Line]:
        self.steps += max((one["max_tokens"] for one in body["requests"]), default=0)
        lines: list[Line] = [line for one in body["requests"] for line in completion(one)]
        lines.append(self._counts())
        if [one["tokens"] for one in body["requests"]] == [[0]]:
            return lines
        self.asked.append(body)
        return self.spoil(len(self.asked) - 1, lines)


def tokens_of(seed: int, count: int) -> list[int]:
    """Return the tokens that the server generates for a seed. None of them is an end token."""
    return [2 + derive_seed("token", seed, index) % 300 for index in range(count)]


def completion(asked: dict) -> list[Line]:
    """Return a completion in two chunks."""
    tokens = tokens_of(asked["seed"], asked["max_tokens"])
    half = len(tokens) // 2
    chosen = experts(asked["seed"], len(asked["tokens"]) + len(tokens) - 1) if asked["experts"] else {}
    return [
        chunk(asked["id"], tokens[:half], finish=None),
        chunk(asked["id"], tokens[half:], finish="length") | chosen,
    ]


def experts(seed: int, tokens: int, *, width: int = 2) -> dict[str, object]:
    """Return the encoded experts of this number of tokens, derived from the seed and the position."""
    rows = experts_of(seed, tokens, width=width)
    return {"experts": {"rows": encoded(rows), "width": width, "dtype": "<u1"}}


def experts_of(seed: int, tokens: int, *, width: int = 2) -> np.ndarray:
    rows = [[derive_seed("expert", seed, place, number) % 8 for number in range(width)] for place in range(tokens)]
    return np.array(rows, np.uint8)


def chunk(number: int, tokens: Sequence[int], *, finish: str | None, logprob: float = -0.5) -> dict[str, object]:
    logprobs = np.full(len(tokens), logprob, "<f4")
    return {"id": number, "tokens": encoded(np.array(tokens, "<i4")), "logprobs": encoded(logprobs), "finish": finish}


def encoded(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


@contextmanager
def batch_server(server: BatchServer) -> Iterator[BatchServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.respond({})

        def do_POST(self):
            self.respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def respond(self, body):
            status, lines = 200 if server.healthy else 503, []
            if self.path != "/health":
                status, lines = 401, [{"error": "no"}]
                if self.headers["Authorization"] == f"Bearer {KEY}":
                    status, lines = server.answer(self.path, body)
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.send_header("Connection", "close")
            self.end_headers()
            for line in lines:
                if line is None:
                    return
                data = line if isinstance(line, bytes) else canonical_json(line) + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *words):
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.handle_error = lambda *asked: None  # some tests disconnect during an answer
    server.url = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
