"""A run whose judge rates completions by the rubrics of the problems."""

import json

import pytest

from tests.support.in_process import InProcessJob
from tests.support.refused_folders import copy_model
from tests.support.stored_runs import open_tiny, tables_of

RUBRIC = [{"criterion": "Is short", "points": 2}, {"criterion": "Is rude", "points": -1}]


@pytest.mark.system
@pytest.mark.parametrize("chat_prompt", ["messages", "text"])
def test_a_run_with_rubrics_stores_the_verdict_on_every_criterion(chat_prompt, tmp_path, prefect_api):
    rows = [{"prompt": f"Count to {number}.", "answer": "one", "rubric": RUBRIC} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    copy_model("chat", tmp_path / "judge")
    job = InProcessJob(tmp_path / "home", prefect_api)
    data = {"kind": "file", "path": str(tmp_path / "rows.jsonl"), "rubric_column": "rubric"}
    judge = {"kind": "judge", "model": {"kind": "directory", "path": str(tmp_path / "judge")}}
    judge |= {"verdict": {"kind": "rubric"}, "chat_prompt": chat_prompt}
    toml = {name: json.dumps(value).replace('": ', '" = ') for name, value in {"data": data, "judge": judge}.items()}
    job.train("iterations=1", f"data={toml['data']}", f"scoring.rewards=[{toml['judge']}]", "evaluation.problems=2")
    verdicts = [row["text"] for table in tables_of(open_tiny(job), "it-0001", "judge") for row in table.to_pylist()]
    assert verdicts
    for text in filter(None, verdicts):
        assert [each["criterion"] for each in json.loads(text)] == ["Is short", "Is rude"]
