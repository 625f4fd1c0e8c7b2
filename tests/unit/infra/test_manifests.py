"""Manifests: the digest identifies the committed content, and every changed bit of a file is noticed."""

import json

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.manifests import Manifest, Provenance, decode_manifest
from rheostat.infra.store.shards import ShardRef

SHARD = ShardRef(key="shards/ab.arrow", bytes=10, rows=2, digest="ab")
MANIFEST = Manifest(
    key="it-0003/rollout/0001",
    shards=(SHARD,),
    bundles={"weights": BundleRef(key="policies/cd", digest="cd", bytes=5)},
    parents=("ef",),
    metrics={"rollout/reward": 0.1, "rollout/tokens": 7},
    detail={"rows": [1, 2], "note": "größer ✓"},
    provenance=Provenance(epoch=2, worker="rollout-0", host="here", created="2026-01-01", seconds={"generate": 0.25}),
)


def test_everything_except_provenance_and_the_order_of_names_is_part_of_the_digest():
    turned = dict(reversed(MANIFEST.metrics.items()))
    for alike in ({"provenance": Provenance()}, {"metrics": turned}):
        assert MANIFEST.model_copy(update=alike).digest == MANIFEST.digest
    assert decode_manifest(MANIFEST.encode(), key=MANIFEST.key) == MANIFEST
    changes = {
        "key": "it-0003/rollout/0002",
        "run": "0123456789abcdef",
        "shards": (SHARD, SHARD),
        "bundles": {},
        "parents": (),
        "metrics": {"rollout/reward": 0.1},
        "detail": {},
    }
    assert set(changes) == set(Manifest.model_fields) - {"provenance"}
    digests = {MANIFEST.model_copy(update={name: value}).digest for name, value in changes.items()}
    assert len(digests | {MANIFEST.digest}) == len(changes) + 1


def test_the_digest_in_the_file_can_be_recomputed_without_this_library():
    record = json.loads(MANIFEST.encode())
    result = {name: value for name, value in record.items() if name not in ("provenance", "digest", "seal")}
    text = json.dumps(result, sort_keys=True, separators=(",", ":"))
    assert record["digest"] == MANIFEST.digest == blake3(text.encode()).hexdigest()


def test_every_flipped_bit_and_every_cut_of_the_file_is_damage():
    data = MANIFEST.encode()
    for position in range(len(data)):
        flips = (data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :] for bit in (1, 32))
        for damaged in (data[:position], *flips):
            with pytest.raises(Damaged, match=MANIFEST.key):
                decode_manifest(damaged, key=MANIFEST.key)


def test_a_manifest_under_another_key_or_with_a_wrong_digest_is_damage_in_spite_of_its_seal():
    with pytest.raises(Damaged, match=r"it-0003/rollout/0002.*manifest of another key, 'it-0003/rollout/0001'"):
        decode_manifest(MANIFEST.encode(), key="it-0003/rollout/0002")
    record = json.loads(MANIFEST.encode())
    forged = {name: value for name, value in record.items() if name not in ("seal", "schema_version")}
    with pytest.raises(Damaged, match="must have the digest 00"):
        decode_manifest(seal({**forged, "digest": "00"}), key=MANIFEST.key)


def test_a_manifest_of_a_newer_schema_version_is_refused_with_both_versions():
    record = {name: value for name, value in json.loads(MANIFEST.encode()).items() if name != "seal"}
    record["schema_version"] = "2"
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    digest = blake3(text.encode()).hexdigest()
    data = json.dumps(record | {"seal": digest}, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(BadInput, match=r"it-0003/rollout/0001.*schema version 2, .* reads only 1"):
        decode_manifest(data, key=MANIFEST.key)


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a..b", "A", "a b", "a\n", ".a", "a" * 201])
def test_a_key_that_could_not_be_stored_is_refused(key):
    with pytest.raises(ValidationError, match="manifest key"):
        Manifest(key=key)


def test_a_manifest_has_finite_numbers_only():
    with pytest.raises(ValidationError, match="finite"):
        Manifest(key="a", metrics={"loss": float("nan")})
    with pytest.raises(ValidationError, match="finite"):
        Manifest(key="a", detail={"loss": float("inf")})
    with pytest.raises(Damaged, match="a"):
        decode_manifest(b'{"detail":{"loss":NaN},"seal":"00"}', key="a")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(
    metrics=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    detail=st.dictionaries(st.text(max_size=5), json_values, max_size=4),
)
def test_any_manifest_reads_back_bit_for_bit(metrics, detail):
    manifest = Manifest(key="a/b", metrics=metrics, detail=detail)
    again = decode_manifest(manifest.encode(), key="a/b")
    assert again == manifest and again.encode() == manifest.encode()
