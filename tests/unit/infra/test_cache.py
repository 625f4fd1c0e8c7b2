"""The local cache of files that are stored as objects in a bucket."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.store.cache import MIN_KEPT_SECONDS, Cache, open_cache

TAG = '"0cc175b9c0f1b6a831c399e269772661"'


def enter(cache, name, size, *, unused_seconds=0):
    fetched, path = cache.root / ".tmp-fetched", cache.root / "store" / name
    cache.root.mkdir(exist_ok=True)
    fetched.write_bytes(bytes(size))
    cache.add(fetched, path, TAG)
    os.utime(path, ns=(time.time_ns() - unused_seconds * 10**9, path.stat().st_mtime_ns))
    return path


def test_a_cached_file_is_used_only_for_the_object_of_its_size_and_etag(tmp_path):
    cache = Cache(tmp_path / "cache", 1000)
    path = enter(cache, "a", 10)
    assert cache.is_current(path, 10, TAG) and cache.is_current(path, 10, TAG.strip('"'))
    assert not cache.is_current(path, 11, TAG) and not cache.is_current(path, 10, TAG.replace("c", "d"))
    assert not cache.is_current(path.with_name("b"), 10, TAG)


def test_a_full_cache_deletes_the_least_recently_used_file_and_no_file_in_use(tmp_path):
    cache = Cache(tmp_path / "cache", 100)
    oldest, used, recent = (
        enter(cache, name, 40, unused_seconds=seconds)
        for name, seconds in (("a", 9 * MIN_KEPT_SECONDS), ("b", 3 * MIN_KEPT_SECONDS), ("c", 0))
    )
    assert not oldest.exists() and used.exists() and recent.exists()
    assert enter(cache, "d", 200).exists()
    assert not used.exists() and recent.exists()


def test_making_room_for_a_prefetched_file_deletes_no_file_in_use(tmp_path):
    cache = Cache(tmp_path / "cache", 100)
    old, used = enter(cache, "a", 40, unused_seconds=9 * MIN_KEPT_SECONDS), enter(cache, "b", 40)
    assert cache.make_room(60) and not old.exists() and used.exists()
    assert not cache.make_room(61) and used.exists()


def test_one_thread_at_a_time_fetches_a_file_and_leaves_no_lock_file(tmp_path):
    cache, inside, most = Cache(tmp_path / "cache", 100), [], []

    def fetch(_: int) -> None:
        with cache.lock_download(cache.root / "store/a"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.002)
            inside.pop()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(fetch, range(20)))
    assert max(most) == 1 and len(most) == 20 and not list(cache.root.iterdir())


def test_environment_variables_set_the_location_and_size_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RHEOSTAT_CACHE", raising=False)
    assert open_cache().root == tmp_path / "rheostat" / "objects", "engines and checks lie beside it"
    monkeypatch.setenv("RHEOSTAT_CACHE", str(tmp_path))
    monkeypatch.setenv("RHEOSTAT_CACHE_GB", "3")
    assert open_cache() == Cache(tmp_path, 3 * 10**9)
    monkeypatch.setenv("RHEOSTAT_CACHE_GB", "lots")
    with pytest.raises(BadInput, match="RHEOSTAT_CACHE_GB must be a whole number, but is 'lots'"):
        open_cache()
