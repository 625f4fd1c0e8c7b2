"""A whole run with token-level credit: a program checks steps, a judge criticises them, an outcome is above both."""

from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.in_process import InProcessJob
from tests.support.policies import write_policy

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

EVEN = "{kind = 'target', name = 'even', target = 'tests.support.rewards:even', weight = 3.0}"
CHECKED = (
    "{kind = 'target', name = 'checked', target = 'models.rewards.arithmetic_steps:wrong_steps', per = 'step',"
    " steps = {kind = 'pattern', pattern = ' '}}"
)
CRITIC = (
    "{{kind = 'judge', name = 'critic', votes = 2, sampling = {{max_new_tokens = 400}},"
    " verdict = {{kind = 'steps', steps = {{kind = 'pattern', pattern = ' '}}, flags = 'union'}},"
    " model = {{kind = 'directory', path = '{path}', engine = {{kind = 'target', target = 'bench.paced:PacedEngine',"
    " options = {{base_seconds = 0.0, per_sequence_seconds = 0.0, median_tokens = 40,"
    " endings = ['<incorrect_steps></incorrect_steps>', '<incorrect_steps>0, 2</incorrect_steps>']}}}}}}}}"
)


@pytest.fixture(scope="module")
def job(tmp_path_factory, prefect_api):
    home = tmp_path_factory.mktemp("capo")
    write_policy(home / "judge", changes={"max_position_embeddings": 8192})
    job = InProcessJob(home / "job", prefect_api)
    rewards = f"scoring.rewards=[{EVEN}, {CHECKED}, {CRITIC.format(path=home / 'judge')}]"
    job.train(rewards, "algorithm.kind=capo", "iterations=1", "pools.workers=3", "evaluation.problems=1")
    return job


def read(path: Path) -> pa.Table:
    return pa.ipc.open_file(path).read_all()


def tables(job: InProcessJob, kind: str) -> list[pa.Table]:
    found = [read(path) for path in (job.run / "shards").rglob("*.arrow")]
    return [table for table in found if table.schema.metadata[b"rheostat.kind"].decode() == kind]


def test_every_completion_has_spans_that_begin_with_its_first_token_and_flags_of_both_terms(job):
    rows = [row for table in tables(job, "scores") for row in table.to_pylist()]
    assert rows
    assert all(row["error"] is None for row in rows)
    for row in rows:
        for term in ("checked", "critic"):
            spans, values = row[f"spans_{term}"], row[f"values_{term}"]
            assert spans[0] == 0
            assert len(spans) == len(values)
            assert set(values) <= {0.0, -1.0}
            assert row[f"reward_{term}"] == pytest.approx(sum(values) / len(values))
    assert {value for row in rows for value in row["values_critic"]} == {0.0, -1.0}


def test_tokens_of_one_completion_are_worth_different_things(job):
    rows = [row for table in tables(job, "samples") for row in table.to_pylist()]
    assert any(len(set(row["advantages"])) > 1 for row in rows)


@pytest.mark.parametrize("command", ["verify", "export", "rollouts", "show"])
def test_commands_that_read_the_run_read_its_spans(job, command):
    ended = job.command(command)
    assert ended.code == 0, ended.output
