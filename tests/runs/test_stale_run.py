"""Iterations that overlap: the next rollouts are generated, by an older policy, while the policy learns."""

import pytest

from infra.errors import BadInput
from infra.store.runs import open_run
from models.workers.update import UpdateWorker
from tasks.config.run import override_config
from tasks.run.iteration import Iteration
from tasks.verification.invariants import verify_run
from tests.support.in_process import InProcessJob
from tests.support.jobs import manifests_of, shards_of, wait_for

STALE = ("rollout.staleness=1", "retention.keep_last=3", "evaluation.problems=4", "evaluation.every=2")


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory, prefect_api):
    """A run whose updates begin when rollouts of the next iteration are there: they must go on meanwhile."""
    home, update = tmp_path_factory.mktemp("overlapped"), UpdateWorker.update

    def late(worker, work):
        following = f"it-{work.iteration + 1:04d}"
        if work.iteration < 3:
            assert wait_for((home / f"store/tiny/manifests/{following}/rollout/0000.json").exists, seconds=120)
            (home / "waited").open("a").write(f"{following}\n")
        return update(worker, work)

    job = InProcessJob(home, prefect_api)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateWorker, "update", late)
        job.train(*STALE, "pools.update_apart=true")
    return job


def waited_for(job):
    return (job.home / "waited").read_text().split()


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory, prefect_api):
    """The same run with one thing after another."""
    job = InProcessJob(tmp_path_factory.mktemp("in-turns"), prefect_api)
    job.train(*STALE)
    return job


@pytest.mark.system
def test_overlap_changes_no_bit(overlapped, in_turns):
    assert manifests_of(overlapped.run) == manifests_of(in_turns.run)
    assert shards_of(overlapped.run) == shards_of(in_turns.run)


@pytest.mark.system
def test_rollouts_are_generated_during_the_update_where_it_has_machines_of_its_own(overlapped):
    assert waited_for(overlapped) == ["it-0002", "it-0003"], "each update began when there were rollouts of the next"


@pytest.mark.system
def test_an_iteration_is_generated_by_the_version_that_its_number_says_and_learns_from_the_newest(overlapped):
    run = open_run(str(overlapped.store), "tiny")
    iterations = [Iteration(run, number) for number in (1, 2, 3)]
    assert [iteration.batches[0].plan.policy for iteration in iterations] == [
        "policy/initial",
        "policy/initial",
        "it-0001/update",
    ]
    assert [iteration.policy.key for iteration in iterations] == ["policy/initial", "it-0001/update", "it-0002/update"]
    assert [iteration.update.metrics["stale_fraction"] for iteration in iterations] == [0, 1, 1]


@pytest.mark.system
def test_no_prompt_is_left_out_or_comes_twice_and_every_digest_holds(overlapped):
    assert verify_run(str(overlapped.store), "tiny") == []
    run = open_run(str(overlapped.store), "tiny")
    rows = [row for number in (1, 2, 3) for row in Iteration(run, number).batches[0].plan.rows]
    assert len(rows) == len(set(rows)) == 18


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.staleness=1"], "retention.keep_last 2: rollout.staleness 1 needs at least 3 versions"),
        (["rollout.staleness=1", "rollout.dynamic={}"], "rollout.staleness 1 with rollout.dynamic"),
        (["rollout.staleness=1", "rollout.partial={tokens=4}"], "rollout.staleness 1 with rollout.partial"),
        (["rollout.staleness=1", "update.correction.kind=none"], "tokens of an older policy need a correction"),
        (["rollout.staleness=2", "update.max_staleness=1", "retention.keep_last=4"], "would drop every token"),
        (["update.max_staleness=1"], "no token is ever stale without rollout.staleness, rollout.partial or"),
    ],
)
def test_what_does_not_go_with_staleness_is_refused(overrides, told):
    kept = [] if "keep_last 2" in told or "retention.keep_last=4" in overrides else ["retention.keep_last=3"]
    with pytest.raises(BadInput, match=told):
        override_config({}, [*overrides, *kept], source="tiny")
