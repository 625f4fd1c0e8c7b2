"""Unlearning: a run is trained again from before the first use of some prompts, without them."""

import operator

import pytest

from rheostat.flows.cli.train import run_flow
from rheostat.infra.errors import BadInput
from rheostat.infra.store.runs import list_runs, open_run
from rheostat.infra.store.shards import read_shard
from rheostat.tasks.commit import retire_bundles
from rheostat.tasks.forks.creation import create_fork, request_fork
from rheostat.tasks.forks.unlearning import read_unlearned, request_unlearning
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.verification.invariants import verify_run
from tests.support.in_process import InProcessJob, copy_job, run_command

pytestmark = pytest.mark.timeout(1200)

OURS = ("pools.cluster=threads", "report=false")


@pytest.fixture(scope="module")
def parent(reference, tmp_path_factory) -> InProcessJob:
    """Job with the run `parent` of 4 iterations, which has no warm-up and keeps every policy."""
    job = copy_job(reference, tmp_path_factory.mktemp("unlearned") / "job")
    job.train("name=parent", "warmup=", "iterations=4", "retention.keep_every=1", *OURS)
    return job


@pytest.fixture
def job(parent, tmp_path) -> InProcessJob:
    return copy_job(parent, tmp_path / "job")


def opened(job, name):
    return open_run(str(job.store), name)


def prompt_of(run, iteration):
    """Return the id and the row of the first prompt that an iteration uses."""
    row = Iteration(run, iteration).batches[0].plan.rows[0]
    names = read_shard(run.store, run.require("prompts/train").shards[0], ["prompt_id"])["prompt_id"]
    return names[row].as_py(), row


def used_rows(run):
    return [row for number in range(1, 5) for batch in Iteration(run, number).batches for row in batch.plan.rows]


def unlearn(job, name, ids, *, parent="parent", forget=False):
    with job.prefect():
        from rheostat.flows.unlearn import unlearn

        return run_flow(unlearn(parent, name, sorted(ids), list(OURS), store=str(job.store), forget=forget))


def test_a_run_is_trained_again_without_the_prompts_and_shares_what_does_not_depend_on_them(job):
    parent = opened(job, "parent")
    name, row = prompt_of(parent, 3)
    unlearned = unlearn(job, "clean", {name})
    run = opened(job, "clean")
    assert (unlearned.after, unlearned.excluded_rows, unlearned.tombstones) == (2, [row], None)
    used = used_rows(run)
    assert row not in used and len(used) == 4 * 6
    assert all(unlearned.reused[key] == parent.require(key).digest for key in ("it-0002/seal", "it-0001/rollout/0000"))
    later = {key for key in unlearned.reused if key.startswith(("it-0003", "it-0004"))}
    assert later == {f"it-0003/{stage}/{shard}" for stage in ("rollout", "scoring") for shard in ("0001", "0002")}
    assert all(unlearned.reused[key] == parent.require(key).digest for key in later)
    ours, theirs = (Iteration(each, 3).batches[0].plan.rows for each in (run, parent))
    assert [*map(operator.ne, ours, theirs)] == [True, *[False] * 5], "another prompt took the place"
    assert Iteration(run, 4).batches[0].plan.rows == Iteration(parent, 4).batches[0].plan.rows
    assert policy_after(run, 4).bundles != policy_after(parent, 4).bundles
    assert verify_run(str(job.store), "clean") == []
    again = {"parent": "parent", "ids": frozenset([name])}
    assert read_unlearned(str(job.store), "clean", **again, overrides=OURS) == unlearned
    with pytest.raises(BadInput, match="already trained with other settings: iterations was 4, is 6"):
        read_unlearned(str(job.store), "clean", **again, overrides=["iterations=6"])
    with pytest.raises(BadInput, match="it unlearned other prompts or another run"):
        read_unlearned(str(job.store), "clean", parent="parent", ids=frozenset(["0" * 16]))
    later = create_fork(request_fork(str(job.store), "clean@3", "later", overrides=["iterations=5", *OURS]))
    assert later.excluded_rows(5) == {row} and not later.excluded_rows(2)


@pytest.mark.thorough
def test_an_interrupted_unlearning_gives_the_results_of_a_fork_that_shares_no_rollouts(job, monkeypatch):
    name, _ = prompt_of(opened(job, "parent"), 3)

    def fail(*arguments):
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr("rheostat.flows.iteration.seal_iteration", fail)
        with pytest.raises((RuntimeError, ExceptionGroup)):
            unlearn(job, "clean", {name})
    unlearn(job, "clean", {name})
    with monkeypatch.context() as patch:
        patch.setattr("rheostat.tasks.forks.creation.find_unaffected_shards", lambda *_: frozenset())
        alone = unlearn(job, "alone", {name})
    assert not [key for key in alone.reused if key.startswith("it-0003")]
    runs = opened(job, "clean"), opened(job, "alone")
    assert [run.require("it-0003/plan").digest for run in runs] == [runs[0].require("it-0003/plan").digest] * 2
    for key in ("it-0003/rollout/0000", "it-0003/rollout/0001", "it-0003/scoring/0002", "it-0004/credit"):
        assert operator.eq(*(read_shard(run.store, run.require(key).shards[0]) for run in runs))
    assert operator.eq(*(policy_after(run, 4).bundles for run in runs))


