"""Whole runs with dynamic sampling and partial rollout: killed between waves, they stay the undisturbed run."""

import json

import pyarrow as pa
import pytest

from infra.store.runs import open_run
from tasks.run.iteration import Iteration
from tasks.views.export import exported
from tests.support.in_process import InProcessJob
from tests.support.jobs import Fault, Job, manifests_of, shards_of

pytestmark = [pytest.mark.timeout(1200), pytest.mark.system]

WAVES = (
    "warmup.steps=30",  # it ends some completions by itself, and is right now and then
    "scoring.rewards=[{kind = 'numeric', pattern = '([0-9])'}]",
    "rollout.shard_prompts=3",
    "rollout.dynamic.max_extra_waves=2",
    "rollout.dynamic.surplus=keep",
    "rollout.partial.tokens=18",
    "rollout.partial.over_dispatch=0",
)


@pytest.fixture(scope="module")
def waves(tmp_path_factory, prefect_api):
    """A run of two-wave iterations that leave groups to each other."""
    job = InProcessJob(tmp_path_factory.mktemp("waves"), prefect_api)
    job.train(*WAVES)
    return job


def seal(job, number):
    return json.loads((job.run / f"manifests/it-{number:04d}/seal.json").read_text())


def test_a_run_in_waves_keeps_every_promise(waves):
    verified = waves.command("verify")
    assert verified.code == 0, verified.output


def test_groups_that_were_cut_go_on_first_in_the_next_iteration(waves):
    left = [groups["rollouts"] for groups in seal(waves, 1)["detail"]["carried"]]
    following = json.loads((waves.run / "manifests/it-0002/plan.json").read_text())["detail"]
    assert left
    assert following["carried"] == left
    continued = [json.loads((waves.run / f"manifests/{key}.json").read_text())["digest"] for key in left]
    for shard, digest in enumerate(continued):
        rollouts = json.loads((waves.run / f"manifests/it-0002/rollout/{shard:04d}.json").read_text())
        assert digest in rollouts["parents"]


def test_an_iteration_short_of_informative_groups_has_another_wave(waves):
    plans = [path.parent.name for path in waves.run.glob("manifests/it-*/wave-*/plan.json")]
    assert "wave-2" in plans


def test_an_export_marks_the_groups_that_credit_counted_and_those_that_it_trained(waves):
    run = open_run(str(waves.store), "tiny")
    for number in (1, 2, 3):
        rows = pa.concat_tables(exported(run, number)).to_pylist()
        marked = {row["prompt_row"] for row in rows if row["group_informative"]}
        trained = {row["prompt_row"] for row in rows if row["advantages"] is not None}
        before = {row for groups in Iteration(run, number).before.leftover_groups for row in groups.rows}
        counted = seal(waves, number)["metrics"]
        assert len(marked) + len(before) == counted["credit/informative_groups"]
        assert trained <= marked and len(trained | before) >= counted["credit/trained_groups"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "written", ["it-0002/wave-2/plan", "it-0002/rollout/0000", "it-0002/wave-2/scoring/0000", "it-0002/seal"]
)
def test_a_driver_killed_between_waves_continues_to_the_undisturbed_run(waves, tmp_path, prefect_api, written):
    job = Job(tmp_path, prefect_api)
    killed = job.train(*WAVES, faults=[Fault("driver", "after", f"manifests/{written}.json")])
    assert (killed.code, job.struck()) == (-9, 1), killed.output
    resumed = job.train(*WAVES)
    assert resumed.code == 0, resumed.output
    assert manifests_of(job.run) == manifests_of(waves.run)
    assert shards_of(job.run) == shards_of(waves.run)
    assert job.command("verify").code == 0
