"""Shards: equal rows give equal bytes, and no changed byte is ever returned."""

import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

import rheostat.infra.store.shards
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.shards import (
    ShardKind,
    ShardRef,
    declare_kinds,
    open_tables,
    quarantine,
    read_metadata,
    read_shard,
    verify_shard,
    write_shard,
)
from rheostat.infra.store.storage import open_store
from tests.support.processes import CONTEXT, preload, process
from tests.support.stores import RacedStore, flip_bit

preload(__name__)

TABLE = pa.table(
    {
        "row": pa.array([1, 2, None], pa.int32()),
        "text": ["one", None, ""],
        "logprobs": pa.array([[-0.5, None], None, []], pa.list_(pa.float32())),
    }
)


def put(store, table=TABLE, **metadata):
    return write_shard(store, table, kind="test", metadata=metadata)


def damage(store, ref):
    """Change a bit of a stored shard."""
    flip_bit(store.local_path(ref.key), -64)


def test_a_shard_reads_back_equal_with_its_metadata(store):
    ref = put(store, policy="3", iteration="1")
    table = read_shard(store, ref)
    assert table.equals(TABLE)
    assert ref.key == f"shards/{ref.digest[:2]}/{ref.digest}.arrow" and ref.rows == 3
    assert ref.bytes == len(store.read(ref.key)) and ref.digest == blake3(store.read(ref.key)).hexdigest()
    assert list(table.schema.metadata.items()) == [
        (b"iteration", b"1"),
        (b"policy", b"3"),
        (b"rheostat.kind", b"test"),
        (b"rheostat.rows", b"3"),
        (b"rheostat.schema_version", b"1"),
    ]


def test_a_shard_of_an_older_run_without_digest_folders_is_read(store):
    new = put(store)
    old = new.model_copy(update={"key": f"shards/{new.digest}.arrow"})
    store.put(old.key, store.read(new.key))
    store.delete(new.key)
    assert read_shard(store, old).equals(TABLE)


def test_columns_can_be_selected_and_the_file_is_uncompressed_arrow(store):
    ref = put(store)
    assert read_shard(store, ref, ["text", "row"]).equals(TABLE.select(["text", "row"]))
    with pa.ipc.open_file(store.local_path(ref.key)) as reader:
        assert reader.num_record_batches == 1 and reader.read_all().equals(TABLE)


def test_an_empty_table_is_a_shard(store):
    ref = put(store, TABLE.slice(0, 0))
    assert ref.rows == 0 and read_shard(store, ref).schema.equals(TABLE.schema)
    assert put(store, TABLE.schema.empty_table()) == ref


rows_of_a_table = st.lists(
    st.fixed_dictionaries(
        {
            "number": st.none() | st.integers(-(2**31), 2**31 - 1),
            "text": st.none() | st.text(max_size=5),
            "values": st.none() | st.lists(st.none() | st.floats(width=32, allow_nan=False), max_size=4),
        }
    ),
    max_size=20,
)
SCHEMA = pa.schema([("number", pa.int32()), ("text", pa.string()), ("values", pa.list_(pa.float32()))])


@settings(max_examples=60, deadline=None)
@given(rows=rows_of_a_table, cut=st.integers(0, 20), padding=rows_of_a_table)
def test_equal_rows_and_metadata_give_one_digest_for_any_chunks_and_slices(tmp_path_factory, rows, cut, padding):
    store = open_store(str(tmp_path_factory.mktemp("run")))
    whole = pa.Table.from_pylist(rows, SCHEMA)
    pieces = pa.concat_tables([whole.slice(0, cut), whole.slice(cut)])
    inside = pa.Table.from_pylist(padding + rows + padding, SCHEMA).slice(len(padding), len(rows))
    refs = [
        write_shard(store, table, kind="test", metadata=metadata)
        for table in (whole, pieces, inside)
        for metadata in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    ]
    assert len(set(refs)) == 1 and read_shard(store, refs[0]).to_pylist() == rows


