"""Make an engine's environment: a half-made one anew, a complete one is found at once, two at a time do not collide."""

import fcntl
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.environments.find import (
    STAMP,
    Environment,
    Platform,
    Stamp,
    check_environment,
    complete,
    default_directory,
    pins_digest,
    pins_path,
    platform_here,
    python_in,
    read_stamp,
)
from infra.errors import BadInput, InstallFailed

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
TELL_SECONDS = 5.0
NO_BUILD = "No matching distribution"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")


@dataclass(frozen=True, slots=True)
class _Site:
    """An environment that is being made."""

    directory: Path
    engine: str
    platform: Platform
    lock: int
    """Descriptor of the lock; every command inherits it, so that one which outlives us still holds it."""

    @property
    def python(self) -> Path:
        return python_in(self.directory)


def install(
    engine: str, *, interpreter: Path | None = None, into: Path | None = None, platform: Platform | None = None
) -> Environment:
    """Return an environment with the engine, made here unless a complete one is there.

    Raises BadInput for an interpreter, a place or a platform that cannot be, InstallFailed with pip's last line.
    """
    chosen = platform or platform_here()
    if chosen == "cuda" and platform_here() != "cuda":
        raise BadInput("--platform cuda: expected an NVIDIA driver, found none; a CPU takes --platform cpu")
    directory = (into or default_directory(engine, chosen)).absolute()
    maker = interpreter or Path(sys.executable)
    _check_interpreter(maker)
    _check_place(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory) as lock:
            found = complete(directory, engine, platform=chosen)
            return found or _make(_Site(directory, engine, chosen, lock), maker)
    except OSError as error:
        raise InstallFailed(f"{directory}: {error.strerror or error}") from error


def _check_interpreter(python: Path) -> None:
    try:
        able = (
            subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0
        )
    except OSError:
        able = False
    if not able:
        raise BadInput(f"{python}: expected a Python that can make environments (the modules venv and ensurepip)")


def _check_place(directory: Path) -> None:
    """Nothing is removed that this command did not make."""
    if not directory.exists() or read_stamp(directory) is not None:
        return
    if not directory.is_dir() or any(path.name != f"{STAMP}.new" for path in directory.iterdir()):
        raise BadInput(f"{directory}: expected an empty directory or one that this command made, found something else")


@contextmanager
def _lock(directory: Path) -> Iterator[int]:
    """Hold the place; wait while another installs there."""
    descriptor = os.open(directory.with_name(f".{directory.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another install into %s", directory)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _make(site: _Site, interpreter: Path) -> Environment:
    logger.info("making an environment for %s (%s) in %s", site.engine, site.platform, site.directory)
    site.directory.mkdir(exist_ok=True)
    stamp = Stamp(pins=pins_digest(site.engine, site.platform))
    _write(site, stamp)  # first: whatever is removed or made from here on is known to be ours
    _clear(site.directory)
    _run(site, [str(interpreter), "-m", "venv", str(site.directory)], what="venv")
    _install_packages(site)
    logger.info("importing %s", site.engine)
    try:
        made = check_environment(site.engine, site.python)
    except BadInput as error:
        raise InstallFailed(f"the environment is complete, but of no use: {error}") from error
    _write(site, stamp.model_copy(update={"made": made}))
    return made


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != STAMP:
            path.unlink()


def _write(site: _Site, stamp: Stamp) -> None:
    fresh = site.directory / f"{STAMP}.new"
    fresh.write_text(stamp.model_dump_json(indent=2))
    fresh.replace(site.directory / STAMP)


def _install_packages(site: _Site) -> None:
    """Install exactly the pins; what they ask for beyond is left out on purpose."""
    pins = pins_path(site.engine, site.platform)
    for pin in pins.read_text().splitlines():
        if re.fullmatch(r"torch==[\d.]+\+cpu", pin):
            _install_cpu_torch(site, pin)
    _run(site, [str(site.python), *PIP, "install", "--no-deps", "-r", str(pins)], what="pip", total=_count(pins))


def _install_cpu_torch(site: _Site, pin: str) -> None:
    """A package index of the machine may carry the CPU build; uv knows where PyTorch publishes it."""
    try:
        _run(site, [str(site.python), *PIP, "install", "--no-deps", "--only-binary=:all:", pin], what="pip", total=1)
    except InstallFailed as error:
        if NO_BUILD not in str(error):
            raise
        logger.info("no package index has %s, asking PyTorch's own", pin)
        _run(site, [str(site.python), *PIP, "install", "uv"], what="pip", total=1)
        uv = [str(site.directory / "bin" / "uv"), "pip", "install", "--python", str(site.python)]
        _run(site, [*uv, "--no-deps", "--torch-backend=cpu", pin.partition("+")[0]], what="uv", total=1)


def _count(pins: Path) -> int:
    return sum(not line.startswith("#") for line in pins.read_text().splitlines())


def _run(site: _Site, command: Sequence[str], *, what: str, total: int = 0) -> None:
    """Run one step to its end, and tell how far it is. Raises InstallFailed with its last line."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[site.lock]
        )
        try:
            told, last, before = time.monotonic(), "", _unpacked(site)
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                if total and time.monotonic() - told > TELL_SECONDS:
                    told, progress = time.monotonic(), _progress(_text(log.fileno()), _unpacked(site) - before, total)
                    if progress != last:
                        logger.info("%s", progress)
                    last = progress
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            raise InstallFailed(f"{what}: {_complaint(_text(log.fileno()), process.returncode)}")


def _progress(log: str, unpacked: int, total: int) -> str:
    """Say in one line where pip is."""
    if "Installing collected packages" in log:
        return f"unpacking packages: {min(unpacked, total)} of {total}"
    named = re.findall(r"^(?:Collecting|Requirement already satisfied:) ([\w.-]+)", log, re.MULTILINE)
    return f"fetching packages: {len(named)} of {total}, {named[-1]}" if named else "reading the package index"


def _unpacked(site: _Site) -> int:
    return sum(1 for _ in site.directory.glob("lib/python*/site-packages/*.dist-info"))


def _text(log: int) -> str:
    return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")


def _complaint(log: str, code: int) -> str:
    """Return the last line that is an error with the cause that uv names after it, or the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if re.match(r"error\b", line, re.IGNORECASE)]
    if not errors:
        return (lines or [f"it ended with exit code {code} without a word"])[-1]
    causes = [line for line in lines[errors[-1] + 1 :] if re.match(r"(cause|caused by)\b", line, re.IGNORECASE)]
    return " ".join([lines[errors[-1]], *causes])
