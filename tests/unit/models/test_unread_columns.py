"""The plan names columns of data files that look like a part of the prompt but are not read."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rheostat.flows.cli.plan import list_data_notes
from rheostat.infra.errors import BadInput
from rheostat.models.config.data import FileData, MixtureData
from rheostat.models.data.problems import load_problems
from rheostat.models.data.unread_columns import list_column_notes
from rheostat.tasks.config.run import override_config
from tests.support.data_files import write_lines
from tests.support.demos import ARITHMETIC

TEXT = {"prompt": "1?", "answer": "x"}
CHAT = {"prompt": [{"role": "user", "content": "1?"}], "answer": "x"}
TOOL = {"name": "find", "parameters": {}}


def notes_on(path, **keys):
    data = FileData(path=path, heldout_path=path, **keys)
    return [*list_column_notes(data, load_problems(data, "train", 0))]


def write_arrow(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink:
        make = pa.ipc.new_file if path.suffix == ".feather" else pa.ipc.new_stream
        with make(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow", ".feather"])
def test_a_column_of_images_that_is_not_configured_is_named(tmp_path, suffix):
    rows, path = [{**TEXT, "images": "red.png"}], tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        write_lines(path, *rows)
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_arrow(path, rows)
    for note in notes_on(path):
        assert all(part in note for part in (str(path), "'images'", "images_column = 'images'"))
    assert len({*notes_on(path)}) == 1


def test_tools_next_to_plain_text_prompts_are_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {**TEXT, "tools": [TOOL]})
    assert all("plain-text prompts and a column 'tools'" in note for note in notes_on(path)) and notes_on(path)
    data = MixtureData(sources=[{"path": path, "heldout_path": path}])
    assert {*list_column_notes(data, load_problems(data, "train", 0))} == {*notes_on(path)}


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (TEXT, {}),
        ({**CHAT, "tools": [TOOL]}, {}),
        ({**TEXT, "tools": [TOOL]}, {"system": "Be brief."}),
        ({**TEXT, "tools": [TOOL]}, {"tools_column": ""}),
        ({**TEXT, "image": "a.png"}, {"environment_columns": ("image",)}),
    ],
)
def test_columns_that_are_read_or_switched_off_are_not_named(tmp_path, row, keys):
    assert notes_on(write_lines(tmp_path / "a.jsonl", row), **keys) == []


@pytest.mark.parametrize("key", ["tools_column", "chat_template_kwargs_column"])
def test_a_configured_column_for_chats_is_refused_if_all_prompts_are_plain_text(tmp_path, key):
    path = write_lines(tmp_path / "a.jsonl", {**TEXT, "mine": [TOOL] if key == "tools_column" else {"a": 1}})
    with pytest.raises(BadInput, match=rf"data\.{key} is set, but it has no effect.* Remove it"):
        notes_on(path, **{key: "mine"})


@pytest.mark.parametrize(("worked", "number"), [(0, 1), (3, 0)])
def test_the_plan_names_a_share_of_worked_answers_without_effect(worked, number):
    facts = {"repeated_problems": 0, "worked_answers": worked, "train_problems": 3, "heldout_problems": 1}
    config = override_config({"data": ARITHMETIC}, ["warmup.worked_answer_fraction=0.5"], source="job")
    notes = [note for note in list_data_notes(config, facts) if "warmup.worked_answer_fraction has no effect" in note]
    assert len(notes) == number
    unset = override_config({"data": ARITHMETIC}, ["warmup.steps=3"], source="job")
    assert not any("worked_answer_fraction" in note for note in list_data_notes(unset, facts))
