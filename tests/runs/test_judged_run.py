"""Whole runs whose reward is a judge's verdict: under every placement, and through kills, they are the same run."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from flows.cli.app import main as command
from placement.simulator.__main__ import main as simulator
from tests.support.in_process import InProcessJob
from tests.support.jobs import Fault, Job, manifests_of, shards_of
from tests.support.judged import JUDGE

pytestmark = [pytest.mark.timeout(1200), pytest.mark.system]

TWO_JUDGES = (
    "scoring.rewards=["
    "{kind = 'judge', name = 'small', model = {kind = 'trained', warmup = {steps = 20},"
    " shape = {kind = 'scratch', hidden_size = 16, intermediate_size = 32, context = 192}}},"
    "{kind = 'judge', name = 'large', slots = 2, votes = 3, vote = 'majority', sampling = {temperature = 1.0},"
    " model = {kind = 'trained', warmup = {steps = 20},"
    " shape = {kind = 'scratch', hidden_size = 32, intermediate_size = 64, context = 192}}}]"
)
SMALL = ("pools.workers=3", "rollout.prompts=10", "rollout.shard_prompts=1", "iterations=2", "evaluation.problems=4")


@dataclass(frozen=True)
class Judged:
    """A run with a judge, under one placement."""

    job: Job | InProcessJob

    @property
    def seconds(self) -> dict[str, str]:
        """When each manifest was committed: ISO times of one machine, which sort."""
        root = self.job.run / "manifests"
        paths = root.rglob("*.json")
        return {
            str(path.relative_to(root).with_suffix("")): json.loads(path.read_text())["provenance"]["created"]
            for path in paths
        }


def train(home: Path, api: str, *overrides: str, rewards: str = JUDGE, faults: tuple[Fault, ...] = ()) -> Judged:
    job = Job(home, api, counts_works=bool(faults))
    ended = job.train(rewards, *SMALL, *overrides, faults=faults)
    assert ended.code == 0, ended.output
    return Judged(job)


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory, prefect_api):
    """Two workers generate while one judges."""
    job = InProcessJob(tmp_path_factory.mktemp("fixed"), prefect_api)
    job.train(JUDGE, *SMALL, "placement.kind=fixed", "placement.rollout=0.67")
    return Judged(job)


def test_a_judge_finishes_before_the_last_completion_of_its_iteration_is_generated(side_by_side):
    created = side_by_side.seconds
    for iteration in ("it-0001", "it-0002"):
        judged = [time for key, time in created.items() if key.startswith(f"{iteration}/judge-judge/")]
        generated = [time for key, time in created.items() if key.startswith(f"{iteration}/rollout/")]
        assert len(judged) == len(generated) == 10
        assert min(judged) < max(generated)


def test_a_run_whose_roles_take_turns_has_the_same_rewards_advantages_and_weights(
    side_by_side, tmp_path_factory, prefect_api
):
    job = InProcessJob(tmp_path_factory.mktemp("turns"), prefect_api)
    job.train(JUDGE, *SMALL, "placement.kind=colocated")
    turns = Judged(job)
    created = turns.seconds
    judged = [time for key, time in created.items() if key.startswith("it-0001/judge-judge/")]
    generated = [time for key, time in created.items() if key.startswith("it-0001/rollout/")]
    assert min(judged) > max(generated)
    assert manifests_of(turns.job.run) == manifests_of(side_by_side.job.run)
    assert shards_of(turns.job.run) == shards_of(side_by_side.job.run)


def test_every_placement_decision_of_a_run_is_made_again_from_its_inputs(side_by_side):
    replayed = side_by_side.job.command("placement", "--json")
    lines = json.loads(replayed.output)
    assert replayed.code == 0
    assert [line["batch"] for line in lines] == ["eval-0000", "eval-0002", "it-0001", "it-0002"]
    assert all(line["replayed"] for line in lines)


def test_a_judged_run_keeps_every_promise(side_by_side):
    verified = side_by_side.job.command("verify")
    assert verified.code == 0, verified.output
    shown = json.loads(side_by_side.job.command("show", "--json").output)
    assert shown["engines"] == {"rollout": ["transformers"], "judge-judge": ["transformers"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        (Fault("judge-judge", "progress", "judge", count=2),),
        (Fault("judge-judge", "after", "/shards/", count=2),),
        (Fault("judge-judge", "before", "/shards/"), Fault("rollout", "progress", "generate", count=3)),
    ],
    ids=["in the middle of a shard", "between the shard and its manifest", "beside a rollout worker"],
)
def test_a_killed_judge_costs_a_shard_at_most_and_changes_nothing(side_by_side, tmp_path, prefect_api, faults):
    killed = train(tmp_path, prefect_api, "placement.kind=adaptive", faults=faults)
    assert killed.job.struck() == len(faults)
    again = [work for work, count in killed.job.works().items() if count > 1]
    assert 1 <= len(again) <= len(faults)
    assert manifests_of(killed.job.run) == manifests_of(side_by_side.job.run)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["after", "before"])
@pytest.mark.parametrize("entry", ["plan", "moves"])
def test_a_move_that_a_killed_driver_began_is_finished_or_undone_by_the_next(
    side_by_side, tmp_path, prefect_api, moment, entry
):
    job = Job(tmp_path, prefect_api)
    faults = [Fault("driver", moment, rf"journal/placement/it-0001/{entry}\S*\.json")]
    killed = job.train(JUDGE, *SMALL, "placement.kind=colocated", faults=faults)
    assert (killed.code, job.struck()) == (-9, 1), killed.output
    resumed = job.train(JUDGE, *SMALL, "placement.kind=fixed")
    assert resumed.code == 0, resumed.output
    assert manifests_of(job.run) == manifests_of(side_by_side.job.run)
    assert job.command("placement").code == 0


@pytest.mark.slow
def test_judges_of_different_sizes_share_the_slots_and_judge_alike_in_turns_and_side_by_side(
    tmp_path_factory, prefect_api
):
    homes = [tmp_path_factory.mktemp(name) for name in ("split", "turns")]
    workers = "pools.workers=4"
    split = train(homes[0], prefect_api, workers, "placement.kind=fixed", "placement.rollout=0.25", rewards=TWO_JUDGES)
    turns = train(homes[1], prefect_api, workers, "placement.kind=colocated", rewards=TWO_JUDGES)
    assert manifests_of(split.job.run) == manifests_of(turns.job.run)
    votes = json.loads((split.job.run / "manifests/it-0001/judge-large/0000.json").read_text())["metrics"]
    assert votes["answers"] == 3 * (4 - votes["empty"]) > 0
    assert split.job.command("verify").code == 0


def test_the_stages_of_a_run_are_simulated_as_they_measured_themselves(side_by_side, capsys, tmp_path):
    store = ["--store", str(side_by_side.job.store)]
    assert command(["placement", "tiny", *store]) == 0
    assert capsys.readouterr().out.startswith("batch ")
    assert command(["placement", "tiny", "--stages", *store]) == 0
    stages = tmp_path / "stages.json"
    stages.write_text(capsys.readouterr().out)
    assert simulator(["--stages", str(stages), "--seeds", "1", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)
    assert (cell["workers"], cell["iterations"]) == (3, 2)