def test_values_under_nulls_are_not_part_of_the_digest(store):
    def with_hidden(value, bitmap):
        values = pa.array([1.0, value, 2.0], pa.float32()).buffers()[1]
        return pa.table({"x": pa.Array.from_buffers(pa.float32(), 3, [pa.py_buffer(bytes([bitmap])), values])})

    assert put(store, with_hidden(7.0, 0b101)) == put(store, with_hidden(9.0, 0b11111101))
    assert put(store, with_hidden(7.0, 0b111)) == put(store, pa.table({"x": pa.array([1, 7, 2], pa.float32())}))
    assert put(store, with_hidden(7.0, 0b101)) != put(store, with_hidden(7.0, 0b111))


def test_other_rows_metadata_or_kind_give_another_digest(store):
    refs = [
        put(store),
        put(store, TABLE.slice(0, 2)),
        put(store, seed="1"),
        write_shard(store, TABLE, kind="other", metadata={}),
        put(store, TABLE.cast(TABLE.schema.set(0, pa.field("row", pa.int64())))),
    ]
    assert len({ref.digest for ref in refs}) == len(refs)


def test_metadata_cannot_replace_reserved_keys_of_the_shard(store):
    with pytest.raises(BadInput, match=r"rheostat\."):
        write_shard(store, TABLE, kind="test", metadata={"rheostat.rows": "7"})


def test_a_flipped_bit_is_damage_that_names_the_shard_and_both_digests(store):
    ref = put(store)
    damage(store, ref)
    found = blake3(store.read(ref.key)).hexdigest()
    with pytest.raises(Damaged, match=rf"{ref.key}.*{ref.digest}.*{found}"):
        read_shard(store, ref)


def test_a_file_cut_at_any_byte_is_damage_even_after_it_was_verified(store):
    ref = put(store)
    data = store.read(ref.key)
    read_shard(store, ref)
    for size in range(0, len(data), 97):
        store.local_path(ref.key).write_bytes(data[:size])
        with pytest.raises(Damaged, match=f"must have {len(data)} bytes, but it has {size}"):
            read_shard(store, ref)


def test_a_process_caches_a_bounded_number_of_verified_shards(store, monkeypatch):
    monkeypatch.setattr(rheostat.infra.store.shards, "_verified", set())
    monkeypatch.setattr(rheostat.infra.store.shards, "MAX_VERIFIED", 2)
    refs = [put(store, number=str(number)) for number in range(3)]
    for ref in refs:
        read_shard(store, ref)
    damage(store, refs[0])
    with pytest.raises(Damaged, match="must have the digest"):  # it was verified too long ago
        read_shard(store, refs[0])
    read_shard(store, refs[2])


def test_a_missing_shard_and_a_reference_with_another_row_count_are_damage(store):
    ref = put(store)
    with pytest.raises(Damaged, match="4 rows, but it has 3"):
        read_shard(store, ref.model_copy(update={"rows": 4}))
    store.delete(ref.key)
    with pytest.raises(Damaged, match="missing"):
        read_shard(store, ref)


@pytest.mark.parametrize("read", [read_shard, read_metadata, verify_shard])
def test_a_shard_that_is_deleted_before_its_file_is_opened_is_missing(store, read):
    ref = put(store)
    raced = RacedStore(store.root, act=store.delete)
    with pytest.raises(Damaged, match="missing"):
        read(raced, ref)


def test_a_shard_of_a_newer_schema_version_is_refused_with_both_versions(store):
    sink = pa.BufferOutputStream()
    newer = TABLE.replace_schema_metadata({"rheostat.schema_version": "2.1"})
    with pa.ipc.new_file(sink, newer.schema) as writer:
        writer.write_table(newer)
    data = sink.getvalue().to_pybytes()
    digest = blake3(data).hexdigest()
    ref = ShardRef(key=f"shards/{digest}.arrow", bytes=len(data), rows=3, digest=digest)
    store.put(ref.key, data)
    with pytest.raises(BadInput, match=r"schema version 2\.1, .* reads only 1"):
        read_shard(store, ref)


