"""Preferences as data: made from problems, or read from files whose every fault is one line."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.errors import BadInput
from models.config.data import ArithmeticData, ArithmeticPreferences, FileData, FilePreferences
from models.data.examples import load_preferences
from models.data.problems import Message, identity, load_problems

DATA = ArithmeticData(train_problems=64, heldout_problems=16)
SPLITS = ("train", "heldout")
FILE_DATA = FileData(path="unused.jsonl")
PAIRS = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}"} for n in range(40)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(config, split="train"):
    return load_preferences(config, FILE_DATA, split=split, seed=0)


def refusal(config, split="train"):
    with pytest.raises(BadInput) as refused:
        load(config, split)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def answer(text):
    return re.search(r"#### (\d+)$", text)


def test_pairs_from_problems_prefer_the_right_answer_to_a_wrong_one():
    pairs = load_preferences(ArithmeticPreferences(train_pairs=200), DATA, split="train", seed=3)
    answers = {problem.prompt: problem for problem in load_problems(DATA, "train", 3)}
    assert len(pairs) == 200
    for pair in pairs:
        assert pair.chosen == answers[pair.prompt].worked
        wrong = answer(pair.rejected)
        assert wrong is None or wrong[1] != answer(answers[pair.prompt].answer)[1]


def test_pairs_from_problems_repeat_themselves_and_differ_by_seed():
    config = ArithmeticPreferences(train_pairs=100)
    first, again, other = (load_preferences(config, DATA, split="train", seed=seed) for seed in (3, 3, 4))
    assert first == again != other


def test_every_problem_comes_once_before_one_comes_twice():
    pairs = load_preferences(ArithmeticPreferences(train_pairs=128), DATA, split="train", seed=0)
    prompts = [identity(pair.prompt) for pair in pairs]
    assert len(set(prompts[:64])) == len(set(prompts[64:])) == 64


def test_held_out_pairs_are_about_held_out_problems():
    config = ArithmeticPreferences(train_pairs=64, heldout_pairs=32)
    train, heldout = ({pair.prompt for pair in load_preferences(config, DATA, split=s, seed=0)} for s in SPLITS)
    assert not train & heldout
    assert heldout <= {problem.prompt for problem in load_problems(DATA, "heldout", 0)}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_every_format_gives_the_same_pairs_and_each_is_in_one_split(tmp_path, suffix):
    path = tmp_path / f"pairs{suffix}"
    table = pa.Table.from_pylist(PAIRS)
    if suffix == ".jsonl":
        write_lines(path, PAIRS)
    elif suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    splits = [load(FilePreferences(path=path, heldout_fraction=0.3), split) for split in SPLITS]
    assert all(splits)
    found = [(pair.prompt, pair.chosen, pair.rejected) for split in splits for pair in split]
    assert sorted(found) == sorted(tuple(pair.values()) for pair in PAIRS)


def test_a_prompt_with_several_pairs_is_wholly_in_one_split(tmp_path):
    rows = [row | {"rejected": f"{row['rejected']}{again}"} for row in PAIRS for again in range(4)]
    config = FilePreferences(path=write_lines(tmp_path / "pairs.jsonl", rows), heldout_fraction=0.5)
    train, heldout = ({pair.prompt for pair in load(config, split)} for split in SPLITS)
    assert train and heldout
    assert not train & heldout


def test_chats_are_read_and_text_is_put_into_the_template(tmp_path):
    rows = [
        {
            "question": [{"role": "user", "content": "2+2?"}],
            "good": [{"role": "assistant", "content": "4"}],
            "bad": "5",
        },
        {"question": "3+3?", "good": "6", "bad": "7"},
    ]
    write_lines(tmp_path / "pairs.jsonl", rows)
    columns = {"prompt_column": "question", "chosen_column": "good", "rejected_column": "bad"}
    config = FilePreferences(
        path=tmp_path / "pairs.jsonl",
        heldout_path=write_lines(tmp_path / "kept.jsonl", [{"question": "1+1?", "good": "2", "bad": "3"}]),
        template="Q: {prompt} A: ",
        **columns,
    )
    chat, plain = load(config)
    assert (chat.prompt, chat.chosen, chat.rejected) == ((Message("user", "2+2?"),), "4", "5")
    assert plain.prompt == "Q: 3+3? A: "
    assert [pair.prompt for pair in load(config, "heldout")] == ["Q: 1+1? A: "]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "2+2=", "choosen": "4", "rejected": "5"}, "no column 'chosen', did you mean 'choosen'?"),
        ({"prompt": "2+2=", "chosen": "4", "rejected": None}, "rejected: expected text, found NoneType None"),
        ({"prompt": "2+2=", "chosen": " ", "rejected": "5"}, "chosen: expected text, found none"),
        ({"prompt": "2+2=", "chosen": "4", "rejected": "4"}, "chosen and rejected: expected two different completions"),
        ({"prompt": [], "chosen": "4", "rejected": "5"}, "prompt: expected a chat that waits for the assistant"),
        (
            {"prompt": "2+2=", "chosen": [{"role": "user", "content": "4"}], "rejected": "5"},
            "chosen: expected one message by the assistant after the prompt's, found user",
        ),
        (
            {"prompt": "2+2=", "chosen": [{"role": "assistant", "content": "4"}] * 2, "rejected": "5"},
            "found assistant, assistant",
        ),
        ({"prompt": "2+2=", "chosen": [{"content": "4"}], "rejected": "5"}, "chosen[0] is no chat message"),
    ],
)
def test_a_row_that_is_no_pair_is_named_with_its_place(tmp_path, row, told):
    path = write_lines(tmp_path / "pairs.jsonl", [PAIRS[0], row])
    message = refusal(FilePreferences(path=path))
    assert f"{path}:2: " in message
    assert told in message


def test_a_file_that_gives_no_pairs_is_refused(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "no preferences, the file is empty" in refusal(FilePreferences(path=empty))
    assert "no such file" in refusal(FilePreferences(path=tmp_path / "nowhere.jsonl"))
    one = write_lines(tmp_path / "one.jsonl", PAIRS[:1])
    told = [refusal(FilePreferences(path=one), split) for split in SPLITS if not _loads(one, split)]
    assert len(told) == 1
    assert "preferences.heldout_fraction = 0.1 leaves no" in told[0]
    assert "has no {prompt}" in refusal(FilePreferences(path=one, template="Q:"))


def _loads(path, split):
    try:
        return bool(load(FilePreferences(path=path), split))
    except BadInput:
        return False


def test_a_prompt_in_both_files_is_refused_by_its_place(tmp_path):
    train = write_lines(tmp_path / "train.jsonl", PAIRS[:3])
    kept = write_lines(tmp_path / "kept.jsonl", [PAIRS[7], PAIRS[2] | {"chosen": "9"}])
    told = refusal(FilePreferences(path=train, heldout_path=kept), "heldout")
    assert f"{kept}:2: this held-out prompt is a training prompt too" in told


def test_arithmetic_pairs_need_arithmetic_problems():
    with pytest.raises(BadInput, match=r"with data\.kind 'file': its pairs are made from arithmetic problems"):
        load(ArithmeticPreferences())
