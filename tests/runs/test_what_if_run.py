"""Training of other policies on the stored rollouts of a run."""

import pytest

from rheostat.flows.cli.train import run_flow
from rheostat.flows.cli.what_if import DEFAULT_OPTIONS
from rheostat.infra.errors import BadInput
from rheostat.infra.store.runs import list_runs, open_run
from rheostat.tasks.config.run import parse_config
from rheostat.tasks.forks.answer import BOUND
from rheostat.tasks.forks.creation import create_fork, request_fork
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.verification.invariants import verify_run
from rheostat.tasks.views.metrics import sealed_iterations
from tests.support.in_process import InProcessJob, copy_job, run_command

pytestmark = pytest.mark.timeout(1200)

OURS = ("pools.cluster=threads", "report=false")
FASTER = "update.learning_rate=3e-2"
LENGTH = "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:length', options = {scale = 0.01}}]"


@pytest.fixture(scope="module")
def replayed(reference, tmp_path_factory) -> InProcessJob:
    """Tiny run with two what-if runs: `same` has the settings of its parent, `faster` a high learning rate."""
    job = copy_job(reference, tmp_path_factory.mktemp("what_if") / "job")
    answer(job, "tiny@0", "same")
    answer(job, "tiny@0", "faster", FASTER, bound=1e-6)
    return job


@pytest.fixture
def job(reference, tmp_path) -> InProcessJob:
    return copy_job(reference, tmp_path / "job")


def answer(job, point, name, *overrides, bound=0.5, continues=False):
    with job.prefect():
        from rheostat.flows.what_if import what_if

        return run_flow(
            what_if(point, name, [*overrides, *OURS], store=str(job.store), bound=bound, continues=continues)
        )


def request(job, point, *overrides):
    return request_fork(str(job.store), point, "what", overrides=[*overrides, *OURS], is_what_if=True)


def opened(job, name):
    return open_run(str(job.store), name)


def digests_of(run, number):
    return {name: bundle.digest for name, bundle in policy_after(run, number).bundles.items()}


def test_without_changes_the_samples_keep_their_weight_and_nothing_is_generated_or_scored(replayed):
    run, parent = opened(replayed, "same"), opened(replayed, "tiny")
    for number in (1, 2, 3):
        ours, theirs = Iteration(run, number), Iteration(parent, number)
        assert ours.metrics["update/effective_sample_size"] == pytest.approx(1)
        assert ours.credit.shards == theirs.credit.shards
        assert all(map(run.inherits, (f"{ours.key}/{stage}/0000" for stage in ("rollout", "scoring"))))
        sealed = run.require(f"{ours.key}/seal").provenance
        assert sealed.costs["rollout"].written_tokens == 0 < sealed.costs["update"].learnt_tokens
        assert sealed.seconds["rollout"] == sealed.seconds["scoring"] == 0 < sealed.seconds["update"]
    assert not [*(replayed.store / "same").glob("manifests/it-*/rollout")]
    assert verify_run(str(replayed.store), "same") == []


def test_other_settings_train_another_policy_and_every_token_is_compared_with_its_generator(replayed):
    run, parent = opened(replayed, "faster"), opened(replayed, "tiny")
    assert digests_of(run, 3) != digests_of(parent, 3)
    first, *later = (Iteration(run, number).update.metrics for number in (1, 2, 3))
    assert first["effective_sample_size"] == pytest.approx(1)
    for metrics in later:
        assert 0 < metrics["effective_sample_size"] < 0.999
        assert metrics["mismatch_tokens"] == 0, "a mismatch can be measured only for the same weights"
        assert metrics["behavior_kl"] > 1e-4
    assert verify_run(str(replayed.store), "faster") == []


def test_the_answer_names_the_last_trusted_iteration_and_compares_the_policies_there(replayed):
    from rheostat.tasks.forks.answer import read_answer

    store = str(replayed.store)
    trusted = read_answer(store, "same", bound=0.5, last=3)
    assert (trusted.last_trusted, trusted.compared_iteration) == (3, 3)
    assert trusted.parent_accuracy.mean == trusted.what_if_accuracy.mean
    sizes = [each.effective_sample_size for each in read_answer(store, "faster", bound=0.5, last=3).iterations]
    between = (sizes[1] + 1) / 2
    doubted = read_answer(store, "faster", bound=between, last=3)
    assert (doubted.last_trusted, doubted.compared_iteration) == (1, None)
    assert "holds up to iteration 1 of 3" in doubted.text() and "evaluation.every" in doubted.text()


@pytest.mark.thorough
def test_a_run_that_stops_early_continues_to_the_bits_of_the_undisturbed_one(job, replayed):
    stopped = answer(job, "tiny@0", "faster", FASTER, bound=0.9999)
    run = opened(job, "faster")
    assert stopped.last_trusted == 1 and len(sealed_iterations(run)) == 2
    assert answer(job, "tiny@0", "faster", FASTER, bound=0.9999) == stopped
    assert len(sealed_iterations(opened(job, "faster"))) == 2
    answer(job, "tiny@0", "faster", FASTER, bound=1e-6)
    assert digests_of(opened(job, "faster"), 3) == digests_of(opened(replayed, "faster"), 3)


@pytest.mark.thorough
def test_other_rewards_score_the_stored_completions_again_and_a_fork_continues_the_training(job):
    changed = answer(job, "tiny@0", "plain", LENGTH, FASTER, bound=0.9999, continues=True)
    run, fork = opened(job, "plain"), opened(job, "plain-continued")
    assert run.inherits("it-0001/rollout/0000") and not run.inherits("it-0001/scoring/0000")
    assert fork.fork.point == f"plain@{changed.last_trusted}" and fork.fork.replayed == (1,)
    assert fork.inherits("it-0001/rollout/0000") and not fork.inherits("it-0002/rollout/0000")
    assert len(sealed_iterations(fork)) == 3
    assert [verify_run(str(job.store), name) for name in ("plain", "plain-continued", "tiny")] == [[], [], []]


