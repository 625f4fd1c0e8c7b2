"""Files of users: their kind, and the content of text files that users name on the command line."""

import stat
from pathlib import Path
from typing import Final

from rheostat.infra.errors import BadInput

MAX_MEBIBYTES: Final = 256
"""Maximum size in MiB of a text file that is read. A larger file is refused."""

TEXT_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".tsv")
"""Suffixes of text files with rows of data. They may be followed by one of `PACKED_SUFFIXES`."""
PACKED_SUFFIXES: Final = (".gz", ".zst")
"""Suffixes of compressed text files."""
DATA_SUFFIXES: Final = (*TEXT_SUFFIXES, ".parquet", ".arrow", ".feather")
"""Suffixes of all files from which rows of data can be read."""

LFS_POINTER: Final = b"version https://git-lfs"
"""First bytes of a Git LFS pointer file, which takes the place of a large file until Git LFS downloads it."""
FETCH_LFS: Final = "is a Git LFS pointer, not the file itself. Run `git lfs pull` in its directory"

_KINDS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def describe_irregular(path: Path) -> str:
    """Describe a file that is not a regular file, such as "a pipe" or "a directory". Return "" for a regular file or a
    link to one.

    Reading a pipe or a device may block or never end. Raises OSError if the path does not exist or is not accessible.
    """
    mode = path.stat().st_mode
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "")


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is only a pointer to a large file, which `git lfs pull` would download."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def read_text_file(path: Path, *, label: str) -> str:
    """Read a UTF-8 file and return its text. `label` is the name of the file in messages.

    Raises FileNotFoundError if the file does not exist. Raises BadInput if the path is not a regular file, or if the
    file is larger than `MAX_MEBIBYTES`, cannot be read, or is not UTF-8.
    """
    try:
        if kind := describe_irregular(path):
            raise BadInput(f"{label} is {kind}, but it must be a regular file. Set another path")
        if (size := path.stat().st_size) > MAX_MEBIBYTES * 2**20:
            raise BadInput(
                f"{label} has {size / 2**20:,.0f} MiB, but at most {MAX_MEBIBYTES} MiB can be read. Use a smaller file"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadInput(f"{label} cannot be read: {error.strerror}. Check its path and permissions") from None
    except UnicodeDecodeError as error:
        raise BadInput(f"{label} is not UTF-8 text: {error}. Save it as UTF-8") from None
