"""Stores of every kind for tests: on disk, and on real servers on loopback.

moto answers like AWS. The gateway of a Ceph cluster is what many users run themselves, and it checks every signature.
Azurite is Microsoft's server for tests of Azure, and it checks every signature too.
"""

import fcntl
import io
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import httpx
import obstore
import pytest
from obstore.store import S3Store as Client

from rheostat.infra.store.azure import open_azure
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.object_service import TIMEOUTS, Timeouts
from rheostat.infra.store.s3 import open_s3
from rheostat.infra.store.storage import is_bucket_address, open_store
from tests.support.azurite import ACCOUNT, CONTAINER, KEY, azurite, missing_azurite
from tests.support.loopback import START_SECONDS, await_server, free_port, running

ACCESS_KEY, SECRET_KEY = "testkey", "testsecret"
BUCKET = "rheostat"
CEPH = ("ceph-mon", "ceph-osd", "radosgw")
"""Programs, and the Debian packages that contain them."""
INSTALL_SECONDS = 300


@dataclass(frozen=True)
class Place:
    """Address of a store, for any process of a test."""

    uri: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with which clients find the server."""
    lease_seconds: float = 4
    timeouts: Timeouts = TIMEOUTS

    def open(self) -> Store:
        """Open the store. The environment variables of this process stay changed."""
        os.environ.update(self.environment)
        if not is_bucket_address(self.uri):
            return open_store(self.uri)
        open_bucket = open_azure if self.uri.startswith("az://") else open_s3
        return open_bucket(self.uri, timeouts=self.timeouts, lease_seconds=self.lease_seconds)

    def manifests(self, run: str = "tiny") -> dict[str, str]:
        """Read key and digest of every manifest of a run."""
        store, folder = self.open(), f"{run}/manifests/"
        keys = [entry.key for entry in store.entries(folder)]
        return {key.removeprefix(folder).removesuffix(".json"): json.loads(store.read(key))["digest"] for key in keys}


@dataclass(frozen=True)
class S3Server:
    """Running server with an empty bucket."""

    endpoint: str
    home: Path

    def place(self, *, endpoint: str = "") -> Place:
        """Return a store that nobody has used, at this server or through a proxy to it."""
        environment = {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "RHEOSTAT_CACHE": str(self.home / "cache"),
        }
        return Place(f"s3://{BUCKET}/{secrets.token_hex(4)}/a-store", environment)


@dataclass(frozen=True)
class AzureServer:
    """Running Azurite with an empty container."""

    endpoint: str
    home: Path

    def place(self, *, endpoint: str = "") -> Place:
        """Return a store that nobody has used, at this server or through a proxy to it."""
        environment = {
            "AZURE_STORAGE_ENDPOINT": f"{endpoint or self.endpoint}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "RHEOSTAT_CACHE": str(self.home / "cache"),
        }
        return Place(f"az://{CONTAINER}/{secrets.token_hex(4)}/a-store", environment)


class S3Servers:
    """Servers that all processes of a test session share.

    A server starts on its first request and serves until no process uses it.
    """

    def __init__(self, home: Path, stack: ExitStack) -> None:
        home.mkdir(exist_ok=True)
        self._home, self._stack = home, stack
        self._running: dict[str, S3Server | AzureServer] = {}

    def start(self, kind: str) -> S3Server | AzureServer:
        """Return the server of a kind. A missing server skips its tests, or fails them if it is required."""
        if kind not in self._running:
            with (self._home / f"{kind}-lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if kind in INSTALL and (missing := INSTALL[kind]()):
                    (pytest.fail if os.environ.get("RHEOSTAT_REQUIRE_S3") else pytest.skip)(missing)
                self._running[kind] = self._share(kind, self._home / kind)
        return self._running[kind]

    def _share(self, kind: str, home: Path) -> S3Server | AzureServer:
        home.mkdir(exist_ok=True)
        using, told = (home / "users").open("a"), home / "endpoint"
        self._stack.callback(using.close)
        fcntl.flock(using, fcntl.LOCK_SH)  # waits where the server is being ended
        if told.exists():
            server = (AzureServer if kind == "azurite" else S3Server)(told.read_text(), home)
        else:
            server = self._stack.enter_context(SERVERS[kind](home))
            told.write_text(server.endpoint)
            self._stack.callback(fcntl.flock, using, fcntl.LOCK_EX)  # done before it ends: waits for all users
            self._stack.callback(told.unlink)
        return server


@contextmanager
def moto(home: Path) -> Iterator[S3Server]:
    """Run moto's server; it checks neither credentials nor digests of bodies."""
    port = free_port()
    with running([sys.executable, "-m", __name__, str(port)], home / "log", directory=Path(__file__).parents[2]):
        yield _ready(f"http://127.0.0.1:{port}", home)


@contextmanager
def azure(home: Path) -> Iterator[AzureServer]:
    """Run Azurite."""
    with azurite(home) as endpoint:
        yield AzureServer(endpoint, home)


