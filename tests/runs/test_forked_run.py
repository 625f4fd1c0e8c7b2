"""Forks: a run that begins at an iteration of another run and shares everything before it."""

import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from rheostat.flows.cli.train import run_flow
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import has_bundle
from rheostat.infra.store.copies import copy_run
from rheostat.infra.store.garbage import Rules, collect_garbage, delete_run, select_runs
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.readers import bundles_in_use, keep_while_read
from rheostat.infra.store.runs import list_runs, open_run, run_forks, run_store
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.infra.store.tombstones import Deleted, write_tombstone
from rheostat.models.records.versions import policy_of
from rheostat.tasks import forgetting
from rheostat.tasks.commit import _retire_shards, retire_bundles
from rheostat.tasks.forks.creation import create_fork, request_fork
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.verification.invariants import verify_run
from rheostat.tasks.views.report.comparison import compare_runs, comparison_page
from tests.support.in_process import InProcessJob, copy_job, run_command
from tests.support.jobs import TINY, manifests_of

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def job(reference, tmp_path) -> InProcessJob:
    """Copy of the finished tiny run, which has the policies 0, 2 and 3."""
    return copy_job(reference, tmp_path / "job")


@pytest.fixture(scope="module")
def forked(reference, tmp_path_factory) -> InProcessJob:
    """Tiny run with the trained fork `same` at iteration 2, which has the settings of its parent."""
    job = copy_job(reference, tmp_path_factory.mktemp("forked") / "job")
    train_fork(job, "tiny@2", "same")
    return job


@pytest.fixture
def forked_copy(forked, tmp_path) -> InProcessJob:
    return copy_job(forked, tmp_path / "job")


def request(job, point, name="fork", *overrides):
    return request_fork(str(job.store), point, name, overrides=[*overrides, "pools.cluster=threads", "report=false"])


def train_fork(job, point, name, *overrides):
    with job.prefect():
        from rheostat.flows.fork import fork

        run_flow(fork(point, name, [*overrides, "pools.cluster=threads", "report=false"], store=str(job.store)))
    return open_run(str(job.store), name)


def files_in(directory: Path):
    """Return the names of all files in a directory."""
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def names_in(run):
    """Return the keys of all objects that a run has, its own and shared ones."""
    return {entry.key for entry in run.store.entries("")}


def test_a_fork_without_changes_ends_at_the_bits_of_its_parent_and_copies_no_object(forked, reference):
    fork, parent = open_run(str(forked.store), "same"), open_run(str(forked.store), "tiny")
    for number in (0, 2, 3):
        assert policy_after(fork, number).bundles == policy_after(parent, number).bundles
    own, whole = files_in(forked.store / "same"), files_in(reference.run)
    shared = {key for key in names_in(fork) if key not in own}
    assert shared < whole and {"manifests/it-0002/seal.json", "manifests/policy/initial.json"} < shared
    assert own.isdisjoint(shared) and not [name for name in own if re.search("it-000[12]/", name)]
    assert manifests_of(forked.run) == manifests_of(reference.run)
    assert [verify_run(str(forked.store), name) for name in ("same", "tiny")] == [[], []]


OTHERS = (
    "update.learning_rate=3e-3",
    "scoring.rewards=[{kind = 'exact_match'}]",
    "update.kl={kind = 'k3', coefficient = 0.2, adaptive = {target = 0.01}}",
)


def test_a_fork_follows_its_own_settings_after_the_shared_iterations(job):
    fork = train_fork(job, "tiny@2", "other", *OTHERS)
    parent = open_run(str(job.store), "tiny")
    assert fork.require("it-0002/seal").digest == parent.require("it-0002/seal").digest
    assert policy_of(policy_after(fork, 3)).digest != policy_of(policy_after(parent, 3)).digest
    assert fork.require("it-0003/seal").run == fork.record.fingerprint != parent.record.fingerprint
    assert fork.require("it-0003/update").metrics["kl_coefficient"] == 0.2
    assert verify_run(str(job.store), "other") == []
    compared = compare_runs(str(job.store), ["tiny", "other"])
    assert [each.forked_from for each in compared.runs] == ["", "tiny@2"]
    assert compared.settings["update.learning_rate"] == {"tiny": "0.001", "other": "0.003"}
    assert "forked from" in comparison_page(str(job.store), compared)


