"""A small real OpenAI-compatible server whose replies the tests define, and which records its requests."""

import base64
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    """Before the status line."""
    stall_seconds: float = 0.0
    """After the headers, before the body."""
    reset: bool = False
    """Close the connection without an answer."""


@dataclass
class ChatRequest:
    """One received request."""

    path: str
    headers: dict[str, str]
    body: dict
    at: float

    @property
    def text(self) -> str:
        """Question of the request, or the token ids of its prompt."""
        if "messages" not in self.body:
            return json.dumps(self.body["prompt"])
        content = self.body["messages"][0]["content"]
        return content if isinstance(content, str) else content[-1]["text"]

    @property
    def images(self) -> list[bytes]:
        """Images of the question, in order."""
        parts = self.body["messages"][0]["content"][:-1]
        addresses = [part["image_url"]["url"].split(",", 1) for part in parts if isinstance(part, dict)]
        assert all(kind == "data:image/png;base64" for kind, _ in addresses)
        return [base64.b64decode(encoded) for _, encoded in addresses]


@dataclass
class ChatServer:
    """`reply` is called with the request and the number of earlier requests with the same question."""

    reply: Callable[[ChatRequest, int], Reply]
    url: str = ""
    asked: list[ChatRequest] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, asked: ChatRequest) -> Reply:
        with self.lock:
            before = sum(other.text == asked.text for other in self.asked)
            self.asked.append(asked)
        reply = self.reply(asked, before)
        time.sleep(reply.seconds)
        return reply


def reply_with(text: str, **choice: object) -> Reply:
    """Answer a question with the usual fields."""
    message = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **choice}
    usage = {"prompt_tokens": 5, "completion_tokens": len(text.split())}
    return Reply(body=json.dumps({"id": "x", "choices": [message], "usage": usage}).encode())


@contextmanager
def chat_server(reply: Callable[[ChatRequest, int], Reply], tls: ssl.SSLContext | None = None) -> Iterator[ChatServer]:
    server = ChatServer(reply)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.at_once += 1
                server.most_at_once = max(server.most_at_once, server.at_once)
            try:
                self.answer(server.handle(ChatRequest(self.path, dict(self.headers), body, time.monotonic())))
            except OSError:
                self.close_connection = True  # whoever asked has gone
            finally:
                with server.lock:
                    server.at_once -= 1

        def answer(self, reply):
            if reply.reset:
                self.close_connection = True
                return
            self.send_response(reply.status)
            self.send_header("Content-Length", str(len(reply.body)))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.flush()
            time.sleep(reply.stall_seconds)
            self.wfile.write(reply.body)

        def log_message(self, *arguments):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

        def handle_error(self, request, client_address):
            """Suppress the error of a client that disconnected during its request."""

    http = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        http.socket = tls.wrap_socket(http.socket, server_side=True)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{http.server_port}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
