"""Prefetching: the inputs of queued work are downloaded before the work begins."""

import asyncio
import threading
from dataclasses import replace

import pyarrow as pa
import pytest

import rheostat.infra.store.bucket_store
from rheostat.infra.pools.inputs import WorkInputs
from rheostat.infra.pools.threads import ThreadCluster
from rheostat.infra.pools.worker import PoolSpec
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.cache import Cache
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.run_record import RunRecord
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from tests.support.s3_proxy import Fault, s3_proxy

pytestmark = pytest.mark.s3


@pytest.fixture
def far(s3_servers, tmp_path, monkeypatch):
    """Store with shards, seen from a machine with an empty cache, and the fault settings between them."""
    server = s3_servers.start("moto")
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place(endpoint=endpoint)
        made = place.open()
        store = open_store(f"{made.uri}/run")
        shards = [write_shard(store, pa.table({"n": [n] * 3}), kind="test", metadata={}) for n in range(6)]
        monkeypatch.setenv("RHEOSTAT_CACHE", str(tmp_path / "another"))
        weather.seen.clear()
        yield place, shards, weather


def gets(weather, what):
    return [request for request in weather.seen if request.startswith("GET") and what in request]


async def test_the_next_shard_of_a_busy_worker_is_prefetched_once(far):
    place, shards, weather = far
    weather.faults = [Fault("slow", f"GET .*{shard.digest}") for shard in shards[:2]]
    second = open_store(f"{place.uri}/run")._cached(shards[1].key)
    spec = PoolSpec("reader", "tests.support.workers:Reading", {"store_uri": place.uri, "run": "run"}, prefetches=True)
    async with ThreadCluster.open(threads=1) as cluster:
        pool = await cluster.pool(spec)
        works = [(shards[0], second), (shards[1], None)]
        came, _ = await asyncio.gather(*(pool.run("read", work, returns=bool) for work in works))
    assert came.result, "it was there before the worker asked for it"
    assert [len(gets(weather, shard.digest)) for shard in shards] == [1, 1, 0, 0, 0, 0]


def test_the_shards_of_a_work_unit_are_fetched_concurrently(far):
    place, shards, weather = far
    together = threading.Barrier(len(shards))
    weather.faults = [Fault("before", "^GET .*/shards/", times=len(shards), does=lambda: together.wait(20))]
    store = open_store(f"{place.uri}/run")
    WorkInputs(store).download({"shards": tuple(shards)})
    assert not together.broken
    for shard in shards:
        read_shard(store, shard)
    assert len(gets(weather, "/shards/")) == len(shards) and not [each for each in weather.seen if "HEAD" in each]


def test_a_policy_is_prefetched_if_the_cache_has_room(far, tmp_path):
    place, _, weather = far
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/model.safetensors").write_bytes(bytes(5000))
    bundle = publish_bundle(place.open(), tmp_path / "policy", prefix="policies")
    for limit, expected in ((4000, 0), (100_000, 1)):
        cache = Cache(tmp_path / f"cache-{limit}", limit)
        store = replace(place.open(), cache=cache)
        inputs = WorkInputs(store)
        inputs.prefetch((bundle,))
        inputs._ahead.shutdown()
        assert len(gets(weather, "model.safetensors")) == expected
        assert sum(path.stat().st_size for path in cache.root.rglob("*") if path.is_file()) <= limit


def test_cached_copies_of_a_tombstoned_shard_are_not_used(far, monkeypatch):
    place, shards, weather = far
    run = Run(
        open_store(f"{place.uri}/run"), RunRecord(name="run", fingerprint="0", config={}, created="", versions={})
    )
    with run.lock():
        run.commit(Manifest(key=f"retention/{shards[0].digest[:16]}"))
    inputs = WorkInputs(run.store)
    inputs.download(shards)
    assert [run.store.cached_copy(shard.key) is not None for shard in shards] == [False, *[True] * 5]
    with run.lock():
        run.commit(Manifest(key="retention/it-0001"))
    monkeypatch.setattr(rheostat.infra.store.bucket_store, "_known_copies", set())
    WorkInputs(run.store).download(shards)
    assert not any(run.store.cached_copy(shard.key) for shard in shards) and not gets(weather, shards[0].digest)
