"""Single completions with labels, read from files."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rheostat.models.config.data import FileData
from rheostat.models.config.preferences import LabeledPreferences
from rheostat.models.data.preferences import load_preferences
from rheostat.models.data.problems import Message
from rheostat.models.data.reading import report_reading
from tests.support.json_lines import write_json_lines

ROWS = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n + n % 2}", "label": n % 2 == 0} for n in range(40)]


def load(config, split="train"):
    return load_preferences(config, FileData(path="unused.jsonl"), split=split, seed=0)


def rows_of(preferences):
    return [(each.prompt, [text for text, _ in each.completions], each.label) for each in preferences]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_each_row_has_one_completion_with_its_label_and_is_in_one_split(tmp_path, suffix):
    path = tmp_path / f"labels{suffix}"
    if suffix == ".jsonl":
        write_json_lines(path, ROWS)
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    train, heldout = (rows_of(load(LabeledPreferences(path=path), split)) for split in ("train", "heldout"))
    assert sorted(train + heldout) == sorted((row["prompt"], [row["completion"]], row["label"]) for row in ROWS)
    assert 0 < len(heldout) < 12


def test_labels_may_be_1_and_0_in_other_columns_and_completions_may_be_chats(tmp_path):
    chat = [{"role": "user", "content": "1+1="}]
    rows = [
        {"question": chat, "reply": [{"role": "assistant", "content": "2"}], "thumb": 1},
        {"question": [{"from": "human", "value": "2+2="}], "reply": [{"from": "gpt", "value": "5"}], "thumb": 0},
    ]
    write_json_lines(tmp_path / "a.jsonl", rows)
    write_json_lines(tmp_path / "b.jsonl", [rows[0] | {"question": "new"}])
    config = LabeledPreferences(
        path=tmp_path / "a.jsonl", heldout_path=tmp_path / "b.jsonl", prompt_column="question",
        completion_column="reply", label_column="thumb",
    )  # fmt: skip
    assert rows_of(load(config)) == [
        ((Message("user", "1+1="),), ["2"], True),
        ((Message("user", "2+2="),), ["5"], False),
    ]
    assert rows_of(load(config, "heldout")) == [("new", ["2"], True)]


def test_empty_rows_can_be_left_out_and_are_counted(tmp_path):
    write_json_lines(tmp_path / "a.jsonl", [*ROWS, {"prompt": "a", "completion": " ", "label": True}])
    config = LabeledPreferences(path=tmp_path / "a.jsonl", drop=("empty",))
    assert len(load(config)) + len(load(config, "heldout")) == 40
    assert report_reading(config, "train", "heldout").dropped == {"empty": 1}
