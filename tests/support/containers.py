"""Containers for tests: podman with an empty image, in which the programs of this machine are mounted."""

import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

IMAGE = "localhost/rheostat-test:empty"
MOUNTED = ("--volume", "/usr:/usr:ro", "--env", "PATH=/usr/bin")
"""Options with which the empty image contains the programs of this machine."""
_LINKS = ("bin", "lib", "lib64")
_CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
"""


def _podman(*arguments: str, **settings: object) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["podman", *arguments], capture_output=True, check=True, timeout=60, **settings)  # type: ignore[call-overload,no-any-return]


def find_missing() -> str:
    """Return why containers cannot be tested on this machine, or an empty text."""
    for path in ("/usr/bin/python3", *(f"/usr/{name}" for name in _LINKS)):
        if not Path(path).exists():
            return f"{path} does not exist"
    return "" if shutil.which("podman") else "podman is not installed (make containers)"


def create_image(folder: Path) -> None:
    """Create the empty image. `folder` receives the settings of podman: the runtime runc, which works with all versions
    of control groups."""
    if shutil.which("runc"):
        (folder / "containers.conf").write_text(_CONF)
        os.environ["CONTAINERS_CONF"] = str(folder / "containers.conf")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, mode in (("tmp", 0o1777), ("run", 0o755), ("usr", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        for name in _LINKS:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
    _podman("import", "-", IMAGE, input=content.getvalue())


def list_containers() -> set[str]:
    """Return the ids of all containers of the test image."""
    listed = json.loads(_podman("ps", "--all", "--format", "json").stdout or b"[]")
    return {each["Id"] for each in listed or () if each["Image"] == IMAGE}


@contextmanager
def serve_docker(folder: Path) -> Iterator[None]:
    """Serve Docker's API with podman, for docker's client."""
    address = f"unix://{folder}/docker.sock"
    server = subprocess.Popen(["podman", "system", "service", "--time", "0", address])
    try:
        while subprocess.run(["docker", "--host", address, "version"], capture_output=True).returncode:
            if server.poll() is not None:
                pytest.fail("podman's server has ended")
            time.sleep(0.1)
        os.environ["DOCKER_HOST"] = address
        yield
    finally:
        os.environ.pop("DOCKER_HOST", None)
        server.terminate()
        server.wait(60)
