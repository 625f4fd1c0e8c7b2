"""A whole run with the verdicts of a judge as reward, and the placement of its workers."""

import json

import pytest

from bench.simulator.__main__ import main as simulator
from rheostat.flows.cli.app import main as command
from tests.support.in_process import InProcessJob
from tests.support.jobs import manifest_of
from tests.support.whole_runs import check_same_run, read_families

pytestmark = [pytest.mark.timeout(1200), pytest.mark.system]


@pytest.fixture
def side_by_side(undisturbed) -> InProcessJob:
    """Run in which two workers generate while one judges."""
    return undisturbed("judge")


def commit_times(job: InProcessJob, stage: str) -> list[str]:
    """Return when each manifest of a stage was committed, as ISO times of one machine, which sort correctly."""
    paths = sorted((job.run / f"manifests/{stage}").glob("*.json"))
    return [json.loads(path.read_text())["provenance"]["created"] for path in paths]


def test_a_judge_begins_before_the_last_completion_of_its_iteration_is_generated(side_by_side):
    for iteration in ("it-0001", "it-0002"):
        judged, generated = (commit_times(side_by_side, f"{iteration}/{role}") for role in ("judge-judge", "rollout"))
        assert len(judged) == len(generated) == 10
        assert min(judged) < max(generated)


def test_a_run_whose_roles_take_turns_has_the_same_results(side_by_side, tmp_path, together, prefect_api):
    job = InProcessJob(tmp_path, prefect_api)
    job.train(*read_families()["judge"].settings(together), "placement.kind=colocated")
    judged, generated = (commit_times(job, f"it-0001/{role}") for role in ("judge-judge", "rollout"))
    assert min(judged) > max(generated)
    check_same_run(job.run, side_by_side.run)


def test_each_judge_of_a_run_has_a_separate_number_of_votes(undisturbed):
    votes = manifest_of(undisturbed("two judges").run, "it-0001/judge-large/0000")["metrics"]
    assert votes["answers"] == 3 * (4 - votes["empty"]) > 0


def test_the_placement_command_repeats_every_decision_from_its_inputs(side_by_side):
    replayed = side_by_side.command("placement", "--json")
    lines = json.loads(replayed.output)
    assert replayed.code == 0
    assert [line["batch"] for line in lines] == ["eval-0000", "eval-0002", "it-0001", "it-0002"]
    assert all(line["replayed"] for line in lines)


def test_verify_accepts_a_judged_run_and_show_names_its_engines(side_by_side):
    verified = side_by_side.command("verify")
    assert verified.code == 0, verified.output
    shown = json.loads(side_by_side.command("show", "--json").output)
    assert shown["engines"] == {"rollout": ["transformers"], "judge-judge": ["transformers"]}


def test_the_simulator_accepts_the_measured_stages_of_a_run(side_by_side, capsys, tmp_path):
    store = ["--store", str(side_by_side.store)]
    assert command(["placement", "tiny", *store]) == 0
    assert capsys.readouterr().out.startswith("batch ")
    assert command(["placement", "tiny", "--stages", *store]) == 0
    stages = tmp_path / "stages.json"
    stages.write_text(capsys.readouterr().out)
    assert simulator(["--stages", str(stages), "--seeds", "1", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)
    assert (cell["workers"], cell["iterations"]) == (3, 2)