def test_objects_that_a_what_if_run_uses_are_kept_by_its_parent(replayed, tmp_path):
    from rheostat.tasks.commit import _retire_shards

    job = copy_job(replayed, tmp_path / "job")
    parent = opened(job, "tiny")
    with parent.lock():
        for number in (1, 2, 3):
            _retire_shards(parent, number)
    assert verify_run(str(job.store), "same") == []
    with pytest.raises(BadInput, match="rollouts of iteration 3 were deleted, so it can begin at tiny@3 or"):
        request(job, "tiny@0")
    existing = request_fork(str(job.store), "tiny@0", "same", overrides=OURS, is_what_if=True)
    assert existing.plan.exists and existing.fork.replayed == (1, 2, 3)


def test_a_fork_and_a_what_if_run_with_equal_settings_are_not_taken_for_each_other(replayed):
    store = str(replayed.store)
    with pytest.raises(BadInput, match=r"'same' already exists .* not a fork of tiny@0"):
        request_fork(store, "tiny@0", "same", overrides=[*OURS, "iterations=4"])
    create_fork(request_fork(store, "tiny@0", "plain", overrides=OURS))
    with pytest.raises(BadInput, match=r"'plain' already exists .* not a what-if run of tiny@0"):
        request_fork(store, "tiny@0", "plain", overrides=OURS, is_what_if=True)


@pytest.mark.thorough
def test_scores_of_a_fork_that_were_computed_with_earlier_rewards_are_computed_again(job):
    with job.prefect():
        from rheostat.flows.fork import fork

        run_flow(fork("tiny@2", "longer", [LENGTH, *OURS], store=str(job.store)))
    planned = [
        request_fork(str(job.store), f"longer@{number}", "what", overrides=OURS, is_what_if=True) for number in (0, 2)
    ]
    assert ["scoring" in each.sharing.stages for each in planned] == [False, True]


@pytest.mark.thorough
def test_a_run_that_an_alarm_reverted_can_be_replayed_without_the_alarm(job):
    alarm = "alarms=[{kind = 'metric', metric = 'update/entropy', bound = 0.0, action = 'revert'}]"
    with job.prefect():
        from rheostat.flows.fork import fork

        run_flow(fork("tiny@0", "reverting", [alarm, "iterations=2", *OURS], store=str(job.store)))
    assert opened(job, "reverting").has("it-0001/return")
    answer(job, "reverting@0", "what", "alarms=[]", bound=1e-6)
    assert verify_run(str(job.store), "what") == []


@pytest.mark.parametrize(
    ("point", "overrides", "message"),
    [
        ("tiny@3", [], "no completed iteration after iteration 3, so there are no rollouts.* such as tiny@0"),
        ("tiny@0", ["rollout.group_size=8"], "rollout.group_size cannot change, because the stored rollouts"),
        ("tiny@0", ["rollout.sampling.temperature=0.5"], "rollout.sampling.temperature cannot change, because"),
        ("tiny@0", ["rollout.staleness=1"], "rollout.staleness cannot change, because"),
        ("tiny@0", ["data.options.train_problems=65"], "data.options.train_problems cannot change, because"),
        ("tiny@0", ["update.correction.kind=none"], "update.correction cannot be 'none', because .* 'truncated' or"),
        ("tiny@1", [], "policy 1 is not stored"),
        ("tiny@0", ["algorithm.kl={coefficient = 0.1}"], "algorithm.kl is computed from the log-probs of the policies"),
    ],
)
def test_a_what_if_run_that_cannot_use_the_stored_rollouts_is_refused_by_name(job, point, overrides, message):
    with pytest.raises(BadInput, match=message):
        request(job, point, *overrides)
    assert list_runs(str(job.store)) == ["tiny"]


def test_a_run_without_importance_correction_is_replayed_with_one(job):
    with job.prefect():
        from rheostat.flows.fork import fork

        overrides = ["update.correction.kind=none", *OURS]
        run_flow(fork("tiny@2", "plain", overrides, store=str(job.store)))
    planned = request_fork(str(job.store), "plain@2", "what", overrides=[*OURS], is_what_if=True)
    assert planned.config.update.correction.kind == "truncated"
    assert 'update.correction.kind was "none", is "truncated"' in planned.plan.changes
    assert create_fork(planned).fork.replayed == (3,)


def test_a_loss_that_corrects_by_itself_is_replayed_without_a_correction(job):
    overrides = ["update.loss.kind=vespo", "update.correction.kind=none", *OURS]
    planned = request_fork(str(job.store), "tiny@2", "sequences", overrides=overrides, is_what_if=True)
    assert planned.config.update.correction.kind == "none"
    recorded = parse_config(planned.config.identity(), source="run", recorded=True)
    assert recorded.update.loss.kind == "vespo"


def test_the_command_shows_the_plan_before_it_writes(job):
    assert DEFAULT_OPTIONS.bound == BOUND
    shown = run_command("what-if", "tiny", "what", FASTER, "--store", str(job.store), "--dry-run")
    assert shown.code == 0 and "3 iterations on stored rollouts" in shown.output
    refused = run_command("what-if", "tiny", "what", "--bound", "2", "--store", str(job.store))
    assert refused.code == 2 and "--bound must be above 0 and at most 1, found 2" in refused.output
    assert list_runs(str(job.store)) == ["tiny"]