@pytest.mark.thorough
def test_with_staleness_several_iterations_share_rollouts(job):
    retention = ("retention.keep_every=1", "retention.keep_last=3")
    job.train("name=stale", "warmup=", "iterations=4", "rollout.staleness=1", *retention, *OURS)
    stale = opened(job, "stale")
    name, row = prompt_of(stale, 2)
    planned = request_unlearning(str(job.store), "stale", "clean", frozenset([name]), overrides=OURS)
    assert planned.fork.plan.reused_shards == 2 + 3, "policies 0 and 1 generate the iterations 2 and 3"
    unlearned = unlearn(job, "clean", {name}, parent="stale")
    run = opened(job, "clean")
    assert "it-0003/rollout/0002" in unlearned.reused and "it-0004/rollout/0002" not in unlearned.reused
    assert row not in {
        row for number in range(1, 5) for batch in Iteration(run, number).batches for row in batch.plan.rows
    }
    assert verify_run(str(job.store), "clean") == []
    assert policy_after(run, 4).bundles != policy_after(stale, 4).bundles


@pytest.mark.thorough
def test_the_prompts_can_be_removed_afterwards_and_the_record_names_the_tombstones(job):
    name, _ = prompt_of(opened(job, "parent"), 4)
    removed = unlearn(job, "clean", {name}, forget=True)
    assert {*removed.tombstones} == {"clean", "parent"} and all(removed.tombstones.values())
    for run in (opened(job, each) for each in ("clean", "parent")):
        for key, digest in removed.tombstones[run.name].items():
            assert run.require(key).digest == digest
    texts = read_shard(run.store, run.require("prompts/train").shards[0]).to_pylist()
    assert [not each["text"] for each in texts if each["prompt_id"] == name] == [True]
    assert [verify_run(str(job.store), each) for each in ("clean", "parent")] == [[], []]
    assert unlearn(job, "clean", {name}, forget=True) == removed, "a repetition changes nothing"


def test_the_command_states_the_price_before_it_writes(job, tmp_path):
    name, _ = prompt_of(opened(job, "parent"), 2)
    (tmp_path / "ids").write_text(f"{name}\n")
    words = ("unlearn", "parent", "clean", "--prompt-ids", str(tmp_path / "ids"), "--store", str(job.store))
    shown = run_command(*words, *OURS, "--dry-run")
    assert shown.code == 0 and "learned  run parent: iteration 2" in shown.output
    assert "from iteration 1 of parent" in shown.output and "3 iterations" in shown.output
    assert "reuses   2 rollout shards without the excluded prompts, after iteration 1" in shown.output
    assert list_runs(str(job.store)) == ["parent", "tiny"]


def test_what_a_fork_cannot_unlearn_is_refused(job):
    store, run = str(job.store), opened(job, "parent")
    with pytest.raises(BadInput, match=r"No completed iteration of run .* used these prompts"):
        request_unlearning(store, "parent", "clean", frozenset(["0123456789abcdef"]))
    name, _ = prompt_of(opened(job, "tiny"), 1)
    with pytest.raises(BadInput, match="the warm-up may have used examples of the same problems"):
        request_unlearning(store, "tiny", "clean", frozenset([name]))
    name, _ = prompt_of(run, 3)
    create_fork(request_fork(store, "parent@2", "clean", overrides=OURS))
    with pytest.raises(BadInput, match="'clean' already exists, and it excludes other prompts"):
        request_unlearning(store, "parent", "clean", frozenset([name]), overrides=OURS)
    names = read_shard(run.store, run.require("prompts/train").shards[0], ["prompt_id"])["prompt_id"].to_pylist()
    with pytest.raises(BadInput, match=r"rollout.prompts is 6, but without these prompts .* allows only 5"):
        request_unlearning(store, "parent", "few", frozenset(names[5:]), overrides=OURS)


def test_the_search_continues_at_older_iterations_and_an_existing_fork_is_found_again(job, monkeypatch):
    store, (name, _) = str(job.store), prompt_of(opened(job, "parent"), 4)
    settings = [*OURS, "rollout.staleness=1", "retention.keep_last=3"]
    run = opened(job, "parent")
    with run.lock():
        retire_bundles(run, [*policy_after(run, 2).bundles.values()])
    planned = request_unlearning(store, "parent", "clean", frozenset([name]), overrides=settings)
    assert planned.fork.fork.iteration == 1, "iteration 3 needs the policies 2 and 3"
    create_fork(planned.fork)
    again = request_unlearning(store, "parent", "clean", frozenset([name]), overrides=settings)
    assert again.plan.fork.exists and again.fork.fork == planned.fork.fork
