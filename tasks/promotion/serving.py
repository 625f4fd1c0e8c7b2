"""The champion where other programs find it: followed from record to record, and laid out as a directory."""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from infra.errors import BadInput, StoreFailed
from infra.store.bundles import fetch_bundle
from infra.store.disk import sync, walk_files
from infra.store.registry import Registry, RegistryRecord

logger = logging.getLogger(__name__)

Alias = Literal["champion", "canary"]
"""Who is asked for: the champion, or the newest proposal that waits, which is the champion where none does."""
Use = Callable[[RegistryRecord, Path], None]
"""Makes something of the champion: its record, and a local directory with its verified files."""


def follow(registry: Registry, use: Use, *, every: float, alias: Alias = "champion") -> None:
    """Have a policy used now, and whenever it was looked for again, `every` so many seconds, until interrupted.

    Raises BadInput where there is no champion or its files are gone. A store that cannot be read later is told once,
    and what was used stays in use.
    """
    found, is_lost = policy_files(registry, alias), False
    while True:
        use(*found)
        time.sleep(every)
        try:
            found, is_lost = policy_files(registry, alias), False
        except (OSError, StoreFailed) as error:
            if not is_lost:
                logger.warning("warning: registry %s cannot be read, the champion stays: %s", registry.name, error)
            is_lost = True


def place(record: RegistryRecord, directory: Path, link: Path) -> bool:
    """Have a symbolic link point to a copy of the champion's files beside it; return whether it was moved.

    The link is replaced in one step once the copy survives a power cut: who opens files through it finds those of one
    policy. The copy before stays for who has it open, older ones go. Raises BadInput where something else lies there.
    """
    if link.exists() and not link.is_symlink():
        raise BadInput(f"{link}: expected a symbolic link or nothing, found a {'folder' if link.is_dir() else 'file'}")
    assert record.bundle is not None, "who is used has files"
    link.parent.mkdir(parents=True, exist_ok=True)
    before = link.readlink().name if link.is_symlink() else ""
    copy = link.with_name(f".{link.name}-{record.bundle.digest[:16]}")
    if before == copy.name:
        return False
    with tempfile.TemporaryDirectory(dir=link.parent, prefix=f".{link.name}-new-") as made:
        if not copy.is_dir():
            whole = Path(made, "copy")
            shutil.copytree(directory, whole)
            for folder, name in walk_files(whole):
                sync(Path(folder, name))
            for folder in {folder for folder, _ in walk_files(whole)}:
                sync(Path(folder))
            whole.rename(copy)
        Path(made, "link").symlink_to(copy.name)
        Path(made, "link").replace(link)
    sync(link.parent)
    for old in link.parent.glob(f".{link.name}-*"):
        if old.name not in (copy.name, before):
            shutil.rmtree(old)
    return True


def policy_files(registry: Registry, alias: Alias) -> tuple[RegistryRecord, Path]:
    """Return a policy's record and a local directory of its verified files. Raises BadInput where there is none."""
    champion = registry.canary() if alias == "canary" else registry.champion()
    if champion is None:
        raise BadInput(f"registry {registry.name!r}: expected a champion, found no promotion")
    registry.locate(champion)
    assert champion.bundle is not None, "it was located"
    return champion, fetch_bundle(registry.store, champion.bundle)
