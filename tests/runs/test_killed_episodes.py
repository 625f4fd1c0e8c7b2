"""Kills in the middle of episodes: the driver, then a rollout worker, and the run is the one never disturbed."""

import pytest

from tests.support.in_process import InProcessJob
from tests.support.jobs import PAUSE, Fault, Job, alive, family_of, kill, manifests_of, shards_of, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(2000)]
EPISODES = (
    "rollout.environment.kind=target",
    "rollout.environment.target=tests.support.games:Echo",
    "rollout.environment.options.reward=1.5",
    "rollout.environment.prompts=text",
    "rollout.environment.parser=none",
    "rollout.environment.turn_tokens=8",
    'rollout.sampling.stop=["1", " "]',
    'scoring.rewards=[{kind="environment"}]',
    "iterations=2",
)
MOMENT = "generate .*iteration=1,"


def test_a_driver_and_a_worker_killed_in_the_middle_of_episodes_change_no_bit(tmp_path, prefect_api):
    undisturbed = InProcessJob(tmp_path / "undisturbed", prefect_api)
    undisturbed.train(*EPISODES)
    job = Job(tmp_path / "killed", prefect_api, counts_works=True)
    # Progress moves with every decoding step and every answered turn: 15 are more than a first turn's eight.
    with job.started(*EPISODES, faults=[Fault("rollout", "progress", MOMENT, count=15, signal=PAUSE)]) as process:
        wait_for(lambda: job.struck() or process.poll() is not None)
        assert process.poll() is None, job.ended(process).output
        family = family_of(process.pid)
        kill(process)
    assert wait_for(lambda: not alive(family), seconds=60), alive(family)
    assert "it-0001/seal" not in manifests_of(job.run)
    again = job.train(*EPISODES, faults=[Fault("rollout", "progress", MOMENT, count=15)])
    assert again.code == 0, again.output
    assert job.struck() == 1
    assert manifests_of(job.run) == manifests_of(undisturbed.run)
    assert shards_of(job.run) == shards_of(undisturbed.run)
