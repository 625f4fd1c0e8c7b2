"""A sandbox for functions that nobody vouches for: bubblewrap, and limits that infra/runner.py sets inside it.

They see the system's programs, their Python and their own folders, all read-only, an empty /tmp, and neither a network,
nor other processes, nor the environment. Each call runs in a fork, of which no process and no file is left.
"""

import functools
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from infra import runner
from infra.errors import BadInput

MEMORY_BYTES: Final = 8 * 2**30
"""Address space of each process."""
PROCESSES: Final = 64
"""How many processes a call may have at a time; counted every few hundredths of a second."""
FILE_BYTES: Final = 64 * 2**20
"""Size of a file, and of all that lies in /tmp or in shared memory."""
ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")},
}

_ISOLATION = ("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv")
_CONFIGURATION = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "passwd",
    "group",
    "ssl/certs",
)
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", *(f"/etc/{name}" for name in _CONFIGURATION))
_QUESTION = """
import json, sys
print(json.dumps([sys.version_info[:2], sys.executable, sys.prefix, sys.base_prefix, *sys.path]))
"""
_SECONDS = 60.0


def confined(command: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return the command that runs a Python's command in the sandbox, with these folders to read beside its own."""
    own = [folder for folder in asked(command[0])[1:] if Path(folder).exists()]
    seen = sorted({*own, *(folder for folder in folders if Path(folder).exists()), runner.__file__, str(Path.cwd())})
    writable = [word for place in ("/tmp", "/dev/shm") for word in ("--size", str(FILE_BYTES), "--tmpfs", place)]
    return [
        _bubblewrap(),
        *_ISOLATION,
        *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *(word for place in _SYSTEM for word in ("--ro-bind-try", place, place)),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", *writable),
        *(word for place in seen if place != "/" for word in ("--ro-bind", place, place)),
        *("--remount-ro", "/", "--chdir", str(Path.cwd()), "--"),
        *command,
    ]


def check_sandbox() -> None:
    """Raise BadInput where bubblewrap cannot be had."""
    done = subprocess.run(
        [_bubblewrap(), *_ISOLATION, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"it ended with code {done.returncode}"
        raise BadInput(f"scoring.sandbox: bubblewrap does not work here ({why}); it needs user namespaces")


@functools.cache
def asked(python: str) -> tuple[str, ...]:
    """Ask a Python for its program and where its files are. Raises BadInput if it does not run, or is too old."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        version, *places = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "it does not run as a Python"
        raise BadInput(f"scoring.python: expected a Python interpreter, found {python!r}: {what}") from error
    if tuple(version) < runner.OLDEST:
        expected, found = (".".join(map(str, numbers)) for numbers in (runner.OLDEST, version))
        raise BadInput(f"scoring.python: expected Python {expected} or newer, found {found} at {python!r}")
    return tuple(place for place in places if place)


def limits(seconds: float) -> Mapping[str, int]:
    """Limits of a call that may take so long, by the names of infra/runner.py."""
    return {"memory": MEMORY_BYTES, "processes": PROCESSES, "file": FILE_BYTES, "cpu": int(seconds) + 2}


def _bubblewrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise BadInput("scoring.sandbox: expected bubblewrap's command bwrap on the PATH, found none; install it")
    return found