def test_a_fork_of_a_fork_shares_the_objects_of_both(forked_copy):
    second = create_fork(request(forked_copy, "same@3", "second", "iterations=4"))
    assert {*second.fork.shared} == {"tiny", "same"}
    assert verify_run(str(forked_copy.store), "second") == []
    assert second.require("it-0003/seal") == open_run(str(forked_copy.store), "same").require("it-0003/seal")


def test_the_command_shows_the_fork_before_it_writes_and_refuses_what_cannot_be_shared(job):
    before = files_in(job.store)
    store = ("--store", str(job.store), "--dry-run")
    shown = run_command("fork", "tiny@2", "fork", "update.learning_rate=3e-3", *store)
    assert shown.code == 0 and "update.learning_rate was 0.001, is 0.003" in shown.output
    assert "from iteration 2 of tiny" in shown.output and "not copied" in shown.output
    refused = run_command("fork", "tiny@2", "fork", "seed=4", *store)
    assert refused.code == 2 and "seed cannot change" in refused.output
    assert files_in(job.store) == before


@pytest.mark.parametrize(
    ("point", "overrides", "message"),
    [
        ("tiny", [], "does not name an iteration of a run. Write RUN@N"),
        ("tinny@2", [], "no run 'tinny'.* tiny"),
        ("tiny@4", [], "no completed iteration 4. Choose one from 0"),
        ("tiny@1", [], "cannot be forked at iteration 1, because policy 1 is not stored.* 0, 2, 3"),
        ("tiny@3", [], "iterations is 3, but the fork begins after iteration 3. Set iterations to 4 or more"),
        ("tiny@2", ["data.options.train_problems=65"], "data.options.train_problems cannot change, because"),
        ("tiny@2", ["policy.hidden_size=32"], "policy.hidden_size cannot change, because"),
        ("tiny@2", ["warmup.steps=11"], "warmup.steps cannot change, because"),
        ("tiny@2", ["update.lora={rank = 2}"], "update.lora.* cannot change, because"),
        ("tiny@2", ["update.optimizer.kind=muon"], "update.optimizer.kind cannot change, because"),
        ("tiny@2", ["rollout.sampling.max_new_tokens=25"], "max_new_tokens cannot be above 24"),
        ("tiny@2", ["algorithm.kind=ppo"], "algorithm.kind cannot be 'ppo', because the shared iterations trained no"),
        ("tiny@2", ["update.learning_rat=1"], "learning_rate"),
        (
            "tiny@3",
            ["iterations=4", "rollout.staleness=2", "retention.keep_last=4"],
            "policy 1 is not stored, which rollout.staleness = 2 needs",
        ),
        ("tiny@2", ["alarms=[{kind='length_collapse', action='revert'}]"], "policy 1 is not stored, to which an alarm"),
    ],
)
def test_a_fork_that_cannot_share_its_beginning_is_refused_by_name(job, point, overrides, message):
    with pytest.raises(BadInput, match=message):
        request(job, point, "fork", *overrides)
    assert list_runs(str(job.store)) == ["tiny"]


def test_a_name_that_another_run_has_is_refused_and_the_same_fork_is_continued(forked):
    for name, overrides, message in (
        ("tiny", [], "already exists .* not a fork of tiny@2"),
        ("same", ["update.learning_rate=3e-3"], "other settings: update.learning_rate"),
    ):
        with pytest.raises(BadInput, match=message):
            request(forked, "tiny@2", name, *overrides)
    assert request(forked, "tiny@2", "same").plan.exists


