"""Runs that an alarm stops or reverts to an earlier policy."""

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.errors import AlarmStopped
from rheostat.models.records.versions import policy_of
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.verification.invariants import verify_run
from tests.support.checker import problems_of
from tests.support.in_process import InProcessJob
from tests.support.jobs import bundles_of, manifests_of
from tests.support.stored_runs import open_tiny
from tests.support.whole_runs import check_same_run, read_families

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

ALWAYS = "kind = 'metric', metric = 'credit/completions', bound = 0"
"""An alarm that is always raised once its window is full, because every iteration has completions."""


@pytest.fixture
def reverted(undisturbed):
    """Run that reverts to an earlier policy after iterations 3, 4 and 5."""
    return undisturbed("reverts")


def test_a_revert_continues_from_the_last_good_policy_with_its_critic_and_its_kl_coefficient(reverted):
    run = open_tiny(reverted)
    good = run.require("it-0001/update")
    for number in (3, 4, 5):
        made = policy_after(run, number)
        assert made.key == f"it-000{number}/return" and made.bundles == good.bundles
        assert run.require(f"it-000{number}/update").bundles["weights"] != good.bundles["weights"]
        assert run.require(f"it-000{number}/seal").detail["policy"] == policy_of(good).digest
    assert [run.require(f"it-000{number}/return").detail["to"] for number in (3, 4, 5)] == [1, 3, 4]
    assert run.find("it-0002/return") is None
    fourth = Iteration(run, 4)
    assert fourth.generating_policy_key == "it-0003/return" == run.require("it-0004/plan").detail["policy"]
    assert fourth.update.parents[0] == run.require("it-0003/return").digest
    coefficients = [run.require(f"it-000{number}/credit").metrics["kl_coefficient"] for number in (1, 2, 3, 4, 5)]
    assert coefficients[0] != coefficients[1] == coefficients[3] == coefficients[4] != coefficients[2]

    assert run.require("eval-0005/plan").detail["policy"] == "it-0005/return"


def test_retention_keeps_the_policy_that_was_reverted_to(reverted):
    assert problems_of(reverted.run) == [] and verify_run(str(reverted.store), "tiny") == []
    weights = [bundles_of(reverted.run, f"it-000{number}/update")["weights"] for number in (1, 2, 3)]
    assert [(each / "model.safetensors").exists() for each in weights] == [True, False, False], (
        "version 1 is also version 5"
    )


def test_too_many_reverts_end_the_run_until_more_are_allowed(reverted, tmp_path, together, prefect_api):
    settings = read_families()["reverts"].settings(together)
    job = InProcessJob(tmp_path, prefect_api)
    with pytest.raises(AlarmStopped, match="alarm 'always' reverted the run to an earlier policy 2 times"):
        job.train(*(each.replace("max_reverts = 9", "max_reverts = 1") for each in settings))
    assert not [key for key in manifests_of(job.run) if key.startswith("it-0005")]
    job.train(*settings)
    check_same_run(job.run, reverted.run)


def test_an_alarm_stops_the_run_and_a_higher_bound_lets_it_continue(reference, tmp_path, prefect_api, capsys):
    job, stop = InProcessJob(tmp_path, prefect_api, counts_works=True), f"alarms=[{{{ALWAYS}, action = 'stop'}}]"
    with pytest.raises(
        AlarmStopped,
        match=r"'tiny' was stopped by an alarm after iteration 1 of 3: alarm 'credit/completions': .* is 24, above",
    ):
        job.train(stop)
    assert "it-0001/seal" in manifests_of(job.run)
    assert not [key for key in manifests_of(job.run) if key.startswith("it-0002")], "nothing of the next was begun"
    before = job.works()
    with job.prefect():
        given = ["train", str(tmp_path / "tiny.toml"), "pools.cluster=threads", stop, "--store", str(job.store)]
        assert main(given) == 4
    assert "above 0. To continue, change the bound of the alarm" in capsys.readouterr().err
    assert job.works() == before, "an alarm that stands has no worker do anything"
    assert "alarm 'credit/completions': credit/completions is 24, above 0; the run stops" in job.command("show").output
    job.train(stop.replace("bound = 0", "bound = 24"))
    check_same_run(job.run, reference.run)
