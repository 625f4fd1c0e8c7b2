"""Access to the champion for programs that serve it: watch the registry, and copy the champion into a directory."""

import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

from blake3 import blake3

from rheostat.infra.errors import BadInput, StoreFailed
from rheostat.infra.store.bundles import CONTENTS, Contents, fetch_bundle
from rheostat.infra.store.disk import lock_file, sync, walk_files
from rheostat.infra.store.registry import Registry, RegistryRecord

logger = logging.getLogger(__name__)

WAIT_SECONDS: Final = 0.05
"""Pause in seconds between two attempts to lock a link that another process has locked."""

Alias = Literal["champion", "canary"]
"""Policy to serve. "champion" is the current champion. "canary" is the newest proposal that waits for a signature, or
the champion if there is no such proposal."""
UsePolicy = Callable[[RegistryRecord, Path], None]
"""Callback for a policy to serve. It receives the registry record of the policy, and a local directory with its
verified files."""


def watch_policy(registry: Registry, use: UsePolicy, *, every: float, alias: Alias = "champion") -> None:
    """Call `use` with the policy to serve, immediately and then every `every` seconds, until interrupted.

    Raises BadInput if there is no champion or its files are gone. If the store cannot be read later, one warning is
    logged and the last policy stays in use.
    """
    served, is_lost = policy_files(registry, alias), False
    while True:
        use(*served)
        time.sleep(every)
        try:
            served, is_lost = policy_files(registry, alias), False
        except (OSError, StoreFailed) as error:
            if not is_lost:
                logger.warning("registry %s cannot be read, so the policy is not changed: %s", registry.name, error)
            is_lost = True


def update_link(record: RegistryRecord, directory: Path, link: Path) -> bool:
    """Point a symbolic link at a copy of the champion's files next to the link; return whether the link was moved.

    The link is replaced atomically after the copy is durable (fsync), so a program that opens files through the link
    gets files of one policy only. The previous copy is kept for programs that have it open, and older copies are
    deleted. Processes lock `.LINK.checkout/lock`, so only one at a time changes the link. Other files next to the link
    are not changed.

    Raises BadInput if something else has the name of the link, of the copy or of `.LINK.checkout`.
    """
    if link.exists() and not link.is_symlink():
        raise BadInput(
            f"{link} must be a symbolic link or not exist, but it is a {'folder' if link.is_dir() else 'file'}. Set "
            "--to to another path."
        )
    assert record.bundle is not None, "who is used has files"
    link.parent.mkdir(parents=True, exist_ok=True)
    copy = link.with_name(f".{link.name}-{record.bundle.digest[:16]}")
    with _working_directory(link) as work_folder:
        target_before = link.readlink() if link.is_symlink() else None
        if copy.exists() and not _is_bundle_copy(copy, record.bundle.digest):
            raise BadInput(
                f"{copy} should be an exact copy of the champion's files {record.bundle.key!r}, but it differs. Move "
                "it away, then run the command again."
            )
        if target_before == Path(copy.name) and copy.exists():
            return False
        if not copy.exists():
            _copy_durably(directory, work_folder / "copy")
            (work_folder / "copy").rename(copy)
        (work_folder / "link").unlink(missing_ok=True)
        (work_folder / "link").symlink_to(copy.name)
        (work_folder / "link").replace(link)
        sync(link.parent)
        for old in _find_copies(link):
            if Path(old.name) not in (Path(copy.name), target_before):
                shutil.rmtree(old)
    return True


@contextmanager
def _working_directory(link: Path) -> Iterator[Path]:
    """Keep `.LINK.checkout` locked for this process during the block. Waits while another process or thread has locked
    it.

    Raises BadInput if something that is not from a checkout has this name.
    """
    own, is_logged = link.with_name(f".{link.name}.checkout"), False
    with suppress(FileExistsError):
        own.mkdir()
    lock = own / "lock"  # created before anything else there, and never removed
    if own.is_symlink() or not own.is_dir() or (any(own.iterdir()) and not lock.is_file()):
        raise BadInput(
            f"{own} is needed by `rheostat checkout` for its copies, but another program created it. Move it away."
        )
    while True:
        with lock_file(lock) as is_held:
            if is_held:
                yield own
                return
        if not is_logged:
            logger.info("%s: waiting for another checkout", link)
            is_logged = True
        time.sleep(WAIT_SECONDS)


def _copy_durably(source: Path, target: Path) -> None:
    """Copy a directory and make its files and folders durable (fsync). An incomplete copy from an interrupted call is
    replaced."""
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(source, target)
    for folder, name in walk_files(target):
        sync(Path(folder, name))
    for folder in {folder for folder, _ in walk_files(target)}:
        sync(Path(folder))


def _find_copies(link: Path) -> list[Path]:
    """Return the directories next to a link that contain a policy copied by this module. Both name and content must
    match."""
    pattern = re.compile(rf"\.{re.escape(link.name)}-([0-9a-f]{{16}})")
    candidates = [(path, match[1]) for path in link.parent.iterdir() if (match := pattern.fullmatch(path.name))]
    return [path for path, digest in candidates if _is_bundle_copy(path, digest)]


def policy_files(registry: Registry, alias: Alias) -> tuple[RegistryRecord, Path]:
    """Return the registry record of the policy to serve, and a local directory with its verified files. Raises BadInput
    if there is no champion."""
    champion = registry.canary() if alias == "canary" else registry.champion()
    if champion is None:
        raise BadInput(f"registry {registry.name!r} has no champion yet. Promote a policy first (`rheostat promote`).")
    registry.locate(champion)
    assert champion.bundle is not None, "it was located"
    return champion, fetch_bundle(registry.store, champion.bundle)


def _is_bundle_copy(directory: Path, digest: str) -> bool:
    """Return whether a directory is a copy of the bundle whose digest starts with `digest`, judged by the names and
    sizes of its files.

    Only bundle.json is read. Changes in the content of other files are not detected.
    """
    table = directory / CONTENTS
    if directory.is_symlink() or table.is_symlink() or not table.is_file():
        return False
    data = table.read_bytes()
    if not blake3(data).hexdigest().startswith(digest):
        return False
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    sizes = {path.relative_to(directory).as_posix(): path.lstat().st_size for path in paths}
    expected = {name: file.bytes for name, file in Contents.model_validate_json(data).files.items()}
    return sizes == {**expected, CONTENTS: len(data)}
