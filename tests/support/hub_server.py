"""Local server that speaks the part of the Hugging Face Hub's HTTP API that huggingface_hub uses."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.support.servers import serve_http

LARGE = (".safetensors", ".parquet")
"""Suffixes of the files that the server stores with Git LFS."""
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/([^/]+))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Repository with its commits, the newest last."""

    commits: list[dict[str, bytes]]
    is_gated: bool = False
    """Whether the token must be `hf_good`."""
    is_private: bool = False
    messages: list[str] = field(default_factory=list)
    """Messages of the commits that clients pushed."""

    def commit(self, revision: str) -> str | None:
        """Return the commit of a revision: `main`, or a commit."""
        known = [commit_of(files) for files in self.commits]
        return known[-1] if revision == "main" else revision if revision in known else None

    def files(self, commit: str) -> dict[str, bytes]:
        """Return the files of a commit."""
        return next(files for files in self.commits if commit_of(files) == commit)


@dataclass
class Hub:
    """State of the server."""

    url: str = ""
    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    faults: list[str] = field(default_factory=list)
    """Faults of the next downloads: "cut" ends the connection early, "wrong" sends other bytes of the same size."""

    def add(self, name: str, files: dict[str, bytes] | Path, *, kind: str = "model", is_gated: bool = False) -> str:
        """Add a commit with these files, or with the files of a directory, and return the commit."""
        if isinstance(files, Path):
            paths = [path for path in sorted(files.rglob("*")) if path.is_file()]
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        repository = self.repositories.setdefault((f"{kind}s", name), Repository([], is_gated))
        repository.commits.append(files)
        return commit_of(files)

    def downloads(self) -> list[str]:
        """Return the names of the files that were downloaded so far."""
        paths = [request.partition(" ")[2] for request in self.requests if request.startswith("GET ")]
        return [match[4] for path in paths if (match := _FILE.fullmatch(path))]


def commit_of(files: dict[str, bytes]) -> str:
    """Return the commit of these files, 40 hexadecimal digits."""
    return hashlib.sha1(json.dumps([[name, blob_id(data)] for name, data in files.items()]).encode()).hexdigest()


def blob_id(data: bytes) -> str:
    """Return Git's digest of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Run the block with a running server without repositories."""
    hub = Hub()
    with serve_http(type("Handler", (_Handler,), {"hub": hub})) as url:
        hub.url = url
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self._respond()

    def do_GET(self):
        self._respond()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        self.hub.requests.append(f"POST {path}")
        if self.headers["Authorization"] != "Bearer hf_good":
            self._error(401, "")
        elif path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}" if request.get("organization") else request["name"]
            is_private = request.get("private") is True or request.get("visibility") == "private"
            kind = f"{request.get('type') or 'model'}s"
            self.hub.repositories.setdefault((kind, name), Repository([{}], is_private=is_private))
            self._json({"url": f"{self.hub.url}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            names = [each["path"] for each in json.loads(body)["files"]]
            self._json({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        else:
            self._store_commit(path, body)

    def _store_commit(self, path, body):
        import base64

        kind, name, *_ = _API.fullmatch(path).groups()
        repository = self.hub.repositories[kind, name]
        lines = [json.loads(line) for line in body.decode().splitlines()]
        new = {
            each["value"]["path"]: base64.b64decode(each["value"]["content"]) for each in lines if each["key"] == "file"
        }
        repository.messages += [each["value"]["summary"] for each in lines if each["key"] == "header"]
        repository.commits.append({**repository.commits[-1], **new})
        commit = commit_of(repository.commits[-1])
        self._json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"})

    def _respond(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        api, file = _API.fullmatch(path), _FILE.fullmatch(path)
        if file:
            kind, name, part, revision = "datasets" if file[1] else "models", file[2], file[4], file[3]
        elif api:
            kind, name, part, revision = api.groups()
        else:
            self._error(404, "")
            return
        repository, token = self.hub.repositories.get((kind, name)), self.headers["Authorization"]
        commit = None if repository is None else repository.commit(revision or "main")
        if token == "Bearer hf_expired":
            self._error(401, "Invalid credentials in Authorization header")
        elif repository is None:  # the Hub does not tell strangers which repositories exist
            self._error(404 if token else 401, "RepoNotFound")
        elif repository.is_gated and token != "Bearer hf_good" and file:
            self._error(403 if token else 401, "GatedRepo")
        elif commit is None:
            self._error(404, "RevisionNotFound")
        elif file:
            self._file(repository.files(commit).get(part), part, commit)
        elif part == "tree":
            self._json([_entry(name, data) for name, data in repository.files(commit).items()])
        else:
            siblings = [{"rfilename": each} for each in repository.files(commit)]
            self._json({"id": name, "sha": commit, "siblings": siblings})

    def _file(self, data, name, commit):
        if data is None:
            self._error(404, "EntryNotFound")
            return
        fault = self.hub.faults.pop(0) if self.hub.faults and self.command == "GET" else ""
        etag = hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else blob_id(data)
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            sent = data[::-1] if fault == "wrong" else data
            self.wfile.write(sent[start : start + (len(data) - start) // 2] if fault == "cut" else sent[start:])
            self.close_connection = self.close_connection or fault == "cut"

    def _json(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status, code):
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def _entry(name, data):
    entry = {"type": "file", "path": name, "size": len(data), "oid": blob_id(data)}
    large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry | ({"lfs": large} if name.endswith(LARGE) else {})
