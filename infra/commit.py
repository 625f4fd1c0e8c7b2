"""Git commit from which Rheostat was built, or of the checkout in which it runs.

A wheel contains the commit in commit.txt, which setup.py writes with `describe_checkout`. A checkout has no such
file, so the commit is read with git. This module imports only the standard library, because it is also used while a
wheel is built.
"""

import subprocess
from pathlib import Path

_WRITTEN = Path(__file__).with_name("commit.txt")


def find_commit() -> str:
    """Return the git commit of the installed Rheostat: 12 hexadecimal digits, followed by `-dirty` if there are
    uncommitted changes. Return "" if the commit is unknown."""
    return _WRITTEN.read_text().strip() if _WRITTEN.exists() else describe_checkout(Path(__file__).resolve().parents[1])


def describe_checkout(home: Path) -> str:
    """Return the commit of the git checkout in `home`, in the same form as `find_commit`. Return "" if the directory is
    not a checkout or git fails."""
    if not (home / ".git").exists():
        return ""
    command = ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
