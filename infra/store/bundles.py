"""Bundles: immutable directories, such as policies and optimizer states. A bundle is named by the digest of its table
of contents."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from blake3 import blake3
from pydantic import Field, ValidationError

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput, Damaged, StoreFailed
from rheostat.infra.store.checksums import canonical_json, digest_file
from rheostat.infra.store.contracts import Store, check_key
from rheostat.infra.store.shards import RETIRED, is_retired

CONTENTS = "bundle.json"
"""Name of the file in each bundle (stored folder) that lists all other files. A directory that is to be published must
not contain a file with this name."""

Stamp = tuple[tuple[str, int, int, int], ...]
"""State of a directory, to detect changes: the path, inode, time of the last write (ns) and size of every file."""

_known: dict[tuple[str, str], Stamp] = {}
"""State of each bundle (stored folder) when this process last published or verified it, by (store, key). A bundle whose
state has not changed is not verified again."""


class BundleRef(Settings):
    """Reference to a stored folder (bundle), such as the weights of a policy: its key in the store, digest and size."""

    key: str
    """Key of the bundle (stored folder) in the store, `<prefix>/<first 16 digits of the digest>`."""
    digest: str
    """BLAKE3 digest of bundle.json, which in turn contains the digest of every file."""
    bytes: Annotated[int, Field(ge=0)]
    """Total size of all files in bytes."""


class BundledFile(Settings):
    """Digest and size of one file in a stored folder (bundle)."""

    digest: str
    """BLAKE3 digest of the file's bytes, in hexadecimal."""
    bytes: Annotated[int, Field(ge=0)]
    """Size of the file in bytes."""


class Contents(Settings):
    """List of the files in a stored folder (bundle). It is stored in the folder as bundle.json."""

    files: dict[str, BundledFile]
    """Digest and size of each file, by its path relative to the stored folder, with '/' between folders."""

    def encode(self) -> bytes:
        return canonical_json(self.model_dump())

    def ref(self, prefix: str) -> BundleRef:
        """Return the reference to the stored folder with this list of files. `prefix` is the first part of its key."""
        digest, size = blake3(self.encode()).hexdigest(), sum(file.bytes for file in self.files.values())
        return BundleRef(key=f"{prefix}/{digest[:16]}", digest=digest, bytes=size)


def describe_bundle(directory: Path, *, written_files: Mapping[str, BundledFile] = MappingProxyType({})) -> Contents:
    """Return the list of files of the bundle (stored folder) that would be made from a directory.

    Digests in `written_files` are used without reading the file. They come from `write_hashed`, or from a verified
    bundle to whose files the directory has hard links. All other files are read.
    """
    return Contents(
        files={name: written_files.get(name) or _describe(path) for name, path in _files(directory).items()}
    )


def publish_bundle(
    store: Store,
    directory: Path,
    *,
    prefix: str,
    written_files: Mapping[str, BundledFile] = MappingProxyType({}),
    durable: bool = True,
    on_progress: Callable[[], None] = lambda: None,
) -> BundleRef:
    """Store a directory as a bundle and return its reference. Equal files always give equal references. `prefix` is the
    first part of the key. `on_progress` is called after each part of a large upload.

    Files in the store's scratch directory are moved, and other files are copied. bundle.json is written last, because a
    bundle without bundle.json does not exist. A damaged file under the same key is replaced. If `durable` is False, the
    bundle can be used immediately, but `sync_bundle` must be called before a manifest names the bundle.
    """
    contents = describe_bundle(directory, written_files=written_files)
    ref = contents.ref(prefix)
    for name in contents.files:
        put_bundle_file(store, ref, contents, name, directory / name, durable=durable, on_progress=on_progress)
    complete_put_bundle(store, ref, contents, durable=durable)
    return ref


