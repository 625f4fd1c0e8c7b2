"""Shards: immutable tables in Arrow IPC files, named by the BLAKE3 of their bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from blake3 import blake3
from pydantic import Field

from infra.config import Settings
from infra.errors import BadInput, Damaged
from infra.store.checksums import FIRST_VERSION, MANIFEST_VERSION, check_version, unseal
from infra.store.storage import Store

if TYPE_CHECKING:  # a command that lists runs reads no shard, and pyarrow imports numpy
    import pyarrow as pa

_OWN = "rheostat."  # prefix of the metadata that shards write themselves

HASHED_BYTES = 1 << 20

MOST_VERIFIED = 2**16

RETIRED = "retired: retention deleted its files to save space, its manifests remain"

_verified: set[tuple[str, str]] = set()
"""(store, key) of shards whose digest this process has checked; they cannot change, so once is enough.

Of so many all are forgotten, since a long run has millions.
"""


@dataclass(frozen=True, slots=True)
class ShardKind:
    """Layout of the shards of one kind."""

    name: str
    """Kind that each shard names in its metadata, such as `rollouts`."""
    schema: "pa.Schema"
    """Columns that every new shard has. Shards may have more: one for each reward, for example."""
    version: int = FIRST_VERSION
    """Schema version of new shards. A change of `schema` needs the next version."""
    missing: Mapping[str, str | list[str] | None] = field(default_factory=dict)
    """Value of all rows for each column that an older shard may lack."""

    def complete(self, table: "pa.Table") -> "pa.Table":
        """Return the table of a shard with the columns that were added after the shard was written."""
        import pyarrow as pa

        for index, column in enumerate(self.schema):
            if column.name in self.missing and column.name not in table.column_names:
                values = pa.array([self.missing[column.name]] * table.num_rows, column.type)
                table = table.add_column(min(index, table.num_columns), column, values)
        return table


_KINDS: dict[str, ShardKind] = {}
"""Declared kinds of shards, by name."""


def declare_kinds(*kinds: ShardKind) -> tuple[ShardKind, ...]:
    """Make the layouts of kinds of shards known to `read_shard` and `write_shard` in this process."""
    _KINDS.update({kind.name: kind for kind in kinds})
    return kinds


class ShardRef(Settings):
    """Where a shard is and what it must be."""

    key: str
    """`shards/4b/<digest>.arrow`, by the first digits of the digest; `shards/<digest>.arrow` in older runs."""
    bytes: Annotated[int, Field(ge=0)]
    """Size of the file."""
    rows: Annotated[int, Field(ge=0)]
    """Rows of the table."""
    digest: str
    """BLAKE3 of the file's bytes, in hexadecimal."""


def write_shard(store: Store, table: "pa.Table", *, kind: str, metadata: Mapping[str, str]) -> ShardRef:
    """Publish a table; the same rows and metadata give the same bytes, whatever their chunks and slices were.

    A damaged shard that already has the name is moved aside and replaced.
    """
    data = _encode(table, kind=kind, metadata=metadata)
    digest = blake3(data).hexdigest()
    ref = ShardRef(key=f"shards/{digest[:2]}/{digest}.arrow", bytes=len(data), rows=table.num_rows, digest=digest)
    if not store.put(ref.key, data, kept=True) and quarantine(store, ref):
        store.put(ref.key, data, kept=True)
    return ref


def write_again(store: Store, table: "pa.Table") -> ShardRef:
    """Publish what was made of a shard's table, as a shard that says the same of itself."""
    said = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    others = {key: value for key, value in said.items() if not key.startswith(_OWN)}
    return write_shard(store, table, kind=said[f"{_OWN}kind"], metadata=others)


def standing_for(store: Store, ref: ShardRef) -> ShardRef:
    """Return the shard itself, or the one that stands in its place."""
    return _standing(store, ref)[0]


def read_shard(store: Store, ref: ShardRef, columns: Sequence[str] | None = None) -> "pa.Table":
    """Open a shard, mapped into memory where the store is local; its digest is verified at the first read.

    Columns that are younger than the shard have the values that the shard's kind declares for them. Raises Damaged if
    one of `columns` is neither in the shard nor declared.
    """
    is_known = (store.uri, ref.key) in _verified
    copy = _copy(store, ref, is_known=is_known)
    if is_known:
        table = _decode(store, *((ref, copy) if copy is not None else _standing(store, ref)))
    else:
        table = verify_shard(store, ref) if copy is None else _checked(store, ref, copy)
        if len(_verified) >= MOST_VERIFIED:
            _verified.clear()
        _verified.add((store.uri, ref.key))
    kind = _KINDS.get(_kind_of(table))
    table = table if kind is None else kind.complete(table)
    if columns is None:
        return table
    if absent := [name for name in columns if name not in table.column_names]:
        found = ", ".join(table.column_names)
        raise Damaged(f"shard {ref.key!r} in {store.uri}: expected the column {absent[0]!r}, found {found}")
    return table.select(list(columns))


def _copy(store: Store, ref: ShardRef, *, is_known: bool) -> Path | None:
    """Return this machine's copy of a shard elsewhere if it is the shard, as its digest tells: nobody need be asked."""
    path = store.held(ref.key)
    if path is None or path.stat().st_size != ref.bytes:
        return None
    return path if is_known or _digest(path) == ref.digest else None


