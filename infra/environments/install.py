"""Installation of an engine's Python environment. A complete environment is reused, and an incomplete environment is
created again.

A lock prevents two installations into the same directory at the same time.
"""

import fcntl
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

from rheostat.infra.environments.find import (
    STAMP,
    Environment,
    Stamp,
    check_environment,
    complete,
    default_directory,
    default_platform,
    find_distribution,
    pins_digest,
    pins_path,
    python_in,
    read_stamp,
    supported_pythons,
)
from rheostat.infra.environments.gpus import (
    TORCH_CUDA,
    TORCH_VARIABLE,
    Platform,
    check_driver,
    has_driver,
)
from rheostat.infra.errors import BadInput, InstallFailed

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 60.0
"""Maximum time in seconds for a Python interpreter to print its version."""


@dataclass(frozen=True, slots=True)
class _Site:
    """Python environment that is being created: its directory, engine and platform, and the lock on the directory."""

    directory: Path
    engine: str
    platform: Platform
    lock: int
    """File descriptor of the lock on the environment's directory. Commands started during the installation inherit the
    descriptor, so the directory stays locked while a command runs, even if this process has ended."""

    @property
    def python(self) -> Path:
        return python_in(self.directory)


def install(
    engine: str, *, interpreter: Path | None = None, into: Path | None = None, platform: Platform | None = None
) -> Environment:
    """Return an environment in which the engine is installed, and create it if no complete environment exists.
    `interpreter` is the Python that creates it (default: this one), and `into` is its directory (default:
    `default_directory`).

    Raises BadInput if the interpreter, directory, platform or NVIDIA driver cannot be used. Raises InstallFailed with
    the output of uv if the installation fails.
    """
    chosen = platform or default_platform(engine)
    if chosen not in find_distribution(engine).platforms:
        raise BadInput(f"{engine} has no build for {chosen}, because it uses no GPU. Remove --platform.")
    if chosen == "cuda":
        _check_cuda()
    directory = (into or default_directory(engine, chosen)).absolute()
    maker = interpreter or Path(sys.executable)
    _check_interpreter(maker, engine, chosen)
    _check_place(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory) as lock:
            environment = complete(directory, engine, platform=chosen)
            return environment or _create(_Site(directory, engine, chosen, lock), maker)
    except OSError as error:
        raise InstallFailed(
            f"the environment cannot be written to {directory}: {error.strerror or error}. Check the permissions and "
            "the free space, then run the same command again."
        ) from error


def _check_cuda() -> None:
    if os.environ.get(TORCH_VARIABLE) != "cuda" and not has_driver():
        raise BadInput(
            "--platform cuda needs an NVIDIA driver, but this machine has none. Use --platform cpu, or set "
            f"{TORCH_VARIABLE}=cuda to install the build for CUDA for use on other machines."
        )
    check_driver(TORCH_CUDA)


def _check_interpreter(python: Path, engine: str, platform: Platform) -> None:
    """Raise BadInput if a Python interpreter cannot be run, or if the pinned packages are not for its version."""
    command = [str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
        version = done.stdout.strip() if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        version = ""
    if not version:
        raise BadInput(
            f"{python} cannot be run as a Python interpreter. Choose a Python that can create virtual environments."
        )
    supported = supported_pythons(engine, platform)
    if supported and version not in supported:
        raise BadInput(
            f"{python} is Python {version}, but the pinned packages of {engine} for {platform} are for Python "
            f"{' or '.join(supported)}. Choose an interpreter with --python."
        )


def _check_place(directory: Path) -> None:
    """Raise BadInput if a directory has content that `install` did not create, because installing into the directory
    would delete this content."""
    if not directory.exists() or read_stamp(directory) is not None:
        return
    if not directory.is_dir() or any(path.name != f"{STAMP}.new" for path in directory.iterdir()):
        raise BadInput(
            f"{directory} is a file or has content that this command did not create. Choose a new or empty directory."
        )


@contextmanager
def _lock(directory: Path) -> Iterator[int]:
    """Run the block with a lock on a directory, and yield the lock's file descriptor. If another process is installing
    into the directory, wait until it has finished."""
    descriptor = os.open(directory.with_name(f".{directory.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another installation into %s", directory)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _create(site: _Site, interpreter: Path) -> Environment:
    logger.info("creating an environment for %s (%s) in %s", site.engine, site.platform, site.directory)
    site.directory.mkdir(exist_ok=True)
    stamp = Stamp(pins=pins_digest(site.engine, site.platform))
    _write(site, stamp)  # first, so that a later call recognizes the directory as created by `install`
    _clear(site.directory)
    _run(site, "venv", "--quiet", "--no-project", "--allow-existing", "--python", str(interpreter), str(site.directory))
    _install_packages(site)
    logger.info("importing %s", site.engine)
    try:
        environment = check_environment(site.engine, site.python)
    except BadInput as error:
        raise InstallFailed(f"the new environment was installed but cannot be used: {error}") from error
    if code := find_distribution(site.engine).preparation:
        _prepare(site, code)
    _write(site, stamp.model_copy(update={"made": environment}))
    return environment


def _prepare(site: _Site, code: str) -> None:
    """Run Python code in the new environment. Raises InstallFailed with the last line of its error."""
    done = subprocess.run(
        [site.python, "-c", code], env=_variables(), capture_output=True, text=True, pass_fds=[site.lock]
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InstallFailed(
            f"the preparation of {site.engine} failed: {lines[-1] if lines else f'exit code {done.returncode}'}. Check "
            "the network and the free space, then run the same command again."
        )


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
    """Install exactly the pinned packages. Dependencies that are not pinned are intentionally not installed."""
    pins = pins_path(site.engine, site.platform)
    torch = re.search(r"^torch==[\d.]+\+cpu$", pins.read_text(), re.MULTILINE)
    backend = ["--torch-backend=cpu"] if torch and not _has_cpu_torch(site, torch[0]) else []
    _run(site, "pip", "install", "--python", str(site.python), "--no-deps", *backend, "--requirements", str(pins))


def _has_cpu_torch(site: _Site, pin: str) -> bool:
    """Try to install the CPU build of torch with pip, using the package index that is configured on this machine. `pin`
    is the requirement. Return False if that fails. The caller then lets uv download torch from PyTorch's package
    index."""
    logger.info("installing %s with pip", pin)
    pip = [sys.executable, "-m", "pip", "--python", str(site.python), "install", "--no-deps", "--only-binary=:all:"]
    return subprocess.run([*pip, pin], env=_variables(), capture_output=True, pass_fds=[site.lock]).returncode == 0


def _run(site: _Site, *words: str) -> None:
    """Run uv with these arguments, and log its output. Raises InstallFailed with the error of uv in one line."""
    with subprocess.Popen(
        [find_uv_bin(), *words],
        env=_variables(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=[site.lock],
    ) as process:
        assert process.stdout is not None, "stdout is a pipe"
        output: list[str] = []
        try:
            for line in process.stdout:
                output.append(line.strip())
                if not line.startswith(" + "):  # uv prints one such line per package at the end
                    logger.info("%s", line.strip())
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        errors = [number for number, line in enumerate(output) if line.startswith("error")]
        reason = " ".join(output[errors[0] if errors else -1 :])
        raise InstallFailed(
            "uv, which installs the packages, failed: "
            f"{reason or f'exit code {process.returncode} without any output'}. "
            "Check the network and the free space, then run the same command again."
        )


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
