"""Shards: immutable tables, stored as Arrow IPC files and named by the BLAKE3 digest of their bytes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from blake3 import blake3
from pydantic import Field

from rheostat.infra.config import Settings
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.checksums import FIRST_VERSION, MANIFEST_VERSION, check_version, unseal
from rheostat.infra.store.contracts import Store

if TYPE_CHECKING:  # a command that lists runs reads no shard, and pyarrow imports numpy
    import pyarrow as pa

T = TypeVar("T")

_OWN = "rheostat."  # prefix of the metadata keys that shards define themselves

HASHED_BYTES = 1 << 20

MAX_VERIFIED = 2**16

RETIRED = (
    "the files were deleted by retention to save space; the manifests still exist. Use a newer iteration, or restore "
    "the files from a copy of the run. To keep more files in the next run, raise retention.keep_last or "
    "retention.rollouts_keep_last, or set retention.keep_every."
)
"""Explanation in error messages about files that were deleted by retention."""

_verified: set[tuple[str, str]] = set()
"""Shards that this process has already verified, as pairs (store, key).

A long run has millions of shards. Therefore the set is cleared when it has `MAX_VERIFIED` entries.
"""


@dataclass(frozen=True, slots=True)
class ShardKind:
    """Kind of shard (table file), such as rollouts, with the columns that its tables have."""

    name: str
    """Name of the kind, such as `rollouts`, which is stored in the metadata of each shard."""
    schema: "pa.Schema"
    """Columns that every new shard of this kind has. A shard may have additional columns, such as one per reward."""
    version: int = FIRST_VERSION
    """Schema version of new shards. It must be increased whenever `schema` changes."""
    missing: Mapping[str, str | list[str] | None] = field(default_factory=dict)
    """Values of columns that shards of older versions lack, by column. All rows get the same value."""

    def complete(self, table: "pa.Table") -> "pa.Table":
        """Return the table of a shard with all columns of this kind. Columns that were introduced after the shard was
        written get their values from `missing`. Fields of structs that were introduced later are null."""
        import pyarrow as pa

        for index, column in enumerate(self.schema):
            if column.name not in table.column_names:
                if column.name in self.missing:
                    values = pa.array([self.missing[column.name]] * table.num_rows, column.type)
                    table = table.add_column(min(index, table.num_columns), column, values)
            elif table.schema.field(column.name).type != column.type and pa.types.is_nested(column.type):
                position = table.column_names.index(column.name)
                table = table.set_column(position, column, table[column.name].cast(column.type))
        return table


_KINDS: dict[str, ShardKind] = {}
"""Registered kinds of shards, by name."""


def declare_kinds(*kinds: ShardKind) -> tuple[ShardKind, ...]:
    """Register kinds of shards, so that `read_shard` and `write_shard` know them, and return them."""
    _KINDS.update({kind.name: kind for kind in kinds})
    return kinds


class ShardRef(Settings):
    """Reference to a shard (table file): its key in the store, its size, its number of rows and its digest."""

    key: str
    """Key of the shard, `shards/4b/<digest>.arrow`, where 4b are the first two digits of the digest. In older runs,
    `shards/<digest>.arrow`."""
    bytes: Annotated[int, Field(ge=0)]
    """Size of the file in bytes."""
    rows: Annotated[int, Field(ge=0)]
    """Number of rows in the table."""
    digest: str
    """BLAKE3 digest of the file's bytes, in hexadecimal."""


def write_shard(store: Store, table: "pa.Table", *, kind: str, metadata: Mapping[str, str]) -> ShardRef:
    """Store a table as a shard (a file named by the digest of its content), and return its reference. Equal rows and
    metadata always give equal bytes, even if the table is divided into chunks differently.

    If a damaged shard has the same key, it is moved to `quarantine/` and replaced.
    """
    data = _encode(table, kind=kind, metadata=metadata)
    digest = blake3(data).hexdigest()
    ref = ShardRef(key=f"shards/{digest[:2]}/{digest}.arrow", bytes=len(data), rows=table.num_rows, digest=digest)
    if not store.put(ref.key, data, cache=True) and quarantine(store, ref):
        store.put(ref.key, data, cache=True)
    return ref


def rewrite_shard(store: Store, table: "pa.Table") -> ShardRef:
    """Store a changed version of a shard's table as a new shard, with the kind and metadata of the original. `table`
    contains them in its schema metadata. The original shard is not changed."""
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    others = {key: value for key, value in metadata.items() if not key.startswith(_OWN)}
    return write_shard(store, table, kind=metadata[f"{_OWN}kind"], metadata=others)


