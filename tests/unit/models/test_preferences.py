"""Preferences as data: generated from problems, or read from files."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rheostat.models.config.data import FileData
from rheostat.models.config.preferences import AnswerPreferences, FilePreferences
from rheostat.models.data.preferences import load_preferences
from rheostat.models.data.problems import Message, identity, load_problems
from tests.support.demos import ArithmeticData
from tests.support.json_lines import write_json_lines

DATA = ArithmeticData(train_problems=64, heldout_problems=16)
SPLITS = ("train", "heldout")
FILE_DATA = FileData(path="unused.jsonl")
PAIRS = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}"} for n in range(40)]


def load(config, split="train"):
    return load_preferences(config, FILE_DATA, split=split, seed=0)


def find_answer(text):
    return re.search(r"#### (\d+)$", text)


def test_pairs_from_problems_prefer_the_right_answer_to_a_wrong_one():
    pairs = load_preferences(AnswerPreferences(train_pairs=200), DATA, split="train", seed=3)
    answers = {problem.prompt: problem for problem in load_problems(DATA, "train", 3)}
    assert len(pairs) == 200
    for pair in pairs:
        assert pair.chosen == answers[pair.prompt].worked
        wrong = find_answer(pair.rejected)
        assert wrong is None or wrong[1] != find_answer(answers[pair.prompt].answer)[1]


def test_pairs_from_problems_are_equal_for_the_same_seed_only():
    config = AnswerPreferences(train_pairs=100)
    first, again, other = (load_preferences(config, DATA, split="train", seed=seed) for seed in (3, 3, 4))
    assert first == again != other


def test_pairs_use_every_problem_of_their_split_once_before_one_comes_twice():
    config = AnswerPreferences(train_pairs=128, heldout_pairs=32)
    train, heldout = ([pair.prompt for pair in load_preferences(config, DATA, split=s, seed=0)] for s in SPLITS)
    prompts = [identity(prompt) for prompt in train]
    assert len(set(prompts[:64])) == len(set(prompts[64:])) == 64
    assert not {*train} & {*heldout}
    assert {*heldout} <= {problem.prompt for problem in load_problems(DATA, "heldout", 0)}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
def test_every_file_format_gives_the_same_pairs_and_each_pair_is_in_one_split(tmp_path, suffix):
    path = tmp_path / f"pairs{suffix}"
    table = pa.Table.from_pylist(PAIRS)
    if suffix == ".jsonl":
        write_json_lines(path, PAIRS)
    elif suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    splits = [load(FilePreferences(path=path, heldout_fraction=0.3), split) for split in SPLITS]
    assert all(splits)
    found = [(pair.prompt, pair.chosen, pair.rejected) for split in splits for pair in split]
    assert sorted(found) == sorted(tuple(pair.values()) for pair in PAIRS)


def test_all_pairs_of_a_prompt_are_in_the_same_split(tmp_path):
    rows = [row | {"rejected": f"{row['rejected']}{again}"} for row in PAIRS for again in range(4)]
    config = FilePreferences(path=write_json_lines(tmp_path / "pairs.jsonl", rows), heldout_fraction=0.5)
    train, heldout = ({pair.prompt for pair in load(config, split)} for split in SPLITS)
    assert train and heldout
    assert not train & heldout


def test_chats_are_read_as_they_are_and_text_is_put_into_the_template(tmp_path):
    question, good = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    rows = [{"question": [question], "good": [good], "bad": "5"}, {"question": "3+3?", "good": "6", "bad": "7"}]
    config = FilePreferences(
        path=write_json_lines(tmp_path / "pairs.jsonl", rows),
        heldout_path=write_json_lines(tmp_path / "heldout.jsonl", [{"question": "1+1?", "good": "2", "bad": "3"}]),
        template="Q: {prompt} A: ",
        prompt_column="question",
        chosen_column="good",
        rejected_column="bad",
    )
    chat, plain = load(config)
    assert (chat.prompt, chat.chosen, chat.rejected) == ((Message("user", "2+2?"),), "4", "5")
    assert plain.prompt == "Q: 3+3? A: "
    assert [pair.prompt for pair in load(config, "heldout")] == ["Q: 1+1? A: "]
