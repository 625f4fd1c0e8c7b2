"""Whole runs of episodes: with the environment's own reward, and with a user that the run trains."""

import json
import re
from itertools import chain

import pytest

from infra.errors import RheostatError
from infra.store.runs import open_run
from infra.store.shards import read_shard
from models.records.seeds import derive_seed
from tests.support.in_process import InProcessJob

pytestmark = pytest.mark.timeout(600)
EPISODES = (
    "rollout.environment.kind=target",
    "rollout.environment.target=tests.support.games:Echo",
    "rollout.environment.options.reward=1.5",
    "rollout.environment.prompts=text",
    "rollout.environment.parser=none",
    "rollout.environment.turn_tokens=8",
    "rollout.environment.processes=1",
    'rollout.sampling.stop=["1", " "]',
    'scoring.rewards=[{kind="environment"}]',
    "iterations=2",
    "rollout.prompts=4",
    "evaluation.problems=2",
)
PAYS = 'rollout.environment.options={what="pays"}'

DIALOGUES = (
    "data.kind=measures",
    "data.train_problems=64",
    "data.heldout_problems=8",
    "rollout.environment.kind=dialogue",
    'rollout.environment.instructions="width {width}\\nheight {height}\\n"',
    "rollout.environment.prompts=text",
    "rollout.environment.final=####",
    "rollout.environment.max_turns=3",
    "rollout.environment.turn_tokens=8",
    'rollout.environment.sampling={max_new_tokens=12, stop=["1", " ", "e"]}',
    "rollout.environment.model.kind=trained",
    "rollout.environment.model.shape={kind='scratch', hidden_size=16, intermediate_size=32, context=128}",
    "rollout.environment.model.warmup.steps=10",
    'rollout.sampling.stop=["1", " "]',
    "scoring.max_missing=1.0",
    "iterations=2",
)


def rows_of(job, manifest):
    return read_shard(open_run(str(job.store), "tiny").store, manifest.shards[0]).to_pylist()


@pytest.mark.system
def test_a_run_of_episodes_learns_from_what_its_environment_gives(tmp_path, prefect_api):
    job = InProcessJob(tmp_path / "job", prefect_api)
    job.train(*EPISODES)
    run = open_run(str(job.store), "tiny")
    manifest = next(each for each in run.manifests("it-0002") if "/rollout" in each.key)
    rows = read_shard(run.store, manifest.shards[0]).to_pylist()
    assert any(len(row["turns"]) == 3 for row in rows)
    shown = json.loads(job.command("rollouts", "--json").output)
    assert any(len(each["turns"]) > 1 for each in shown)
    credit = next(each for each in run.manifests("it-0002") if each.key.endswith("/credit"))
    assert 1 < credit.metrics["turns_mean"] <= 3
    shards = [read_shard(run.store, each.shards[0]) for each in run.manifests("it-0002") if "/rollout" in each.key]
    found = list(chain(*(shard.to_pylist() for shard in shards)))
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
        "unreadable",
        "endings",
        "answers",
        "s",
        "waited",
        "s",
    ]
    assert len(lines[at + 2 :]) >= 2
    assert "turn 2: " in job.command("rollouts").output
    checked = job.command("verify", "--environment")
    assert checked.code == 0, checked.output
    assert checked.output.splitlines()[1:] == [
        "16 episodes were played again: new environments answer as the shards say"
    ]


@pytest.mark.system
def test_a_run_whose_environment_lies_is_found_out_where_its_episodes_are_played_again(tmp_path, prefect_api):
    job = InProcessJob(tmp_path / "job", prefect_api)
    job.train(*EPISODES, "iterations=1", "rollout.environment.target=tests.support.games:Rolls", PAYS)
    assert job.command("verify").code == 0
    found = job.command("verify", "--environment", "--episodes", "5")
    shards = {shard.key for each in open_run(str(job.store), "tiny").manifests("it-0001") for shard in each.shards}
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
    "no answer after 2 s",
    "its process was killed by SIGSEGV",
    "OSError: the backend is down",
    "NoStep: expected a text, None, or messages, done and reward, found int",
    "NoStep: expected a message with a text as content, found 5",
    "its process wrote what is no answer",
    "NoStep: expected a finite number as reward, found 'much'",
)


@pytest.mark.system
def test_hostile_environments_lose_their_own_episodes_and_the_run_goes_on_until_too_many_are_missing(
    tmp_path, prefect_api, caplog
):
    job = InProcessJob(tmp_path / "job", prefect_api)
    job.train(*EPISODES, *HOSTILE, "scoring.max_missing=1.0")
    made = {each.key: each for each in open_run(str(job.store), "tiny").manifests("it-0001")}
    read = [[*rows_of(job, each)] for stage in ("/rollout", "/scoring") for key, each in made.items() if stage in key]
    rows, scores = (list(chain(*part)) for part in (read[: len(read) // 2], read[len(read) // 2 :]))
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
    assert made["it-0001/credit"].metrics["missing_fraction"] == failed / len(rows)
    said = f"environments failed {failed / len(rows):.1%} of the episodes, which have no score: "
    assert f"iteration 1: {said}" in caplog.text
    assert f"warning: iteration 1: {said}" in job.command("show").output
    with pytest.raises(RheostatError, match=r"\(scoring.max_missing\); most often \(\d times\): environment: "):
        job.train(*EPISODES, *HOSTILE, "scoring.max_missing=0.05", "name=stricter")


def test_where_no_process_answered_no_episode_is_played_again_and_the_reason_is_said(reference):
    checked = reference.command("verify", "--environment")
    assert checked.code == 0
    assert checked.output.splitlines()[1:] == ["no episode was played again: the run has no environment"]
    refused = reference.command("verify", "--episodes", "3")
    assert (refused.code, refused.output) == (
        2,
        "rheostat: --episodes 3: expected at least 1, with --environment\n",
    )


@pytest.mark.system
def test_a_run_trains_its_user_once_and_has_every_shard_answered_by_it(tmp_path, prefect_api):
    job = InProcessJob(tmp_path / "job", prefect_api, counts_works=True)
    job.train(*DIALOGUES)
    run = open_run(str(job.store), "tiny")
    assert sum("warm_user" in work for work in job.works().elements()) == 1
    user = run.require("user/model")
    assert user.bundles != run.require("user/base").bundles
    generated = [each for each in run.manifests("it-0002") if "/rollout" in each.key]
    assert all(user.digest in each.parents for each in generated)
    rows = [row for each in generated for row in read_shard(run.store, each.shards[0]).to_pylist()]
    assert any(turn["observation"] for row in rows for turn in row["turns"])
    before = [shard.digest for each in generated for shard in each.shards]
    again = InProcessJob(tmp_path / "again", prefect_api)
    again.train(*DIALOGUES)
    repeated = [each for each in open_run(str(again.store), "tiny").manifests("it-0002") if "/rollout" in each.key]
    assert [shard.digest for each in repeated for shard in each.shards] == before
    checked = job.command("verify", "--environment")
    assert checked.code == 0, checked.output
    assert "no episode was played again: a model plays the user" in checked.output
