"""Azurite, Microsoft's server for tests of Azure Blob Storage, on loopback. It checks every signature."""

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import httpx

from tests.support.loopback import await_server, free_port, running

VERSION = "3.35.0"
HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rheostat" / f"azurite-{VERSION}"
"""Directory in which npm installs Azurite once for all test sessions."""
PROGRAM = HOME / "node_modules/azurite/dist/src/blob/main.js"
INSTALL_SECONDS = 600
CONTAINER = "rheostat"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Public key of the account for tests, from Azurite's documentation."""


def missing_azurite() -> str:
    """Return why Azurite cannot run here, after an attempt to install it with npm; "" if it can run."""
    if PROGRAM.exists():
        return ""
    if missing := [name for name in ("node", "npm") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} not found: apt-get install nodejs npm"
    HOME.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", f"azurite@{VERSION}"]
    done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    return f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-300:]}" if done.returncode else ""


@contextmanager
def azurite(home: Path) -> Iterator[str]:
    """Run Azurite with objects in memory and one container. Yield its endpoint."""
    port = free_port()
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    command = ["node", str(PROGRAM), "--blobHost", "127.0.0.1", "--blobPort", str(port), *options]
    with running(command, home / "log", directory=home):
        endpoint = f"http://127.0.0.1:{port}"
        await_server(endpoint)
        create_container(endpoint, CONTAINER)
        yield endpoint


def create_container(endpoint: str, name: str) -> None:
    """Create a container, with a request that is signed with the account's key."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    fields = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{version}"]
    signed = "\n".join([*fields, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
    }
    httpx.put(f"{endpoint}/{ACCOUNT}/{name}?restype=container", headers=headers, trust_env=False).raise_for_status()
