"""A whole run that trains a process reward model on step labels and gives credit for each step of its completions."""

import pyarrow as pa
import pytest

from rheostat.infra.store.runs import open_run
from tests.support.in_process import InProcessJob
from tests.support.step_labels import write_solutions

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def job(tmp_path_factory, prefect_api) -> InProcessJob:
    home = tmp_path_factory.mktemp("process")
    labels = write_solutions(home / "steps.jsonl", 60)
    job = InProcessJob(home / "job", prefect_api)
    model = f"{{kind='trained', steps=4, batch_size=8, labels={{path='{labels}', heldout_fraction=0.3}}}}"
    right = f"{{kind='process_model', name='right', steps={{kind='pattern', pattern=' '}}, model={model}}}"
    job.train(
        f"scoring.rewards=[{{kind='target', target='tests.support.rewards:even', weight=3}}, {right}]",
        "algorithm.kind=capo",
        "iterations=1",
        "evaluation.problems=1",
    )
    return job


def read_kind(job: InProcessJob, kind: str) -> list[dict]:
    """Return the rows of all shards of a kind, read without code of the product."""
    tables = [pa.ipc.open_file(path).read_all() for path in (job.run / "shards").rglob("*.arrow")]
    found = [table for table in tables if table.schema.metadata[b"rheostat.kind"].decode() == kind]
    return [row for table in found for row in table.to_pylist()]


def test_the_model_is_stored_before_the_first_iteration_with_its_held_out_accuracy(job):
    metrics = open_run(str(job.store), "tiny").require("judge-right/model").metrics
    assert 0 <= metrics["heldout_accuracy"] <= 1
    assert metrics["solutions"] + metrics["heldout_solutions"] == 60


def test_every_step_of_a_completion_has_a_probability_and_the_lowest_is_the_reward(job):
    rows = read_kind(job, "scores")
    assert rows
    assert any(len(row["values_right"]) > 1 for row in rows)
    for row in rows:
        assert row["error"] is None
        assert all(0 < value < 1 for value in row["values_right"])
        assert row["reward_right"] == min(row["values_right"])


def test_tokens_of_one_completion_have_different_advantages(job):
    assert any(len(set(row["advantages"])) > 1 for row in read_kind(job, "samples"))


@pytest.mark.parametrize("command", ["verify", "rollouts", "show"])
def test_commands_accept_the_run(job, command):
    ended = job.command(command)
    assert ended.code == 0, ended.output
