"""Which policies give their files back as a run goes on, is continued and has its retention changed."""

import random

import pytest

from infra.errors import Damaged
from infra.pools.threads import ThreadCluster
from infra.store.bundles import BundleRef, fetch_bundle, publish_bundle
from infra.store.manifests import Manifest
from infra.store.runs import Run, create_run
from infra.store.verify import verify_store
from tasks.commit import retire_bundle, retire_policies
from tasks.config.run import parse_config
from tasks.run.iteration import Iteration
from tasks.run.keys import StageKey
from tasks.run.session import Session


class Watched(Run):
    """A run that notes which manifests it is asked for."""

    def find(self, key):
        self.asked.add(key)
        return super().find(key)


@pytest.fixture
def run(tmp_path):
    made = create_run(str(tmp_path), "kept", {"seed": 1})
    watched = Watched(made.store, made.record)
    watched.asked = set()
    with watched.hold():
        yield watched


def session_of(run, **retention):
    config = parse_config({"name": "kept", "retention": retention}, source="test")
    return Session(run, config, ThreadCluster(), store="here")


def bundle(content):
    digest = f"{content:016x}{0:048x}"
    return BundleRef(key=f"policies/{digest[:16]}", digest=digest, bytes=1)


def commit_version(run, version, content, *, stateful=True):
    bundles = {"weights": bundle(content), **({"state": bundle(content + 10_000)} if stateful else {})}
    for ref in bundles.values():
        run.store.put(f"{ref.key}/bundle.json", b"{}")
    run.commit(Manifest(key=StageKey.policy(version), bundles=bundles, metrics={"steps": 1}))


def kept(number, *, keep_last, keep_every):
    """The first version, the newest, and every n-th."""
    regular = range(0, number + 1, keep_every) if keep_every else ()
    return {0, *range(max(0, number + 1 - keep_last), number + 1), *regular}


def test_an_iteration_looks_at_the_newest_versions_and_the_one_that_becomes_too_old(run):
    session = session_of(run, keep_last=2, keep_every=3)
    commit_version(run, 0, 0)
    for number in range(1, 30):
        commit_version(run, number, number)
        run.asked.clear()
        retire_policies(session, Iteration(run, number))
        looked = {key for key in run.asked if not key.startswith(("retention/", "critic/"))}
        assert looked <= {StageKey.policy(max(0, number - age)) for age in range(3)}
    run.asked.clear()
    assert retire_policies(session_of(run, keep_last=2, keep_every=3), Iteration(run, 29)) == 0
    assert {StageKey.policy(version) for version in range(30)} <= run.asked, "another process looks at all once"


@pytest.mark.parametrize("seed", range(3))
def test_a_version_keeps_its_files_while_retention_or_another_version_needs_them(run, seed):
    draw, contents, gone = random.Random(seed), {0: 0}, set()
    commit_version(run, 0, 0)
    retention = {"keep_last": 3, "keep_every": 5}
    session = session_of(run, **retention)
    for number in range(1, 25):
        same = draw.random() < 0.3  # a quarantined update leaves the weights
        contents[number] = contents[number - 1] if same else number
        commit_version(run, number, contents[number])
        if draw.random() < 0.2:
            retention = {"keep_last": draw.choice((2, 3, 5)), "keep_every": draw.choice((0, 2, 5))}
            session = session_of(run, **retention)
        retire_policies(session, Iteration(run, number))
        used = {contents[version] for version in kept(number, **retention)}
        gone |= {*contents.values()} - used
        files = {content for content in contents.values() if run.store.exists(f"{bundle(content).key}/bundle.json")}
        assert files == {*contents.values()} - gone


def test_a_retired_bundle_is_gone_for_good_and_says_so_also_where_that_was_cut_short(run, tmp_path):
    directory = tmp_path / "policy"
    directory.mkdir()
    (directory / "config.json").write_bytes(b"{}")
    bundle = publish_bundle(run.store, directory, prefix="policies")
    run.commit(Manifest(key=StageKey.policy(0), bundles={"weights": bundle}))
    fetch_bundle(run.store, bundle)
    retire_bundle(run, bundle)
    run.store.put(f"{bundle.key}/config.json", b"{}")
    assert verify_store(run) == []
    retire_bundle(run, bundle)
    assert run.store.entries(f"{bundle.key}/") == [] and verify_store(run) == []
    with pytest.raises(Damaged, match=f"{bundle.key}.*retired: retention deleted its files"):
        fetch_bundle(run.store, bundle)
