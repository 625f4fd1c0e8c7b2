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
OUTPUT_BYTES: Final = 2**20
"""What a program may write; then it is ended."""
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
_RUNNERS = [str(path) for path in Path(runner.__file__).parent.glob("*runner.py")]
_QUESTION = """
import json, sys
print(json.dumps([sys.version_info[:2], sys.executable, sys.prefix, sys.base_prefix, *sys.path]))
"""
_SECONDS = 60.0


def confined(command: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return the command that runs a Python's command in the sandbox, with these folders to read beside its own."""
    own = [folder for folder in asked(command[0], where="python")[1:] if Path(folder).exists()]
    seen = sorted({*own, *(folder for folder in folders if Path(folder).exists()), *_RUNNERS})
    here = str(Path.cwd())
    writable = [word for place in ("/tmp", "/dev/shm") for word in ("--size", str(FILE_BYTES), "--tmpfs", place)]
    return [
        _bubblewrap() or "bwrap",
        *_ISOLATION,
        *(word for name, value in ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *(word for place in _SYSTEM for word in ("--ro-bind-try", place, place)),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", *writable),
        *(word for place in seen if place != "/" for word in ("--ro-bind", place, place)),
        *("--remount-ro", "/", "--chdir", here if here in seen else "/tmp", "--"),
        *command,
    ]


def check_sandbox(where: str) -> None:
    """Raise BadInput where bubblewrap cannot be had; `where` is the setting that asks for it."""
    bubblewrap = _bubblewrap()
    if bubblewrap is None:
        raise BadInput(f"{where}: expected bubblewrap's command bwrap on the PATH, found none; install it")
    done = subprocess.run(
        [bubblewrap, *_ISOLATION, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"it ended with code {done.returncode}"
        raise BadInput(f"{where}: bubblewrap does not work here ({why}); it needs user namespaces")


@functools.cache
def asked(python: str | Path, *, where: str) -> tuple[str, ...]:
    """Ask a Python, named by a setting, for its program (which a script may find) and where its files are.

    Raises BadInput if it does not run, or is too old.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-c", _QUESTION], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
        version, *places = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "it does not run as a Python"
        raise BadInput(f"{where}: expected a Python interpreter, found {str(python)!r}: {what}") from error
    if tuple(version) < runner.OLDEST:
        expected, found = (".".join(map(str, numbers)) for numbers in (runner.OLDEST, version))
        raise BadInput(f"{where}: expected Python {expected} or newer, found {found} at {str(python)!r}")
    return tuple(place for place in places if place)


def limits(seconds: float) -> Mapping[str, int]:
    """Limits of a call that may take so long, by the names of infra/runner.py."""
    return {"memory": MEMORY_BYTES, "processes": PROCESSES, "file": FILE_BYTES, "cpu": int(seconds) + 2}


def program_limits(seconds: float, *, memory_bytes: int) -> Mapping[str, int]:
    """Limits of a program of a policy, of which all processes together hold no more memory than one may."""
    return {**limits(seconds), "memory": memory_bytes, "held": memory_bytes, "output": OUTPUT_BYTES}


def _bubblewrap() -> str | None:
    return shutil.which("bwrap")
