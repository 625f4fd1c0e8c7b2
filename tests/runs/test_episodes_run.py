"""A whole run of episodes, with the environment's own reward."""

import json

import pytest

from infra.store.runs import open_run
from infra.store.shards import read_shard
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
)


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
    assert "turn 2: " in job.command("rollouts").output
    checked = job.command("verify")
    assert checked.code == 0, checked.output