def serve_moto(port: int) -> None:
    """Serve one request at a time, because between a condition and its write moto would let another writer pass."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    application, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def one_at_a_time(environment, start_response):
        body = environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
        with turn:
            return application({**environment, "wsgi.input": io.BytesIO(body)}, start_response)

    run_simple("127.0.0.1", port, one_at_a_time, threaded=True)


def missing_ceph() -> str:
    """Return why Ceph cannot run here, after an attempt to install it if that is allowed; "" if it can run."""
    missing = [name for name in CEPH if shutil.which(name) is None]
    if not missing:
        return ""
    if os.geteuid() or shutil.which("apt-get") is None:
        return f"{', '.join(missing)} not found: as root, apt-get install {' '.join(CEPH)}"
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *CEPH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if done.returncode:
        return f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
    return ""


@contextmanager
def rgw(home: Path, *, gibibytes: int = 4) -> Iterator[S3Server]:
    """Run a monitor, an object store in memory and the S3 gateway of Ceph in a directory, on loopback only."""
    with ExitStack() as stack:
        cluster = _Cluster(home)
        cluster.configure(mon_port=free_port(), gibibytes=gibibytes)
        stack.enter_context(running(cluster.ceph("ceph-mon", "-i", "a", "-f"), home / "mon.out"))
        cluster.run("ceph", "osd", "new", osd := str(uuid.uuid4()))
        cluster.run("ceph-osd", "-i", "0", "--mkfs", "--no-mon-config", "--osd-uuid", osd)
        stack.enter_context(running(cluster.ceph("ceph-osd", "-i", "0", "-f"), home / "osd.out"))
        port = free_port()
        stack.enter_context(gateway(home, port))
        user = ["user", "create", "--uid=test", "--display-name=test"]
        cluster.run("radosgw-admin", *user, f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
        yield _ready(f"http://127.0.0.1:{port}", home)


@contextmanager
def gateway(home: Path, port: int) -> Iterator[str]:
    """Run another gateway of a Ceph cluster, which ends by SIGKILL."""
    words = ["radosgw", "-n", "client.rgw", "-f", f"--rgw-frontends=beast endpoint=127.0.0.1:{port}"]
    with running(_Cluster(home).ceph(*words), home / f"rgw-{port}.out"):
        address = f"http://127.0.0.1:{port}"
        await_server(address)
        yield address


@dataclass(frozen=True)
class _Cluster:
    home: Path

    def ceph(self, program: str, *arguments: str) -> list[str]:
        return [program, "-c", str(self.home / "ceph.conf"), *arguments]

    def run(self, program: str, *arguments: str) -> None:
        _run(self.ceph(program, *arguments))

    def configure(self, *, mon_port: int, gibibytes: int) -> None:
        """Write the configuration, the keys and the monitor's map, and create the monitor's store."""
        home, fsid = self.home, str(uuid.uuid4())
        for name in ("mon", "osd", "rgw", "run"):
            (home / name).mkdir(parents=True)
        settings = {
            "fsid": fsid,
            "mon host": f"[v2:127.0.0.1:{mon_port}/0]",
            "ms bind msgr1": "false",
            "public network": "127.0.0.0/8",
            "cluster network": "127.0.0.0/8",
            "auth cluster required": "cephx",
            "auth service required": "cephx",
            "auth client required": "cephx",
            "keyring": home / "keyring",
            "osd pool default size": 1,
            "osd pool default min size": 1,
            "osd pool default pg num": 1,
            "osd pool default pg autoscale mode": "off",
            "mon allow pool size one": "true",
            "osd crush chooseleaf type": 0,
            "osd objectstore": "memstore",
            "memstore device bytes": gibibytes << 30,
            "mon data": home / "mon",
            "osd data": home / "osd",
            "rgw data": home / "rgw",
            "run dir": home / "run",
            "log file": home / "$name.log",
            "pid file": home / "run/$name.pid",
            "admin socket": home / "run/$name.asok",
            "mon data avail crit": 1,
            "mon data avail warn": 2,
            "rgw enable apis": "s3",
        }
        lines = [f"{name} = {value}" for name, value in settings.items()]
        (home / "ceph.conf").write_text("\n".join(["[global]", *lines, ""]))
        everything = ["mon", "allow *", "osd", "allow *", "mgr", "allow *"]
        self._key("mon.", "mon", "allow *")
        self._key("client.admin", *everything)
        self._key("client.rgw", *everything)
        self._key("osd.0", "mon", "allow profile osd", "osd", "allow *")
        monitor_map = str(home / "monmap")
        _run(["monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon_port}]", monitor_map])
        keyring = str(home / "keyring")
        self.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitor_map, "--keyring", keyring)

    def _key(self, name: str, *capabilities: str) -> None:
        keyring = self.home / "keyring"
        create = [] if keyring.exists() else ["--create-keyring"]
        pairs = zip(capabilities[::2], capabilities[1::2], strict=True)
        caps = [part for service, rights in pairs for part in ("--cap", service, rights)]
        _run(["ceph-authtool", *create, str(keyring), "--gen-key", "-n", name, *caps])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    assert not done.returncode, f"{command}: {done.stdout}{done.stderr}"


def _ready(endpoint: str, home: Path) -> S3Server:
    """Wait until a server answers, and create its bucket."""
    await_server(endpoint)
    server = S3Server(endpoint, home)
    client = Client(
        BUCKET,
        endpoint=endpoint,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        client_options={"allow_http": True},
    )
    address = obstore.sign(client, "PUT", "", expires_in=timedelta(minutes=1))  # of no object: of the bucket itself
    httpx.put(address, trust_env=False).raise_for_status()
    return server


SERVERS = {"moto": moto, "rgw": rgw, "azurite": azure}
"""Functions that run a server, by its kind."""
INSTALL = {"rgw": missing_ceph, "azurite": missing_azurite}
"""Functions that install a server if it is missing, and return why it cannot run."""


if __name__ == "__main__":
    serve_moto(int(sys.argv[1]))