def test_objects_that_a_fork_shares_survive_every_deletion_in_its_parent(forked_copy):
    store = str(forked_copy.store)
    parent, before = open_run(store, "tiny"), names_in(open_run(store, "same"))
    with parent.lock():
        assert retire_bundles(parent, [*policy_after(parent, 2).bundles.values()]) == []
        collect_garbage(parent)
        for number in (1, 2):
            _retire_shards(parent, number)
    assert select_runs(store, ["tiny", "same"], Rules(keep=0)).keys() == {"same"}
    with parent.lock():
        deleted = delete_run(parent, why="a test")
    assert deleted, "objects that the fork does not share"
    assert not has_bundle(parent.store, policy_after(parent, 3).bundles["weights"])
    assert names_in(open_run(store, "same")) == before
    assert verify_run(store, "same") == []
    fork = open_run(store, "same")
    with fork.lock():
        delete_run(fork, why="a test")
    with parent.lock():
        collect_garbage(parent)
    assert not [key for key in names_in(parent) if key.startswith(("shards/", "policies/", "states/"))]


def test_a_copy_of_a_fork_has_all_objects(forked, tmp_path):
    copy = copy_run("same", str(forked.store), str(tmp_path / "copies")).run
    expected = {*names_in(open_run(str(forked.store), "same")), "fork.json"} - {"lock", "metrics.jsonl"}
    assert files_in(tmp_path / "copies" / "same") - {"lock"} == {key for key in expected if "trackers" not in key}
    assert verify_run(str(tmp_path / "copies"), "same") == []
    assert copy.fork.point == "tiny@2"


