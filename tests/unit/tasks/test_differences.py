"""Differences between the inputs of two runs."""

from dataclasses import replace

import pyarrow as pa
import pytest

from rheostat.infra.store.dependencies import Dependencies, FileContent, record_dependencies
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run
from rheostat.infra.store.shards import write_shard
from rheostat.models.records.schemas import PROMPT_SCHEMA
from rheostat.tasks.lineage.differences import find_input_differences, read_inputs
from rheostat.tasks.run.keys import PROMPTS

ANSWERS = [f"{row}" for row in range(40)]


def run_with(home, name, answers, *, library="1.0", digest="aa"):
    """Return the inputs of a run with these answers. A prompt's id is its position in ANSWERS."""
    run = create_run(str(home), name, {"seed": 0})
    rows = [{"prompt_id": f"{number:016x}", "answer": answer, "columns": "{}"} for number, answer in answers]
    table = pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)
    dependencies = Dependencies(
        code={"reward mine:score": {"mine": digest}},
        data={"problems.jsonl": FileContent(digest=digest * 4, bytes=len(answers), modified_ns=0)},
        libraries={"torch": library},
    )
    with run.lock():
        run.commit(Manifest(key=PROMPTS["train"], shards=(write_shard(run.store, table, kind="prompts", metadata={}),)))
        record_dependencies(run, dependencies, iteration=1, folder="", accept_change=True)
    return read_inputs(run)


@pytest.fixture
def first(tmp_path):
    return run_with(tmp_path, "first", list(enumerate(ANSWERS)))


def test_equal_inputs_have_no_difference(first, tmp_path):
    assert find_input_differences(first, run_with(tmp_path, "second", list(enumerate(ANSWERS)))) == []


def test_prompts_code_files_and_libraries_that_differ_are_named_with_rows(first, tmp_path):
    spoilt = [(row, "wrong" if 11 <= row <= 20 or row == 30 else answer) for row, answer in enumerate(ANSWERS[:35])]
    second = run_with(tmp_path, "second", [*spoilt, (99, "new"), (30, "30")], library="2.0", digest="bb")
    assert find_input_differences(first, second) == [
        "5 training prompts only in first: rows 35 to 39",
        "1 training prompt only in second: row 35",
        "11 training prompts with another answer or other columns in second: rows 11 to 20, 30",
        "reward mine:score: module mine was aa, is bb",
        "data file problems.jsonl has changed (was aaaaaaaa, 40 bytes; is now bbbbbbbb, 37 bytes)",
        "torch was 1.0, is 2.0",
    ]


def test_prompts_that_are_not_stored_are_not_called_equal(first):
    deleted = replace(first, run="second", prompts=None)
    [line] = find_input_differences(first, deleted)
    assert line == "training prompts cannot be compared, because second does not store them"


def test_many_ranges_of_rows_are_cut_off(first, tmp_path):
    odd = [(row, answer if row % 2 else "wrong") for row, answer in enumerate(ANSWERS)]
    [line] = [each for each in find_input_differences(first, run_with(tmp_path, "second", odd)) if "answer" in each]
    assert line.endswith("rows 0, 2, 4, 6, 8, 10, 12, 14 and 12 more ranges")
