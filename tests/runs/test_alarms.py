"""Runs that an alarm ends, or has return to an earlier policy; alarms here are raised by construction."""

import json

import pytest

from flows.cli.app import main
from infra.errors import AlarmStopped
from infra.store.runs import open_run
from models.records.versions import policy_of
from tasks.run.iteration import Iteration
from tasks.run.returns import policy_after
from tasks.verification.invariants import verify_run
from tests.support.chaos import Strike, problems_after, run_once
from tests.support.checker import problems_of
from tests.support.in_process import InProcessJob
from tests.support.jobs import manifests_of, shards_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

ALWAYS = "kind = 'metric', metric = 'credit/completions', bound = 0"
"""There are always completions, so only the window says when it is raised: from its own length on."""

RETURNING = (
    "iterations=5",
    f"alarms=[{{{ALWAYS}, name = 'always', window = 3, action = 'return', returns = 9}}]",
    "algorithm.kind=ppo",
    "algorithm.critic.warmup_iterations=1",
    "algorithm.kl={coefficient = 0.1, adaptive = {target = 1e-6}}",
    "update.state_every=2",
    "retention.keep_last=2",
)
"""Raised from iteration 3 on, where the last good version is 1, whose optimizers' states are not in the store."""


@pytest.fixture(scope="module")
def returned(tmp_path_factory, prefect_api):
    """A run that returns after iterations 3, 4 and 5, never disturbed."""
    home = tmp_path_factory.mktemp("returned")
    assert run_once(home, prefect_api, None, RETURNING) == 0, (home / "output").read_text()
    return home


def test_a_run_goes_on_from_the_last_good_policy_with_its_critic_and_its_coefficient(returned):
    run = open_run(str(returned / "store"), "tiny")
    good = run.require("it-0001/update")
    for number in (3, 4, 5):
        made = policy_after(run, number)
        assert made.key == f"it-000{number}/return" and made.bundles == good.bundles
        assert run.require(f"it-000{number}/update").bundles["weights"] != good.bundles["weights"]
        assert run.require(f"it-000{number}/seal").detail["policy"] == policy_of(good).digest
    assert [run.require(f"it-000{number}/return").detail["to"] for number in (3, 4, 5)] == [1, 3, 4]
    assert run.find("it-0002/return") is None
    fourth = Iteration(run, 4)
    assert fourth.behaviour == "it-0003/return" == run.require("it-0004/plan").detail["policy"]
    assert fourth.update.parents[0] == run.require("it-0003/return").digest
    coefficients = [run.require(f"it-000{number}/credit").metrics["kl_coefficient"] for number in (1, 2, 3, 4, 5)]
    assert coefficients[0] != coefficients[1] == coefficients[3] == coefficients[4] != coefficients[2]

    assert run.require("eval-0005/plan").detail["policy"] == "it-0005/return"


def test_what_a_return_needs_is_kept_and_everything_verifies(returned):
    run = returned / "store/tiny"
    assert problems_of(run) == [] and verify_run(str(returned / "store"), "tiny") == []
    weights = {
        number: json.loads((run / f"manifests/it-000{number}/update.json").read_text())["bundles"]["weights"]
        for number in (1, 2, 3)
    }
    there = {number: (run / bundle["key"] / "model.safetensors").exists() for number, bundle in weights.items()}
    assert there == {1: True, 2: False, 3: False}, "version 1 lives on as version 5, the others are too old"


def test_a_run_that_is_killed_around_a_return_ends_with_the_same_bits(returned, tmp_path, prefect_api):
    strikes = [
        Strike("manifests/it-0003/update.json", "after"),
        Strike("manifests/it-0003/return.json", "before"),
        Strike("manifests/it-0004/plan.json", "before"),
        Strike("manifests/it-0004/update.json", "after"),
        Strike("manifests/it-0004/return.json", "after"),
    ]
    assert (
        problems_after(strikes, tmp_path / "killed", prefect_api, returned / "store/tiny", RETURNING, start=run_once)
        == []
    )


def test_a_run_that_returned_more_often_than_it_may_ends_and_goes_on_when_it_may_more_often(
    returned, tmp_path, prefect_api
):
    fewer = [each.replace("returns = 9", "returns = 1") for each in RETURNING]
    home = tmp_path / "few"
    home.mkdir()
    assert run_once(home, prefect_api, None, fewer) == 1
    assert "alarm 'always' had it return 2 times" in (home / "output").read_text()
    assert not [key for key in manifests_of(home / "store/tiny") if key.startswith("it-0005")]
    assert problems_after([], home, prefect_api, returned / "store/tiny", RETURNING, start=run_once) == []


def test_a_run_ends_after_the_alarm_and_goes_on_to_the_undisturbed_run_when_the_alarm_is_changed(
    reference, tmp_path, prefect_api, capsys
):
    job, stop = InProcessJob(tmp_path, prefect_api, counts_works=True), f"alarms=[{{{ALWAYS}, action = 'stop'}}]"
    with pytest.raises(
        AlarmStopped, match=r"'tiny': after iteration 1 of 3, alarm 'credit/completions': .* is 24, above"
    ):
        job.train(stop)
    assert "it-0001/seal" in manifests_of(job.run)
    assert not [key for key in manifests_of(job.run) if key.startswith("it-0002")], "nothing of the next was begun"
    before = job.works()
    with job.prefect():
        given = ["train", str(tmp_path / "tiny.toml"), "pools.cluster=threads", stop, "--store", str(job.store)]
        assert main(given) == 4
    assert "above 0; the same command with another bound" in capsys.readouterr().err
    assert job.works() == before, "an alarm that stands has no worker do anything"
    assert "alarm 'credit/completions': credit/completions is 24, above 0; the run ends" in job.command("show").output
    job.train(stop.replace("bound = 0", "bound = 24"))
    assert manifests_of(job.run) == manifests_of(reference.run)
    assert shards_of(job.run) == shards_of(reference.run)
