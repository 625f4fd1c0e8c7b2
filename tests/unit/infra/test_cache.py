"""The cache of files that stand for objects elsewhere."""

import os
import time
from datetime import UTC, datetime

import pytest

from infra.errors import BadInput
from infra.store.cache import KEPT_SECONDS, Cache, open_cache

THEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def enter(cache, name, size, *, unused_seconds=0):
    fetched, path = cache.root / ".tmp-fetched", cache.root / "store" / name
    cache.root.mkdir(exist_ok=True)
    fetched.write_bytes(bytes(size))
    cache.enter(fetched, path, THEN)
    os.utime(path, (time.time() - unused_seconds, path.stat().st_mtime))
    return path


def test_a_file_stands_for_the_object_of_its_size_and_time_alone(tmp_path):
    cache = Cache(tmp_path / "cache", 1000)
    path = enter(cache, "a", 10)
    assert cache.holds(path, 10, THEN)
    assert not cache.holds(path, 11, THEN) and not cache.holds(path, 10, THEN.replace(year=2027))
    assert not cache.holds(path.with_name("b"), 10, THEN)


def test_beyond_its_limit_a_cache_drops_what_was_used_longest_ago_and_nothing_that_is_in_use(tmp_path):
    cache = Cache(tmp_path / "cache", 100)
    oldest, used, recent = (
        enter(cache, name, 40, unused_seconds=seconds)
        for name, seconds in (("a", 9 * KEPT_SECONDS), ("b", 3 * KEPT_SECONDS), ("c", 0))
    )
    assert not oldest.exists() and used.exists() and recent.exists()
    assert enter(cache, "d", 200).exists()
    assert not used.exists() and recent.exists()


def test_the_environment_says_where_the_cache_is_and_how_large(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RHEOSTAT_CACHE", raising=False)
    assert open_cache().root == tmp_path / "rheostat" / "objects", "engines and checks lie beside it"
    monkeypatch.setenv("RHEOSTAT_CACHE", str(tmp_path))
    monkeypatch.setenv("RHEOSTAT_CACHE_GB", "3")
    assert open_cache() == Cache(tmp_path, 3 * 10**9)
    monkeypatch.setenv("RHEOSTAT_CACHE_GB", "lots")
    with pytest.raises(BadInput, match="RHEOSTAT_CACHE_GB='lots': expected a whole number"):
        open_cache()