def current_shard(store: Store, ref: ShardRef) -> ShardRef:
    """Return the reference of a shard that exists: `ref` itself or, if its shard was deleted and replaced, the
    replacement."""
    return _find_current(store, ref)[0]


def read_shard(store: Store, ref: ShardRef, columns: Sequence[str] | None = None) -> "pa.Table":
    """Return the table of a shard, or of its replacement if the shard was deleted and replaced. If `columns` is given,
    only these columns are returned.

    Columns that were introduced after the shard was written have their default values. Raises Damaged if the file is
    missing or has changed, or if one of `columns` is neither in the shard nor has a default value.
    """
    table = _find_again(lambda: _read_table(store, ref))
    kind = _KINDS.get(_kind_of(table))
    table = table if kind is None else kind.complete(table)
    if columns is None:
        return table
    if absent := [name for name in columns if name not in table.column_names]:
        found = ", ".join(table.column_names)
        raise Damaged(
            f"shard {ref.key!r} in {store.uri} must have the column {absent[0]!r}, but it has {found}. Restore the "
            "file from a copy of the store."
        )
    return table.select(list(columns))


def _read_table(store: Store, ref: ShardRef) -> "pa.Table":
    """Return the table of a shard with the columns in the file. The digest is verified when this process first reads
    the shard."""
    is_known = (store.uri, ref.key) in _verified
    copy = _find_cached(store, ref, is_known=is_known)
    if is_known:
        return _decode(store, *((ref, copy) if copy is not None else _find_current(store, ref)))
    table = verify_shard(store, ref) if copy is None else _check_table(store, ref, copy)
    if len(_verified) >= MAX_VERIFIED:
        _verified.clear()
    _verified.add((store.uri, ref.key))
    return table


def _find_again(read: Callable[[], T]) -> T:
    """Return the result of `read`, which finds and opens the file of a shard. If the file was deleted between these two
    steps, call `read` again.

    The second call finds the replacement of the deleted shard, or raises Damaged.
    """
    while True:
        with suppress(FileNotFoundError):
            return read()


def _find_cached(store: Store, ref: ShardRef, *, is_known: bool) -> Path | None:
    """Return the cached copy of a remote shard if its size and digest are right, otherwise None. No request is sent to
    the store. With `is_known`, the digest is not checked, because it was verified before."""
    path = store.cached_copy(ref.key)
    if path is None or path.stat().st_size != ref.bytes:
        return None
    return path if is_known or _digest(path) == ref.digest else None


def read_metadata(store: Store, ref: ShardRef) -> dict[str, str]:
    """Return the metadata of a shard. Its rows are not read, and its digest is not verified."""
    table = _find_again(lambda: _decode(store, *_find_current(store, ref)))
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


def verify_shard(store: Store, ref: ShardRef) -> "pa.Table":
    """Verify the digest of a shard, or of its replacement if the shard was deleted and replaced, and return its table.
    Raises Damaged if the digest is wrong."""
    return _find_again(lambda: _verify(store, *_find_current(store, ref)))


def _verify(store: Store, ref: ShardRef, path: Path) -> "pa.Table":
    found = _digest(path)
    if found != ref.digest:
        raise Damaged(
            f"shard {ref.key!r} in {store.uri} must have the digest {ref.digest}, but it has {found}. Restore the "
            "file from a copy of the store."
        )
    return _check_table(store, ref, path)


def _check_table(store: Store, ref: ShardRef, path: Path) -> "pa.Table":
    """Read the table of a shard from a file whose digest was verified. Raises Damaged if the number of rows is
    wrong."""
    table, where = _decode(store, ref, path), f"shard {ref.key!r} in {store.uri}"
    own = table.schema.metadata or {}
    kind = _KINDS.get(_kind_of(table))
    newest = FIRST_VERSION if kind is None else kind.version
    check_version(own.get(b"rheostat.schema_version", b"none").decode(), where=where, newest=newest)
    if table.num_rows != ref.rows:
        raise Damaged(
            f"{where}: the shard must have {format_count(ref.rows, 'row')}, but it has {table.num_rows}. Restore the "
            "file from a copy of the store."
        )
    return table


def _kind_of(table: "pa.Table") -> str:
    """Return the name of a shard's kind, such as "rollouts", from the metadata of its table. Return "" if there is
    none."""
    kind: bytes = (table.schema.metadata or {}).get(b"rheostat.kind", b"")
    return kind.decode()


