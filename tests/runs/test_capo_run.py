"""A whole run with token-level credit from a program that checks steps, a judge of steps and an outcome reward."""

from typing import Any

import pyarrow as pa
import pytest

from tests.support.in_process import InProcessJob

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]


@pytest.fixture
def job(undisturbed) -> InProcessJob:
    return undisturbed("token credit")


def rows_of_kind(job: InProcessJob, kind: str) -> list[dict[str, Any]]:
    """Return the rows of all shards of a kind, read without code of the product."""
    tables = [pa.ipc.open_file(path).read_all() for path in (job.run / "shards").rglob("*.arrow")]
    found = [table for table in tables if table.schema.metadata[b"rheostat.kind"].decode() == kind]
    return [row for table in found for row in table.to_pylist()]


def test_scores_have_spans_from_the_first_token_and_flags_of_both_terms(job):
    rows = rows_of_kind(job, "scores")
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


def test_tokens_of_one_completion_have_different_advantages(job):
    rows = rows_of_kind(job, "samples")
    assert any(len(set(row["advantages"])) > 1 for row in rows)


@pytest.mark.parametrize("command", ["verify", "export", "rollouts", "show"])
def test_commands_accept_a_run_with_spans(job, command):
    ended = job.command(command)
    assert ended.code == 0, ended.output
