"""Commit from which Rheostat was built, or in which it runs.

A wheel contains the commit in commit.txt, which hatch_build.py writes with `describe_checkout`. A checkout has no such
file, so git is called instead. This module needs the standard library only, because it also runs where wheels are
built.
"""

import subprocess
from pathlib import Path

_WRITTEN = Path(__file__).with_name("commit.txt")


def find_commit() -> str:
    """Return the first 12 digits of the commit, with `-dirty` if files differ from it, or "" if the commit is not
    known."""
    return _WRITTEN.read_text().strip() if _WRITTEN.exists() else describe_checkout(Path(__file__).parents[1])


def describe_checkout(home: Path) -> str:
    """Return the commit of a checkout as `find_commit` does, or "" if the directory is no checkout or git fails."""
    if not (home / ".git").exists():
        return ""
    command = ["git", "-C", str(home), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