def quarantine(store: Store, ref: ShardRef) -> bool:
    """Move a shard to `quarantine/` if it is damaged, so that it can be written again. Return False if the shard is
    intact."""
    _verified.discard((store.uri, ref.key))
    try:
        verify_shard(store, ref)
    except Damaged:
        if store.exists(ref.key):
            data = store.read(ref.key)
            store.put(f"quarantine/{ref.digest[:16]}-{blake3(data).hexdigest()[:16]}.arrow", data)
            store.delete(ref.key)
        return True
    return False


def open_tables(store: Store, refs: Sequence[ShardRef]) -> list[Path]:
    """Verify shards and return the paths of their files, for programs that read Arrow files, such as DuckDB and Polars.

    Do not use a glob pattern instead of these paths, because it would also match unrelated shards.
    """
    for ref in refs:
        read_shard(store, ref)
    return [_find_current(store, ref)[1] for ref in refs]


def _digest(path: Path) -> str:
    """Return the BLAKE3 digest of a file. The file is read in pieces and not memory-mapped, so that it does not count
    toward this process's memory."""
    hasher = blake3()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(HASHED_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


def tombstone_key(digest: str) -> str:
    """Return the key of the tombstone of an object, which is the record of its deletion."""
    return f"retention/{digest[:16]}"


def is_retired(store: Store, digest: str) -> bool:
    """Return whether the store records that the object with this digest was deleted on purpose, alone or together with
    its whole run. Such an object is not considered lost."""
    return any(store.exists(f"manifests/{key}.json") for key in (tombstone_key(digest), tombstone_key("run")))


def find_replacement(store: Store, ref: ShardRef) -> ShardRef | None:
    """Return the shard that replaces a deleted shard, or None if there is none. Shards are replaced, for example, when
    users' prompts are erased."""
    path = f"manifests/{tombstone_key(ref.digest)}.json"
    content = store.find(path)
    if content is None:
        return None
    shards = unseal(content, where=f"{path!r} in {store.uri}", version=MANIFEST_VERSION).get("shards")
    return ShardRef.model_validate(shards[0]) if isinstance(shards, list) and shards else None


def _find_current(store: Store, ref: ShardRef) -> tuple[ShardRef, Path]:
    """Return (reference, path of the local file) of a shard. If the shard was deleted and replaced, this is the
    replacement. Raises Damaged if neither exists."""
    while True:
        try:
            return ref, _find_sized(store, ref)
        except Damaged:
            if store.exists(ref.key):
                raise
            other = find_replacement(store, ref)
            if other is None and is_retired(store, ref.digest):
                raise Damaged(f"shard {ref.key!r} in {store.uri}: {RETIRED}") from None
            if other is None:
                raise
            ref = other


def _find_sized(store: Store, ref: ShardRef) -> Path:
    path = store.local_path(ref.key)  # one request if the store is remote
    if (size := path.stat().st_size) != ref.bytes:
        raise Damaged(
            f"shard {ref.key!r} in {store.uri} must have {ref.bytes} bytes, but it has {size}. Restore the file from "
            "a copy of the store."
        )
    return path


def _decode(store: Store, ref: ShardRef, path: Path) -> "pa.Table":
    import pyarrow as pa

    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as error:
        raise Damaged(
            f"shard {ref.key!r} in {store.uri}: the digest is correct, but the file is not an Arrow file. A newer "
            "version of Rheostat may have written it"
        ) from error


def _encode(table: "pa.Table", *, kind: str, metadata: Mapping[str, str]) -> bytes:
    import pyarrow as pa

    if any(key.startswith(_OWN) for key in metadata):
        raise BadInput(
            f"the metadata of a shard contains {sorted(metadata)}, but names that start with {_OWN!r} are reserved. "
            "Use other names"
        )
    version = _KINDS[kind].version if kind in _KINDS else FIRST_VERSION
    own = {"schema_version": str(version), "kind": kind, "rows": str(table.num_rows)}
    merged = {**metadata, **{_OWN + key: value for key, value in own.items()}}
    # Taking every row builds new, compact columns without chunks and slices, and with zeros under nulls.
    rows = pa.array(range(table.num_rows), pa.int64())
    compact = table.take(rows).combine_chunks().replace_schema_metadata(dict(sorted(merged.items())))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5, compression=None)
    with pa.ipc.new_file(sink, compact.schema, options=options) as writer:
        writer.write_table(compact)
    return bytes(sink.getvalue())