def put_bundle_file(
    store: Store,
    ref: BundleRef,
    contents: Contents,
    name: str,
    data: bytes | Path,
    *,
    durable: bool = True,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Store one file of a bundle (stored folder). Several processes can store different files at the same time.
    `on_progress` is called after each part of a large upload."""
    digest = contents.files[name].digest
    _put(store, f"{ref.key}/{name}", data, digest=digest, durable=durable, on_progress=on_progress)


def complete_bundle(store: Store, ref: BundleRef, contents: Contents, *, durable: bool = True) -> bool:
    """Complete a bundle by writing its list of files, bundle.json. Return False and write nothing if one of the files
    is missing from the store."""
    if not all(store.exist([f"{ref.key}/{name}" for name in contents.files])):
        return False
    _put(store, f"{ref.key}/{CONTENTS}", contents.encode(), digest=ref.digest, durable=durable)
    return True


def complete_put_bundle(store: Store, ref: BundleRef, contents: Contents, *, durable: bool = True) -> None:
    """Complete a bundle whose files this process and others have just put. This process then does not verify the files
    again. Raises StoreFailed if a file is missing."""
    if not complete_bundle(store, ref, contents, durable=durable):
        raise StoreFailed(
            f"bundle {ref.key!r} in {store.uri} cannot be completed, because a file that another process has written "
            "is missing. All machines must use the same directory or bucket."
        )
    stamp = _stamp(store, ref)
    if {name for name, *_ in stamp} == {*contents.files, CONTENTS}:  # a cache may lack files of other machines
        _known[store.uri, ref.key] = stamp


def sync_bundle(store: Store, ref: BundleRef) -> None:
    """Make a bundle (stored folder) durable (fsync). It is verified first, unless this process has already done so."""
    fetch_bundle(store, ref)
    sync_bundle_files(store, ref)


def sync_bundle_files(store: Store, ref: BundleRef) -> None:
    """Make the files of a bundle (stored folder) durable (fsync), without verifying them."""
    for entry in store.entries(f"{ref.key}/"):
        store.sync(entry.key)


def describe_stored_files(store: Store, ref: BundleRef) -> Mapping[str, BundledFile]:
    """Return the digest and size of each file of a bundle (stored folder), by its relative path, as bundle.json lists
    them. The files are not read."""
    return _contents(store, ref).files


def has_bundle(store: Store, ref: BundleRef) -> bool:
    """Return whether a bundle (stored folder) is completely stored and was not deleted."""
    return store.exists(f"{ref.key}/{CONTENTS}")


def fetch_bundle(store: Store, ref: BundleRef) -> Path:
    """Return a local directory with exactly the files of a bundle (stored folder). They are downloaded if necessary,
    and verified when this process first uses the bundle.

    Raises Damaged if the bundle is missing or one of its files has changed.
    """
    if not _is_known(store, ref):
        _download(store, ref)
        before = _stamp(store, ref)
        verify_bundle(store, ref)
        _known[store.uri, ref.key] = before
    return _directory(store, ref)


def fetch_bundle_files(store: Store, ref: BundleRef, names: Sequence[str]) -> Path:
    """Return a local directory that contains the files `names` of a bundle (stored folder), downloaded if necessary and
    verified. It may contain other files too.

    From a remote store, only these files are downloaded. In a local store, the whole bundle is verified. Raises
    BadInput if the bundle has no file with one of the names.
    """
    if not store.traits.downloads or _is_known(store, ref):
        return fetch_bundle(store, ref)
    files = _verified_names(store, ref)
    if absent := sorted(set(names) - files.keys()):
        raise BadInput(f"bundle {ref.key!r} in {store.uri} has no files {absent}. Its files are {sorted(files)}")
    store.fetch([f"{ref.key}/{name}" for name in (CONTENTS, *names)])
    for name in names:
        _verify_file(store, ref, name, files[name])
    return _directory(store, ref)


def prefetch_bundle(store: Store, ref: BundleRef) -> None:
    """Download a bundle (stored folder) into the local cache in advance, if it has room. Nothing is verified."""
    if not _is_known(store, ref):
        _download(store, ref, room=ref.bytes)


def _download(store: Store, ref: BundleRef, *, room: int | None = None) -> None:
    """Download the files of a bundle (stored folder) in parallel, if the store is remote and contains the bundle."""
    if store.traits.downloads and has_bundle(store, ref):
        files = _contents(store, ref).files
        store.fetch([f"{ref.key}/{name}" for name in (CONTENTS, *files)], room=room)


def _directory(store: Store, ref: BundleRef) -> Path:
    key = f"{ref.key}/{CONTENTS}"
    return (store.cached_copy(key) or store.local_path(key)).parent


@contextmanager
def verify_while_reading(store: Store, ref: BundleRef, *, large_suffix: str) -> Iterator[Path]:
    """Run the block with the local directory of a bundle (stored folder). In the meantime, a thread verifies the large
    files, whose names end in `large_suffix`.

    The block can load these files at the same time, so that each file is read from the disk only once. The loaded data
    is valid only if the block ends without the error Damaged.
    """
    if _is_known(store, ref):
        yield fetch_bundle(store, ref)
        return
    _download(store, ref)
    before = _stamp(store, ref)
    files = _verified_names(store, ref)
    large_files = {name: digest for name, digest in files.items() if name.endswith(large_suffix)}
    for name in files.keys() - large_files.keys():
        _verify_file(store, ref, name, files[name])
    with ThreadPoolExecutor(1, thread_name_prefix="proof") as thread:
        proofs = [thread.submit(_verify_file, store, ref, name, digest) for name, digest in large_files.items()]
        try:
            yield _directory(store, ref)
        finally:  # a damaged file explains an error of the loading code
            for proof in proofs:
                proof.result()
    _known[store.uri, ref.key] = before


def fetch_bundle_file(store: Store, ref: BundleRef, name: str) -> Path:
    """Return the local path of one file of a bundle (stored folder). Only this file is verified, because others may be
    large.

    Raises BadInput if the bundle has no such file, and Damaged if the bundle is missing or the file has changed.
    """
    where = f"bundle {ref.key!r} in {store.uri}"
    if not has_bundle(store, ref):
        raise Damaged(f"{where}: {_describe_absence(store, ref)}")
    contents = _contents(store, ref)
    if name not in contents.files:
        raise BadInput(f"{where} does not contain the file {name!r}. Its files are {', '.join(sorted(contents.files))}")
    _verify_file(store, ref, name, contents.files[name].digest)
    return store.local_path(f"{ref.key}/{name}")


def verify_bundle(store: Store, ref: BundleRef) -> None:
    """Raise Damaged unless a bundle (stored folder) has exactly the files in bundle.json, with the right digests."""
    for name, digest in _verified_names(store, ref).items():
        _verify_file(store, ref, name, digest)


def _verified_names(store: Store, ref: BundleRef) -> dict[str, str]:
    """Return the digest of each file that the bundle.json of a stored folder lists, by name. Raises Damaged if the
    names or sizes of the stored files differ."""
    where = f"bundle {ref.key!r} in {store.uri}"
    if not has_bundle(store, ref):
        raise Damaged(f"{where}: {_describe_absence(store, ref)}")
    contents = _contents(store, ref)
    found = {entry.key.removeprefix(f"{ref.key}/"): entry.bytes for entry in store.entries(f"{ref.key}/")}
    found.pop(CONTENTS, None)  # gone if the bundle is being deleted
    expected = {name: file.bytes for name, file in contents.files.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):  # an extra file could be loaded instead of a verified one
            raise Damaged(
                f"{where}: file {name!r}: expected {_describe_size(expected.get(name))}, found "
                f"{_describe_size(found.get(name))}. Restore the file from a copy of the store."
            )
    return {name: file.digest for name, file in contents.files.items()}


def _verify_file(store: Store, ref: BundleRef, name: str, digest: str) -> None:
    found = _stored_digest(store, f"{ref.key}/{name}")
    if found != digest:
        raise Damaged(
            f"bundle {ref.key!r} in {store.uri}: file {name!r}: expected digest {digest}, found {found}. Restore the "
            "file from a copy of the store."
        )


def delete_bundle(store: Store, ref: BundleRef) -> None:
    """Delete a bundle (stored folder). bundle.json is deleted first, so that a partly deleted bundle no longer counts
    as a bundle. An interrupted deletion can be repeated."""
    _known.pop((store.uri, ref.key), None)
    store.delete(f"{ref.key}/{CONTENTS}")
    for entry in store.entries(f"{ref.key}/"):
        store.delete(entry.key)


def _describe_absence(store: Store, ref: BundleRef) -> str:
    if is_retired(store, ref.digest):
        return RETIRED
    return f"{CONTENTS} is missing. The bundle was never completely published, or was deleted. Restore it from a copy."


def _contents(store: Store, ref: BundleRef) -> Contents:
    data = store.read(f"{ref.key}/{CONTENTS}")
    found = blake3(data).hexdigest()
    if found != ref.digest:
        raise Damaged(f"bundle {ref.key!r} in {store.uri}: {CONTENTS} must have digest {ref.digest}, but has {found}")
    try:
        return Contents.model_validate_json(data)
    except ValidationError as error:
        raise Damaged(f"bundle {ref.key!r} in {store.uri}: {CONTENTS} is not a valid list: {error}") from error


def _put(
    store: Store,
    key: str,
    data: bytes | Path,
    *,
    digest: str,
    durable: bool,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    put = partial(store.put, key, data, durable=durable, cache=True, on_progress=on_progress)
    if put():
        return
    if _stored_digest(store, key) != digest:
        store.delete(key)
        if not put() and _stored_digest(store, key) != digest:
            raise Damaged(f"{key!r} in {store.uri} is damaged and could not be replaced. Restore it from a copy.")
    elif durable:
        store.sync(key)  # an earlier put may not have been durable


def _files(directory: Path) -> dict[str, Path]:
    """Return the paths of all files in a directory, by relative path.

    Raises BadInput if the directory is empty, or contains links, special files or a file named bundle.json.
    """
    if not directory.is_dir():
        raise BadInput(f"{str(directory)!r} cannot be stored as a bundle, because it is not a directory")
    files = {
        path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if not _plain_dir(path)
    }
    for name, path in files.items():
        check_key(name)
        if path.is_symlink() or not path.is_file():
            raise BadInput(
                f"{str(directory)!r} cannot be stored as a bundle: {name!r} is a link or a special file, but only "
                "plain files are allowed"
            )
    if not files or CONTENTS in files:
        raise BadInput(
            f"{str(directory)!r} cannot be stored as a bundle, because it must contain at least one file, and no file "
            f"with the reserved name {CONTENTS}"
        )
    return files


def _stamp(store: Store, ref: BundleRef) -> Stamp:
    """Return the state of the local files of a bundle (stored folder). It changes if a file is written, replaced, added
    or removed. Empty if the bundle is missing."""
    if not has_bundle(store, ref):
        return ()
    directory = _directory(store, ref)
    with suppress(FileNotFoundError):  # deleted meanwhile
        found = ((path, path.lstat()) for path in sorted(directory.rglob("*")) if not _plain_dir(path))
        return tuple(
            (path.relative_to(directory).as_posix(), status.st_ino, status.st_mtime_ns, status.st_size)
            for path, status in found
        )
    return ()


def _is_known(store: Store, ref: BundleRef) -> bool:
    """Return whether this process has published or verified a bundle (stored folder) that has not changed since."""
    known = _known.get((store.uri, ref.key))
    return known is not None and known == _stamp(store, ref)


def _plain_dir(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _describe(path: Path) -> BundledFile:
    return BundledFile(digest=digest_file(path), bytes=path.stat().st_size)


def _stored_digest(store: Store, key: str) -> str:
    """Return the digest of the content of a stored object. Raises Damaged if the object is missing."""
    while True:
        with suppress(FileNotFoundError):  # deleted after it was located: the next attempt raises Damaged
            return digest_file(store.local_path(key))


def _describe_size(count: int | None) -> str:
    return "no file" if count is None else f"{count} bytes"