def test_a_shard_of_an_older_layout_has_newer_columns_with_their_declared_values(store, monkeypatch):
    monkeypatch.setattr(rheostat.infra.store.shards, "_KINDS", {})
    declare_kinds(ShardKind("test", TABLE.schema))
    ref = put(store)
    younger = [*TABLE.schema, ("notes", pa.list_(pa.string())), ("source", pa.string())]
    declare_kinds(ShardKind("test", pa.schema(younger), version=2, missing={"notes": [], "source": None}))
    table = read_shard(store, ref)
    assert table.select(TABLE.column_names).equals(TABLE)
    assert (table["notes"].to_pylist(), table["source"].to_pylist()) == ([[]] * 3, [None] * 3)
    assert table.schema.field("notes").type == pa.list_(pa.string())
    assert read_metadata(store, put(store))["rheostat.schema_version"] == "2"


def test_fields_of_structs_that_are_newer_than_a_shard_are_null(store, monkeypatch):
    monkeypatch.setattr(rheostat.infra.store.shards, "_KINDS", {})
    turn, newer = (pa.struct([("tokens", pa.int32()), *more]) for more in ([], [("text", pa.string())]))
    table = pa.table({"turns": pa.array([[{"tokens": 3}], None, []], pa.list_(turn))})
    ref = put(store, table)
    declare_kinds(ShardKind("test", pa.schema([("turns", pa.list_(newer))]), version=2))
    found = read_shard(store, ref)["turns"]
    assert (found.type, found.to_pylist()) == (pa.list_(newer), [[{"tokens": 3, "text": None}], None, []])


def test_a_column_that_no_layout_of_a_shard_has_is_named(store):
    with pytest.raises(Damaged, match="must have the column 'turns', but it has row, text, logprobs"):
        read_shard(store, put(store), ["row", "turns"])


def test_a_quarantined_shard_is_kept_and_written_again_under_its_name(store):
    ref, other = put(store), put(store, TABLE.slice(1))
    damage(store, ref)
    damaged = store.read(ref.key)
    assert quarantine(store, ref) and not store.exists(ref.key)
    (entry,) = store.entries("quarantine/")
    assert store.read(entry.key) == damaged
    assert put(store) == ref and read_shard(store, ref).equals(TABLE)
    assert not quarantine(store, ref) and not quarantine(store, other)
    assert read_shard(store, other).num_rows == 2


def test_writing_a_damaged_shard_again_repairs_it(store):
    ref = put(store)
    read_shard(store, ref)
    damage(store, ref)
    assert put(store) == ref and read_shard(store, ref).equals(TABLE)
    assert len(store.entries("quarantine/")) == 1


def test_analysts_get_exactly_the_files_of_the_references(store):
    refs = [put(store, TABLE.slice(row, 1)) for row in range(3)]
    assert [path.name for path in open_tables(store, refs[1:])] == [f"{ref.digest}.arrow" for ref in refs[1:]]
    damaged = put(store, TABLE.slice(0, 2))
    damage(store, damaged)
    with pytest.raises(Damaged):
        open_tables(store, [*refs, damaged])


def _read(uri, ref, results):
    try:
        results.put(read_shard(open_store(uri), ref).num_rows)
    except Damaged as error:
        results.put(str(error))


def test_damage_after_a_first_read_is_found_by_the_next_process(store):
    ref, results = put(store), CONTEXT.Queue()
    read_shard(store, ref)
    damage(store, ref)
    with process(_read, store.uri, ref, results):
        assert ref.digest in results.get()


def test_a_verified_shard_is_opened_without_computing_its_digest_again(store, monkeypatch):
    ref = put(store)
    read_shard(store, ref)
    monkeypatch.setattr(rheostat.infra.store.shards, "_digest", lambda path: pytest.fail(f"{path} is verified already"))
    assert read_shard(store, ref).equals(TABLE)