def read_metadata(store: Store, ref: ShardRef) -> dict[str, str]:
    """Return what a shard says of itself; for that its digest is not verified, nor its rows read."""
    return {
        key.decode(): value.decode()
        for key, value in (_decode(store, *_standing(store, ref)).schema.metadata or {}).items()
    }


def verify_shard(store: Store, ref: ShardRef) -> "pa.Table":
    """Return the table of a shard, or of the one in its place. Raises Damaged unless the bytes are what is named."""
    ref, path = _standing(store, ref)
    found = _digest(path)
    if found != ref.digest:
        raise Damaged(f"shard {ref.key!r} in {store.uri}: expected digest {ref.digest}, found {found}")
    return _checked(store, ref, path)


def _checked(store: Store, ref: ShardRef, path: Path) -> "pa.Table":
    """Return the table of a file whose digest is right."""
    table, where = _decode(store, ref, path), f"shard {ref.key!r} in {store.uri}"
    own = table.schema.metadata or {}
    kind = _KINDS.get(_kind_of(table))
    newest = FIRST_VERSION if kind is None else kind.version
    check_version(own.get(b"rheostat.schema_version", b"none").decode(), where=where, newest=newest)
    if table.num_rows != ref.rows:
        raise Damaged(f"{where}: expected {ref.rows} rows, found {table.num_rows}")
    return table


def _kind_of(table: "pa.Table") -> str:
    """Return the kind that a shard names, or an empty string if it names none."""
    kind: bytes = (table.schema.metadata or {}).get(b"rheostat.kind", b"")
    return kind.decode()


def quarantine(store: Store, ref: ShardRef) -> bool:
    """Move a damaged shard aside so that it can be made again under its name; False if there is no damage."""
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
    """Verify shards and return exactly their files, to be handed to DuckDB, Polars or datasets (never a glob)."""
    for ref in refs:
        read_shard(store, ref)
    return [_standing(store, ref)[1] for ref in refs]


def _digest(path: Path) -> str:
    """Hash a file piece by piece: a mapped one would count as this process's memory, and a controller's stays flat."""
    hasher = blake3()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(HASHED_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


def tombstone_key(digest: str) -> str:
    """Return the key of the manifest that says that what had this digest was deleted on purpose."""
    return f"retention/{digest[:16]}"


def is_retired(store: Store, digest: str) -> bool:
    """Whether a tombstone says that what had this digest is gone, alone or with its whole run."""
    return any(store.exists(f"manifests/{key}.json") for key in (tombstone_key(digest), tombstone_key("run")))


def instead_of(store: Store, ref: ShardRef) -> ShardRef | None:
    """Return the shard that stands in the place of one that was deleted, if a tombstone says so."""
    path = f"manifests/{tombstone_key(ref.digest)}.json"
    content = store.find(path)
    if content is None:
        return None
    shards = unseal(content, where=f"{path!r} in {store.uri}", version=MANIFEST_VERSION).get("shards")
    return ShardRef.model_validate(shards[0]) if isinstance(shards, list) and shards else None


def _standing(store: Store, ref: ShardRef) -> tuple[ShardRef, Path]:
    """Find the shard, or where it was deleted the one that stands in its place."""
    while True:
        try:
            return ref, _sized(store, ref)
        except Damaged:
            if store.exists(ref.key):
                raise
            other = instead_of(store, ref)
            if other is None and is_retired(store, ref.digest):
                raise Damaged(f"shard {ref.key!r} in {store.uri}: {RETIRED}") from None
            if other is None:
                raise
            ref = other


def _sized(store: Store, ref: ShardRef) -> Path:
    path = store.local(ref.key)  # which a store elsewhere is asked for, once
    if (size := path.stat().st_size) != ref.bytes:
        raise Damaged(f"shard {ref.key!r} in {store.uri}: expected {ref.bytes} bytes, found {size}")
    return path


def _decode(store: Store, ref: ShardRef, path: Path) -> "pa.Table":
    import pyarrow as pa

    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as error:
        raise Damaged(f"shard {ref.key!r} in {store.uri}: its digest is right but it is no Arrow file") from error


def _encode(table: "pa.Table", *, kind: str, metadata: Mapping[str, str]) -> bytes:
    import pyarrow as pa

    if any(key.startswith(_OWN) for key in metadata):
        raise BadInput(f"shard metadata {sorted(metadata)}: names that start with {_OWN!r} are the shard's own")
    version = _KINDS[kind].version if kind in _KINDS else FIRST_VERSION
    own = {"schema_version": str(version), "kind": kind, "rows": str(table.num_rows)}
    merged = {**metadata, **{_OWN + key: value for key, value in own.items()}}
    # Taking every row builds fresh, compact columns: no chunks, no slices, zeros under nulls.
    rows = pa.array(range(table.num_rows), pa.int64())
    compact = table.take(rows).combine_chunks().replace_schema_metadata(dict(sorted(merged.items())))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V5, compression=None)
    with pa.ipc.new_file(sink, compact.schema, options=options) as writer:
        writer.write_table(compact)
    return bytes(sink.getvalue())
