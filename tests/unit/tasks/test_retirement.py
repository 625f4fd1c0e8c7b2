"""Policies that retention deletes while a run continues, is resumed, or changes its retention."""

import os
import random
import signal

import pytest

from rheostat.infra.errors import Damaged
from rheostat.infra.pools.threads import ThreadCluster
from rheostat.infra.store.bundles import fetch_bundle, publish_bundle
from rheostat.infra.store.garbage import find_garbage
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.readers import keep_while_read
from rheostat.infra.store.runs import Run, create_run
from rheostat.infra.store.storage import open_store
from rheostat.infra.store.verify import verify_store
from rheostat.tasks.commit import retire_bundles, retire_policies, retire_rollouts
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.open_run import OpenRun
from tests.support.configurations import accepted
from tests.support.processes import preload, process
from tests.support.versions import commit_version, empty_bundle, stored_bundles

preload(__name__)


def in_process(run, **retention):
    config = accepted("name=r", *(f"retention.{key}={value}" for key, value in retention.items()))
    return OpenRun(run, config, ThreadCluster(), store="here")


def kept_versions(number, *, keep_last, keep_every):
    """Return the first version, the newest ones, and every n-th."""
    regular = range(0, number + 1, keep_every) if keep_every else ()
    return {0, *range(max(0, number + 1 - keep_last), number + 1), *regular}


def test_an_iteration_reads_the_newest_versions_and_the_one_that_becomes_too_old(run, monkeypatch):
    keys = set()
    monkeypatch.setattr(Run, "find", lambda self, key, find=Run.find: keys.add(key) or find(self, key))
    opened = in_process(run, keep_last=2, keep_every=3)
    commit_version(run, 0, weights=0, state=10_000)
    for number in range(1, 30):
        commit_version(run, number, weights=number, state=10_000 + number)
        keys.clear()
        retire_policies(opened, Iteration(run, number))
        versions = {key for key in keys if not key.startswith(("retention/", "critic/"))}
        assert versions <= {StageKey.policy(max(0, number - age)) for age in range(3)}
    keys.clear()
    assert retire_policies(in_process(run, keep_last=2, keep_every=3), Iteration(run, 29)) == 0
    assert {StageKey.policy(version) for version in range(30)} <= keys, "another process reads all of them once"


@pytest.mark.parametrize("seed", range(3))
def test_a_version_keeps_its_files_while_retention_or_another_version_needs_them(run, seed):
    rng, contents, deleted = random.Random(seed), {0: 0}, set()
    commit_version(run, 0, weights=0, state=10_000)
    retention = {"keep_last": 3, "keep_every": 5}
    opened = in_process(run, **retention)
    for number in range(1, 25):
        same = rng.random() < 0.3  # a quarantined update leaves the weights
        contents[number] = contents[number - 1] if same else number
        commit_version(run, number, weights=contents[number], state=10_000 + contents[number])
        if rng.random() < 0.2:
            retention = {"keep_last": rng.choice((2, 3, 5)), "keep_every": rng.choice((0, 2, 5))}
            opened = in_process(run, **retention)
        retire_policies(opened, Iteration(run, number))
        deleted |= {*contents.values()} - {contents[version] for version in kept_versions(number, **retention)}
        assert {*stored_bundles(run, range(25))} == {*contents.values()} - deleted


def test_a_retired_bundle_is_reported_as_retired_even_if_its_deletion_was_interrupted(run, tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_bytes(b"{}")
    bundle = publish_bundle(run.store, tmp_path / "policy", prefix="policies")
    run.commit(Manifest(key=StageKey.policy(0), bundles={"weights": bundle}))
    fetch_bundle(run.store, bundle)
    retire_bundles(run, [bundle])
    run.store.put(f"{bundle.key}/config.json", b"{}")
    assert verify_store(run) == []
    retire_bundles(run, [bundle])
    assert run.store.entries(f"{bundle.key}/") == [] and verify_store(run) == []
    with pytest.raises(Damaged, match=f"{bundle.key}.*retired"):
        fetch_bundle(run.store, bundle)


def test_a_policy_that_a_live_process_reads_keeps_its_files_until_the_next_iteration_after_that(run):
    for number in range(4):
        commit_version(run, number, weights=number)
    opened = in_process(run, keep_last=2)
    with keep_while_read(run.store, [empty_bundle(1)]):
        assert retire_policies(opened, Iteration(run, 3)) == 0
        assert find_garbage(run) == {} and stored_bundles(run, range(4)) == [0, 1, 2, 3]
    commit_version(run, 4, weights=4)
    assert retire_policies(opened, Iteration(run, 4)) == 2
    assert stored_bundles(run, range(5)) == [0, 3, 4] and run.store.entries("readers/") == []


def read_and_die(store, bundle):
    with keep_while_read(open_store(store), [bundle]):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_that_was_killed_keeps_no_files(run):
    commit_version(run, 0, weights=0)
    with process(read_and_die, run.store.uri, empty_bundle(0)) as child:
        child.join()
    assert len(run.store.entries("readers/")) == 1
    assert retire_bundles(run, [empty_bundle(0)]) == []
    assert stored_bundles(run, range(1)) == [] and run.store.entries("readers/") == []


def test_no_policy_is_deleted_while_the_manifest_that_replaced_one_is_missing(tmp_path):
    with create_run(str(tmp_path), "r", {"alarms": {}}).lock() as run:
        for number in range(4):
            commit_version(run, number, weights=number)
            if number:
                detail = {"policy": empty_bundle(0 if number == 3 else number).digest}
                run.commit(Manifest(key=f"it-{number:04d}/seal", detail=detail))
        with pytest.raises(
            Damaged, match=r"the end record of iteration 3 names policy 0{16}.*Restore the missing manifest"
        ):
            retire_policies(in_process(run, keep_last=2), Iteration(run, 3))
        assert stored_bundles(run, range(4)) == [0, 1, 2, 3]


def test_no_rollouts_are_deleted_while_the_seal_that_continues_them_is_missing(run):
    for number in range(5):
        commit_version(run, number, weights=number, state=10_000 + number)
    with pytest.raises(Damaged, match="manifest 'it-0003/seal' is missing"):
        retire_rollouts(in_process(run, rollouts_keep_last=1), Iteration(run, 4))
