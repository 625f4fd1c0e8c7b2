"""Containers in which untrusted programs of users run, started with podman or docker.

Code in a container sees the files of its image and the folders of users' modules, which it can only read. It has no
capabilities and, by default, no network. The container ends when its stdin is closed, even if this process or the
client of the container engine is killed.
"""

import functools
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rheostat.infra import runner
from rheostat.infra.errors import BadInput
from rheostat.infra.untrusted_text import make_visible

ContainerEngine = Literal["podman", "docker"]
"""Program that runs containers."""
PYTHON: Final = "python3"
"""Python interpreter of an image, which is searched on the PATH of the image."""
CHANNEL: Final = "/run/rheostat"
"""Directory in containers that contains the socket `SOCKET`."""
SOCKET: Final = "channel"
_MAX_PROCESSES: Final = 512
_SECONDS: Final = 60.0
_NETWORK: Final = ("--network", "--net")
_FIND = (
    "import shutil, sys; print(sys.version_info >= tuple(map(int, sys.argv[1:3])), *map(shutil.which, sys.argv[3:]))"
)


@dataclass(frozen=True, slots=True)
class Container:
    """Description of the containers in which agents run."""

    engine: ContainerEngine
    image: str
    options: tuple[str, ...] = ()
    """Additional options of `podman run` or `docker run`."""

    def build_command(self, folders: Sequence[str] = (), *, channel: Path | None = None) -> list[str]:
        """Return the command line that starts a container, without the program inside. The program inside can read
        `folders`, and the directory `channel` is mounted as `CHANNEL`. Raises BadInput if a folder cannot be
        mounted."""
        paths = sorted({folder for folder in folders if Path(folder).exists() and Path(folder) != Path("/")})
        for path in paths:
            if ":" in path:
                raise BadInput(
                    f"{self.engine} cannot mount the folder {path!r} in containers, because its name contains a colon. "
                    "Rename the folder"
                )
        mounts = [(path, path) for path in paths] + ([(str(channel), CHANNEL)] if channel is not None else [])
        has_network = any(option.partition("=")[0] in _NETWORK for option in self.options)
        return [
            *(self.engine, "run", "--rm", "--interactive", "--pull", "never", "--entrypoint", ""),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--security-opt", "label=disable"),
            *("--pids-limit", str(_MAX_PROCESSES), *(() if has_network else ("--network", "none"))),
            *(word for outside, inside in mounts for word in ("--volume", f"{outside}:{inside}:ro")),
            *(*self.options, self.image),
        ]


def start_contained(
    container: Container, arguments: Sequence[str], folders: Sequence[str], *, channel: Path
) -> subprocess.Popen[bytes]:
    """Start Python with these arguments in a container, with pipes as its stdin and stdout. The environment variables
    are those of the image. Python can read `folders`, and reach the socket in the directory `channel`."""
    own = (str(Path(runner.__file__).with_name(name)) for name in runner.FILES)
    command = container.build_command([*folders, *own], channel=channel)
    return subprocess.Popen(
        [*command, PYTHON, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )


@functools.cache
def check_container(container: Container, *, where: str, program: str = "") -> None:
    """Check that containers work, by running one with the image. Success is cached. `where` names the setting that
    requires it, and `program` a program that the image must contain.

    Raises BadInput if the container's engine, the image, its Python or the program is missing, or does not work.
    """
    engine, image = container.engine, container.image
    if shutil.which(engine) is None:
        raise BadInput(f"{where} is {engine!r}, but its command is not on the PATH. Install {engine}")
    inspect = [engine, "image", "inspect", "--format", "{{.Id}}", image]
    if _run(inspect, where=where).returncode:
        raise BadInput(
            f"rollout.environment.image: {engine} has no image {image!r} on this machine. Get it with "
            f"`{engine} pull {image}`"
        )
    oldest = tuple(map(str, runner.MIN_PYTHON))
    words = ["-I", "-c", _FIND, *oldest, *([program] if program else [])]
    done = _run([*container.build_command(), PYTHON, *words], where=where)
    if done.returncode or not done.stdout:
        reason = " ".join(make_visible(done.stderr).split()) or f"exit code {done.returncode}"
        raise BadInput(
            f"{where}: {engine} cannot run {PYTHON} in the image {image!r} ({reason:.400}). Check that the image has "
            f"Python {'.'.join(oldest)} or newer, and check container_options"
        )
    is_new, *found = done.stdout.split()
    if is_new != "True":
        raise BadInput(
            f"{where}: the image {image!r} has a Python older than {'.'.join(oldest)}. Use an image with a newer one"
        )
    if found == ["None"]:
        raise BadInput(f"{where}: there is no program {program!r} on the PATH of the image {image!r}. Correct its name")


def _run(command: Sequence[str], *, where: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{where}: {command[0]} does not work on this machine: {error}") from None


class SocketDirectory:
    """Directory with a Unix socket, through which the first process of a container sends an open file."""

    def __init__(self, home: Path) -> None:
        """Create the directory in `home`."""
        self._parent = Path(tempfile.mkdtemp(prefix="socket-", dir=home))  # only this user can enter it
        self.path = self._parent / "shared"
        """Directory to mount in the container."""
        self.path.mkdir()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path / SOCKET))
        for path, mode in ((self.path, 0o755), (self.path / SOCKET, 0o666)):  # the image's user may be any user
            path.chmod(mode)
        self._listener.listen(1)

    def accept(self) -> socket.socket:
        """Accept the connection of the container's first process, and prevent others. Raises OSError if there is
        none."""
        self._listener.setblocking(False)  # the process has connected before it sent its first message
        try:
            return self._listener.accept()[0]
        finally:
            self.close()

    def close(self) -> None:
        """Delete the directory."""
        self._listener.close()
        shutil.rmtree(self._parent, ignore_errors=True)
