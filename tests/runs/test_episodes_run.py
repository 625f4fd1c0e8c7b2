"""Whole runs of episodes: with the reward of the environment, and with a simulated user that the run trains."""

import json
import re

import pytest

from rheostat.infra.errors import RheostatError
from rheostat.models.records.seeds import derive_seed
from tests.support.in_process import InProcessJob
from tests.support.jobs import manifest_of
from tests.support.stored_runs import open_tiny, rows_of, tables_of
from tests.support.whole_runs import read_families

pytestmark = pytest.mark.timeout(600)
PAYS = 'rollout.environment.options={what="pays"}'


@pytest.fixture
def settings(together):
    return read_families()["episodes"].settings(together)


@pytest.mark.system
def test_commands_report_the_turns_and_endings_of_episodes(undisturbed):
    job = undisturbed("episodes")
    run = open_tiny(job)
    assert any(len(row["turns"]) == 3 for row in rows_of(job, "it-0002/rollout/0000"))
    shown = json.loads(job.command("rollouts", "--json").output)
    assert any(len(each["turns"]) > 1 for each in shown)
    credit = next(each for each in run.manifests("it-0002") if each.key.endswith("/credit"))
    assert 1 < credit.metrics["turns_mean"] <= 3
    found = [row for table in tables_of(run, "it-0002", "rollout") for row in table.to_pylist()]
    [_, told] = json.loads(job.command("show", "--json").output)["iterations"]
    assert told["episodes"]["turns"] == sum(len(row["turns"]) for row in found) / len(found)
    assert told["episodes"]["calls"] == 0
    assert told["episodes"]["endings"] == {
        ending: sum(row["finish_reason"] == ending for row in found) / len(found)
        for ending in ("stop", "turns", "length", "failed")
    }
    assert told["episodes"]["answer_seconds"] > 0
    assert told["episodes"]["environment_seconds"] > 0
    lines = job.command("show").output.splitlines()
    at = lines.index("episodes:")
    assert lines[at + 1].split() == [
        "iteration",
        "turns",
        "calls",
        "unparsed",
        "calls",
        "ended",
        "by",
        "environment",
        "s",
        "idle",
        "s",
    ]
    assert len(lines[at + 2 :]) >= 2
    assert "turn 2: " in job.command("rollouts").output
    checked = job.command("verify", "--environment")
    assert checked.code == 0, checked.output
    assert checked.output.splitlines()[1:] == ["16 episodes were replayed: new environments responded as stored"]


@pytest.mark.system
def test_verify_names_episodes_that_a_new_environment_answers_differently(settings, tmp_path, prefect_api):
    job = InProcessJob(tmp_path / "job", prefect_api)
    job.train(*settings, "iterations=1", "rollout.environment.target=tests.support.games:Rolls", PAYS)
    assert job.command("verify").code == 0
    found = job.command("verify", "--environment", "--episodes", "5")
    shards = {shard.key for each in open_tiny(job).manifests("it-0001") for shard in each.shards}
    assert found.code == 1
    line = r"(shards/\S+): row (\d+), turn \d: expected .*reward [\d.]+.*, found .*reward [\d.]+.*"
    named = [re.fullmatch(line, each) for each in found.output.splitlines()[1:]]
    assert all(named), found.output
    assert {each[1] for each in named if each} <= shards
    assert 1 < len({each.groups() for each in named if each}) <= 5
    told = json.loads(job.command("verify", "--environment", "--episodes", "5", "--json").output)
    assert (told["ok"], told["problems"], told["environment"]["episodes"]) == (False, [], 5)
    assert len(told["environment"]["differences"]) == len(named)


HOSTILE = (
    "rollout.environment.target=tests.support.games:Hostile",
    "rollout.environment.options=",
    "rollout.environment.step_seconds=2",
    "rollout.environment.processes=2",
    "rollout.group_size=8",
    "evaluation.problems=1",
    "iterations=1",
)
REASONS = (  # by what is left of the seed
    "the environment did not respond within 2 s (rollout.environment.step_seconds)",
    "its process was killed by SIGSEGV",
    "OSError: the backend is down",
    "NoStep: the environment must return a text, None, or an object with messages, done or reward, but it returned int",
    "NoStep: each message must have a text as its content, but the environment returned 5",
    "its process wrote something other than a valid response",
    "NoStep: the reward must be a finite number, but the environment returned 'much'",
)


@pytest.mark.system
def test_a_failing_environment_loses_only_its_episodes_until_too_many_are_missing(
    settings, tmp_path, prefect_api, caplog
):
    job = InProcessJob(tmp_path / "job", prefect_api)
    job.train(*settings, *HOSTILE, "scoring.max_missing=1.0")
    rows, scores = (
        [row for table in tables_of(open_tiny(job), "it-0001", stage) for row in table.to_pylist()]
        for stage in ("rollout", "scoring")
    )
    reasons = set()
    for row, score in zip(rows, scores, strict=True):
        assert (row["prompt_row"], row["sample"]) == (score["prompt_row"], score["sample"])
        misdeed = derive_seed(row["seed"], "environment") % 10
        if row["finish_reason"] == "failed":
            assert (len(row["turns"]), score["reward"]) == (2, None)
            assert (row["turns"][1]["error"], score["error"]) == (REASONS[misdeed], f"environment: {REASONS[misdeed]}")
            reasons.add(REASONS[misdeed])
        else:
            assert score["reward"] is not None
            assert misdeed >= len(REASONS) or row["finish_reason"] == "length", "it ended before its environment did"
    assert reasons == set(REASONS)
    failed = sum(row["finish_reason"] == "failed" for row in rows)
    assert manifest_of(job.run, "it-0001/credit")["metrics"]["missing_fraction"] == failed / len(rows)
    said = f"Environments failed in {failed / len(rows):.1%} of the episodes, which have no score. "
    assert f"iteration 1: {said}" in caplog.text
    assert f"warning: iteration 1: {said}" in job.command("show").output
    with pytest.raises(RheostatError, match=r"scoring.max_missing .* \(\d times\) is: environment: "):
        job.train(*settings, *HOSTILE, "scoring.max_missing=0.05", "name=stricter")


def test_verify_reports_that_a_run_without_environment_has_no_episodes(reference):
    checked = reference.command("verify", "--environment")
    assert checked.code == 0
    assert checked.output.splitlines()[1:] == ["no episode was replayed: the run has no environment"]
    refused = reference.command("verify", "--episodes", "3")
    assert (refused.code, refused.output) == (
        2,
        "rheostat: --episodes 3 needs --environment. Add --environment, or remove --episodes.\n",
    )


@pytest.mark.system
def test_the_simulated_user_is_trained_once_and_answers_in_every_shard(undisturbed):
    job = undisturbed("dialogues")
    run = open_tiny(job)
    assert sum("warm_user" in work for work in job.works().elements()) == 1
    user = run.require("user/model")
    assert user.bundles != run.require("user/base").bundles
    generated = [each for each in run.manifests("it-0002") if "/rollout" in each.key]
    assert all(user.digest in each.parents for each in generated)
    rows = [row for table in tables_of(run, "it-0002", "rollout") for row in table.to_pylist()]
    assert any(turn["observation"] for row in rows for turn in row["turns"])
    checked = job.command("verify", "--environment")
    assert checked.code == 0, checked.output
    assert "no episode was replayed: a model simulates the user" in checked.output