def test_a_fork_whose_creation_was_interrupted_at_any_write_is_created_by_the_same_command(job, tmp_path, monkeypatch):
    asked, put, left = request(job, "tiny@2"), LocalStore.put, [0]

    def interrupted(self, *arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return put(self, *arguments, **options)

    monkeypatch.setattr(LocalStore, "put", interrupted)
    for writes in range(20):
        left[0] = writes
        with suppress(KeyboardInterrupt):
            create_fork(asked)
            break
        assert list_runs(str(job.store)) == ["tiny"], "a fork exists when it is complete"
    assert 4 < writes < 19
    assert verify_run(str(job.store), "fork") == []


def test_a_fork_with_other_settings_replaces_one_that_was_not_completed(job, monkeypatch):
    begun, other = request(job, "tiny@0", "fork", "iterations=1"), request(job, "tiny@2")
    with monkeypatch.context() as patch:
        patch.setattr("rheostat.tasks.forks.creation.record_dependencies", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            create_fork(begun)
    assert create_fork(other).fork.point == "tiny@2"
    assert verify_run(str(job.store), "fork") == []


@pytest.mark.parametrize("name", ["registry", "../outside", "Fork"])
def test_names_that_a_run_cannot_have_are_refused(job, name):
    (job.home / "tiny.toml").write_text(TINY)
    for file in (None, job.home / "tiny.toml"):
        with pytest.raises(BadInput, match="name"):
            request_fork(str(job.store), "tiny@2", name, job=file)


def test_files_that_the_creation_of_a_fork_has_not_written_are_not_deleted(job):
    kept = job.store / "fork" / "manifests" / "mine"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(BadInput, match="already contains files, such as 'manifests/mine'"):
        request(job, "tiny@2")
    assert files_in(job.store / "fork") == {"manifests/mine"}


def test_a_fork_replaces_another_one_of_its_name_only_if_that_has_no_own_results(forked_copy):
    first, second = request(forked_copy, "tiny@2", "x"), request(forked_copy, "tiny@3", "x", "iterations=4")
    again = request(forked_copy, "tiny@2", "x", "update.learning_rate=3e-3")
    create_fork(first)
    with pytest.raises(BadInput, match="not a fork of tiny@3"):
        create_fork(second)
    replaced = create_fork(again)
    assert replaced.record.config["update"]["learning_rate"] == 3e-3, "the fork had no own results"
    assert verify_run(str(forked_copy.store), "x") == []


def test_a_policy_that_is_kept_for_one_fork_can_be_shared_by_another(forked_copy):
    store = str(forked_copy.store)
    parent = open_run(store, "tiny")
    with parent.lock():
        retire_bundles(parent, [*policy_after(parent, 2).bundles.values()])
    for point, name in (("tiny@2", "second"), ("same@2", "third")):
        fork = create_fork(request(forked_copy, point, name))
        assert all(has_bundle(fork.store, ref) for ref in policy_after(fork, 2).bundles.values())
        assert verify_run(store, name) == []


def test_an_old_mark_of_a_fork_whose_name_was_used_again_keeps_nothing(forked_copy):
    create_fork(request(forked_copy, "same@3", "again", "iterations=4"))
    shutil.rmtree(forked_copy.store / "again")
    create_fork(request(forked_copy, "tiny@2", "again"))
    assert {*run_forks(open_run(str(forked_copy.store), "tiny"))} == {"same", "again"}
    assert not run_forks(open_run(str(forked_copy.store), "same"))


def test_a_shared_object_that_was_lost_is_damage_and_not_written_again(forked_copy):
    fork = open_run(str(forked_copy.store), "same")
    shard = fork.require("it-0001/rollout/0000").shards[0]
    (forked_copy.run / shard.key).unlink()
    with pytest.raises(Damaged, match="shares it"):
        fork.store.put(shard.key, b"content")
    assert verify_run(str(forked_copy.store), "same")


def test_a_policy_that_a_reader_of_a_fork_uses_is_kept_by_its_parent(forked_copy):
    fork, parent = (open_run(str(forked_copy.store), name) for name in ("same", "tiny"))
    weights = policy_after(fork, 2).bundles["weights"]
    with keep_while_read(fork.store, [weights]):
        assert weights.digest[:16] in bundles_in_use(parent.store)


def forget(store, *names, ids):
    return run_command("forget", *names, "--prompt-ids", str(ids), "--delete", "--store", str(store))


@pytest.fixture
def ids(forked, tmp_path):
    """File with the id of a prompt that the first shard of the tiny run contains."""
    run = open_run(str(forked.store), "tiny")
    rows = read_shard(run.store, run.require("prompts/train").shards[0], ["prompt_id"])["prompt_id"]
    used = read_shard(run.store, run.require("it-0001/rollout/0000").shards[0], ["prompt_row"])["prompt_row"]
    (tmp_path / "ids").write_text(rows[used[0].as_py()].as_py())
    return tmp_path / "ids"


def test_prompts_are_forgotten_in_a_fork_and_its_parent(forked_copy, ids):
    ended = forget(forked_copy.store, "tiny", ids=ids)
    assert ended.code == 0 and "run same: 1 of 1 prompt found" in ended.output
    run = open_run(str(forked_copy.store), "tiny")
    for name in ("same", "tiny"):
        assert verify_run(str(forked_copy.store), name) == []
    rows = read_shard(run.store, run.require("prompts/train").shards[0]).to_pylist()
    [forgotten] = [row for row in rows if row["prompt_id"] == ids.read_text()]
    assert not forgotten["text"]
    kept = {path.name for path in forked_copy.run.rglob("*.arrow")}
    assert run.require("prompts/train").shards[0].key.rpartition("/")[2] not in kept, "the shard with the text"
    with pytest.raises(BadInput, match="`rheostat forget` removed prompts"):
        request(forked_copy, "tiny@2")


@pytest.mark.thorough
def test_a_fork_of_a_copied_fork_forgets_prompts_before_the_copy(forked, ids, tmp_path):
    store = tmp_path / "copies"
    copy_run("same", str(forked.store), str(store))
    create_fork(request_fork(str(store), "same@3", "zz", overrides=["iterations=4", "report=false"]))
    ended = forget(store, "zz", ids=ids)
    assert ended.code == 0 and "run same: 1 of 1 prompt found" in ended.output, "the run whose shards are shared"
    assert [verify_run(str(store), name) for name in ("zz", "same")] == [[], []]


@pytest.mark.thorough
def test_a_fork_that_is_created_while_prompts_are_removed_keeps_its_shards_until_it_has_replaced_them(
    forked_copy, ids, monkeypatch
):
    late = request(forked_copy, "tiny@2", "late")
    remove = forgetting.remove_prompts

    def create_first(run, chosen, *, delete):
        if delete:
            monkeypatch.undo()
            create_fork(late)
        return remove(run, chosen, delete=delete)

    monkeypatch.setattr(forgetting, "remove_prompts", create_first)
    ended = forget(forked_copy.store, "tiny", ids=ids)
    assert ended.code == 2 and "was forked while prompts were removed" in ended.output
    assert verify_run(str(forked_copy.store), "late") == []
    assert forget(forked_copy.store, "tiny", ids=ids).code == 0
    assert [verify_run(str(forked_copy.store), name) for name in ("late", "same", "tiny")] == [[], [], []]


@pytest.mark.thorough
def test_what_an_interrupted_creation_has_left_does_not_prevent_that_prompts_are_forgotten(
    forked_copy, ids, monkeypatch
):
    planned = request(forked_copy, "tiny@2", "half")
    with monkeypatch.context() as patch:
        patch.setattr("rheostat.tasks.forks.creation.record_dependencies", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            create_fork(planned)
    assert forget(forked_copy.store, "tiny", ids=ids).code == 0
    with pytest.raises(BadInput, match="has changed meanwhile"):
        create_fork(planned)
    assert [verify_run(str(forked_copy.store), name) for name in ("same", "tiny")] == [[], []]


def test_a_fork_is_refused_if_its_parent_deletes_shared_objects_meanwhile(job):
    asked, parent = request(job, "tiny@2"), open_run(str(job.store), "tiny")
    weights = policy_after(parent, 2).bundles["weights"]
    with parent.lock():
        write_tombstone(parent, weights.digest[:16], Deleted(bundle=weights.key))
    with pytest.raises(BadInput, match="has changed meanwhile"):
        create_fork(asked)


def test_the_store_of_a_fork_reads_like_a_directory_that_contains_all_objects(forked, tmp_path):
    fork = run_store(str(forked.store), "same")
    copy_run("same", str(forked.store), str(tmp_path / "copies"))
    whole = open_store(str(tmp_path / "copies" / "same"))
    keys = [entry.key for entry in whole.entries("") if entry.key != "fork.json"]
    for key in keys:
        assert fork.read(key) == whole.read(key) == fork.find(key)
        assert fork.local_path(key).read_bytes() == whole.read(key)
    missing = ["manifests/it-0009/seal.json", "shards/00"]
    assert fork.exist([*keys, *missing]) == [True] * len(keys) + [False] * 2
    for folder in sorted({key.rpartition("/")[0] for key in keys} - {""}):
        assert fork.children(folder) == whole.children(folder)
        found = {(each.key, each.bytes) for each in fork.entries(f"{folder}/")}
        assert found == {(each.key, each.bytes) for each in whole.entries(f"{folder}/")}
    shared = next(key for key in keys if fork.is_shared(key))
    assert not fork.put(shared, b"other")
    fork.delete(shared)
    assert fork.read(shared) == whole.read(shared)
    with pytest.raises(Damaged):
        fork.read(missing[0])


@pytest.mark.parametrize(
    "changes",
    [
        ["algorithm.kind=rloo"],
        ["rollout.prompts=4", "rollout.group_size=6", "rollout.shard_prompts=1"],
        ["update.kl={kind = 'k3', coefficient = 0.1}", "update.minibatches=1", "update.schedule=linear"],
        ["algorithm.kl={coefficient = 0.1}"],
        ["rollout.sampling.temperature=0.7", "evaluation.problems=4", "evaluation.every=1"],
        ["update.state_every=2", "retention.rollouts_keep_last=1"],
        ["rollout.dynamic={}"],
    ],
)
def test_shared_iterations_are_verified_by_the_settings_with_which_they_were_computed(job, changes):
    create_fork(request(job, "tiny@2", "fork", "iterations=4", *changes))
    assert verify_run(str(job.store), "fork") == []
