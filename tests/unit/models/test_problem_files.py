"""Problems of files have the same identity and split in every format, and answers keep their values."""

import csv
import json
import unicodedata
from decimal import Decimal
from fractions import Fraction

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rheostat.models.config.data import FileData
from rheostat.models.config.preferences import FilePreferences
from rheostat.models.config.reward_terms import MathReward, NumericReward
from rheostat.models.data.preferences import load_preferences
from rheostat.models.data.problems import Problem, is_heldout, load_problems
from rheostat.models.gate.contamination import contamination
from rheostat.models.inspection.problems import count_problems
from rheostat.models.records.model_input import ModelInput
from rheostat.models.rewards.numerals import read_numeral
from rheostat.models.rewards.rules import build_reward
from rheostat.models.workers import preparation
from tests.support.data_files import write_lines

SPLITS = ("train", "heldout")


def load_answer(path, **settings):
    [problem] = load_problems(FileData(path=path, heldout_path=path, **settings), "train", 0)
    return problem.answer


# ---- identity and split


def describe_boxes(count):
    """Return rows with columns that JSON lines, Parquet and CSV store in different ways."""
    return [
        {"prompt": f"Bóx {n}?", "answer": "1", "size": None if n % 7 == 0 else n, "lid": n % 2 == 0, "width": n / 10}
        for n in range(count)
    ]


def load_splits(path, *columns):
    data = FileData(path=path, heldout_fraction=0.5, environment_columns=columns)
    return [{(p.prompt, p.identity) for p in load_problems(data, split, 0)} for split in SPLITS]


def test_every_format_holds_out_the_same_problems_with_columns(tmp_path):
    boxes, columns = describe_boxes(400), ("size", "lid", "width")
    lines = write_lines(tmp_path / "a.jsonl", *boxes)
    frame = [box | {"size": None if box["size"] is None else float(box["size"])} for box in boxes]
    pq.write_table(pa.Table.from_pylist(frame), tmp_path / "b.parquet")
    kinds = {"prompt": pa.string(), "answer": pa.string(), "size": pa.int16(), "lid": pa.bool_(), "width": pa.float32()}
    narrow = pa.Table.from_pylist(boxes, pa.schema(kinds))
    pq.write_table(narrow, tmp_path / "c.parquet")
    with (tmp_path / "d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, boxes[0].keys())
        writer.writeheader()
        writer.writerows(frame)
    train, heldout = load_splits(lines, *columns)
    assert len(train) + len(heldout) == 400
    assert 160 < len(heldout) < 240
    for name in ("b.parquet", "c.parquet", "d.csv"):
        assert load_splits(tmp_path / name, *columns) == [train, heldout], name


def test_absent_fields_that_parquet_fills_with_null_do_not_move_the_split(tmp_path):
    rows = [
        {"prompt": f"Sort {n}.", "answer": "1", "tests": [{"input": [n, 0.1]} | ({"name": "f"} if n % 2 else {})]}
        for n in range(400)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    lines = load_splits(write_lines(tmp_path / "a.jsonl", *rows), "tests")
    assert load_splits(tmp_path / "b.parquet", "tests") == lines


def test_null_fields_of_tool_calls_and_tools_do_not_move_the_split(tmp_path):
    def build_row(number, others):
        function = {"name": "find", "arguments": {"of": f"Box {number}", **others}}
        call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        prompt = [{"role": "user", "content": "Hi."}, call, {"role": "tool", "content": "a"}]
        return {"prompt": prompt, "answer": "1", "tools": [{"name": "find", **others}]}

    splits = [
        load_splits(write_lines(tmp_path / f"{name}.jsonl", *(build_row(n, others) for n in range(100))))
        for name, others in (("a", {}), ("b", {"page": None}))
    ]
    assert [{identity for _, identity in split} for split in splits[0]] == [
        {identity for _, identity in split} for split in splits[1]
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pa.float32(),
        pa.list_(pa.float32()),
        pa.large_list(pa.float32()),
        pa.list_(pa.float32(), 1),
        pa.map_(pa.string(), pa.float32()),
        pa.struct({"a": pa.list_(pa.float32())}),
        pa.dictionary(pa.int8(), pa.float32()),
    ],
    ids=str,
)
def test_a_32_bit_float_of_a_table_is_the_number_that_json_has(tmp_path, kind):
    is_nested = pa.types.is_struct(kind)
    value = {"a": [0.1]} if is_nested else [0.1] if "list" in str(kind) else 0.1
    value = {"a": 0.1} if pa.types.is_map(kind) else value
    stored = [("a", 0.1)] if pa.types.is_map(kind) else value
    column = pa.array([stored], kind) if "dict" not in str(kind) else pa.array([0.1], pa.float32()).dictionary_encode()
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["1"], "size": column}), tmp_path / "a.parquet")
    data = FileData(path=tmp_path / "a.parquet", heldout_path=tmp_path / "a.parquet", environment_columns=("size",))
    assert load_problems(data, "train", 0)[0].columns == {"size": value}


def test_maps_of_tables_are_objects_as_in_json(tmp_path):
    table = pa.table({"prompt": ["a"], "answer": ["1"], "facts": pa.array([[("x", 1)]], pa.map_("string", "int64"))})
    pq.write_table(table, tmp_path / "a.parquet")
    data = FileData(path=tmp_path / "a.parquet", heldout_path=tmp_path / "a.parquet", environment_columns=("facts",))
    [problem] = load_problems(data, "train", 0)
    assert problem.columns == {"facts": {"x": 1}}
    [stored] = load_problems(data.model_copy(update={"version": 1}), "train", 0)
    assert stored.columns == {"facts": [("x", 1)]}


TWINS = {
    "decomposed letters": lambda text: unicodedata.normalize("NFD", text),
    "outer white space": lambda text: f"\n {text}\t",
    "a line break": lambda text: text.replace(" ", "\r\n"),
    "several spaces": lambda text: text.replace(" ", "   "),
    "letter case": str.upper,
    "compatibility forms": lambda text: text.translate({ord("0") + n: 0xFF10 + n for n in range(10)}),
    "zero-width characters": lambda text: text.replace("caf", "caf\u200b"),
    "a byte order mark": lambda text: f"\ufeff{text}",
}


@pytest.mark.parametrize("change", TWINS.values(), ids=TWINS)
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_near_twins_are_on_the_same_side_of_the_split(tmp_path, change, chat):
    def build(text):
        return [{"role": "user", "content": text}] if chat else text

    texts = [f"Où est le café numéro {n} ?" for n in range(120)]
    rows = [{"prompt": build(text), "answer": "1"} for each in texts for text in (each, change(each))]
    data = FileData(path=write_lines(tmp_path / "a.jsonl", *rows), heldout_fraction=0.5)
    places = {p.source.rpartition(":")[2] for p in load_problems(data, "heldout", 0)}
    assert 60 < len(places) < 180
    assert all((str(2 * n + 1) in places) == (str(2 * n + 2) in places) for n in range(120))
    pairs = [{"prompt": row["prompt"], "chosen": "a", "rejected": "b"} for row in rows]
    preferences = FilePreferences(path=write_lines(tmp_path / "b.jsonl", *pairs), heldout_fraction=0.5)
    heldout = {p.source.rpartition(":")[2] for p in load_preferences(preferences, data, split="heldout", seed=0)}
    assert heldout == places


@pytest.mark.parametrize("change", ["decomposed letters", "outer white space"])
def test_the_identity_ignores_unicode_normalization_and_outer_white_space(tmp_path, change):
    rows = [{"prompt": text, "answer": "1"} for text in ("Le café ?", TWINS[change]("Le café ?"))]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    problems = load_problems(FileData(path=path, heldout_path=path), "train", 0)
    assert {problem.identity for problem in problems} == {"Le café ?"}
    assert [problem.prompt for problem in problems] == [row["prompt"] for row in rows]


def test_problems_that_differ_in_letter_case_only_are_different_problems(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *({"prompt": f"Reverse {word}.", "answer": "1"} for word in ("aB", "Ab")))
    problems = load_problems(FileData(path=path, heldout_path=path), "train", 0)
    assert len({problem.identity for problem in problems}) == 2


def test_runs_with_version_1_keep_the_split_of_the_prompt_as_it_is_written(tmp_path):
    texts = [f" What is {n} + 1?\n" for n in range(100)]
    path = write_lines(tmp_path / "a.jsonl", *({"prompt": text, "answer": "1"} for text in texts))
    data = FileData(path=path, heldout_fraction=0.5, version=1)
    problems = load_problems(data, "heldout", 0)
    assert [problem.prompt for problem in problems] == [text for text in texts if is_heldout(text, 0.5)]
    assert all(problem.identity == problem.split_key == problem.prompt for problem in problems)


def test_held_out_problems_of_a_second_file_that_are_near_twins_are_counted(tmp_path):
    train = write_lines(tmp_path / "a.jsonl", {"prompt": "What is it?", "answer": "1"}, {"prompt": "b", "answer": "1"})
    heldout = write_lines(
        tmp_path / "b.jsonl", {"prompt": "what  is it?", "answer": "1"}, {"prompt": "c", "answer": "1"}
    )
    data = FileData(path=train, heldout_path=heldout)
    counts = count_problems(data, *(load_problems(data, split, 0) for split in SPLITS))
    assert (counts["near_twins"], counts["repeated_problems"]) == (1, 0)


def test_a_suite_problem_in_another_unicode_normalization_counts_as_trained_on():
    assert contamination({"a": "Le cafe\u0301 ?"}, ["le  caf\u00e9 ?"]).near == 1


# ---- answers

LITERALS = {
    "5": "5", "5.0": "5.0", "0.1": "0.1", "1.50": "1.5", "-2e3": "-2000.0", "1e16": "10000000000000000",
    "0.00001": "0.00001", "1E-7": "0.0000001", "1e400": "1" + "0" * 400, "true": "true", "false": "false",
    "123456789012345678901234567890": "123456789012345678901234567890",
    "0.12345678901234567890123": "0.12345678901234567890123",
}  # fmt: skip


@pytest.mark.parametrize(("literal", "text"), LITERALS.items(), ids=LITERALS)
def test_a_number_in_a_json_file_is_the_answer_without_exponent(tmp_path, literal, text):
    row = f'{{"prompt": "a", "answer": {literal}}}'
    assert load_answer(write_lines(tmp_path / "a.jsonl", row)) == text
    (tmp_path / "a.json").write_text(f"[{row}]")
    assert load_answer(tmp_path / "a.json") == text
    if text not in ("true", "false"):
        assert read_numeral(text).value == Fraction(literal)


CELLS = {
    "float": (pa.array([1e16], pa.float64()), "10000000000000000"),
    "small float": (pa.array([1e-5], pa.float64()), "0.00001"),
    "32-bit float": (pa.array([0.1], pa.float32()), "0.1"),
    "large 32-bit float": (pa.array([1e16], pa.float32()), "10000000000000000"),
    "decimal": (pa.array([Decimal("42.500")], pa.decimal128(10, 3)), "42.5"),
    "integral decimal": (pa.array([Decimal("1200.00")], pa.decimal128(38, 18)), "1200"),
    "boolean": (pa.array([True]), "true"),
    "unsigned integer": (pa.array([2**64 - 1], pa.uint64()), "18446744073709551615"),
    "bytes": (pa.array(["é".encode()], pa.binary()), "é"),
    "category": (pa.array(["yes"]).dictionary_encode(), "yes"),
}


@pytest.mark.parametrize(("cells", "text"), CELLS.values(), ids=CELLS)
def test_a_value_in_a_parquet_file_is_the_answer_as_people_write_it(tmp_path, cells, text):
    pq.write_table(pa.table({"prompt": ["a"], "answer": cells}), tmp_path / "a.parquet")
    assert load_answer(tmp_path / "a.parquet") == text


@pytest.mark.parametrize("literal", ["1e16", "0.00001", "-7", "2.5", "123456789012345678901"])
@pytest.mark.parametrize("reward", [NumericReward(), MathReward()], ids=["numeric", "math"])
def test_rewards_read_a_number_of_a_file_back_as_the_same_value(tmp_path, literal, reward):
    answer = load_answer(write_lines(tmp_path / "a.jsonl", f'{{"prompt": "a", "answer": {literal}}}'))
    score = build_reward(reward)
    assert score("a", f"The answer is\n#### {answer}", answer) == 1
    assert score("a", f"#### {json.loads(literal)}", answer) == 1
    assert score("a", f"#### {json.loads(literal) * 3}", answer) == 0


def test_runs_with_version_1_keep_the_text_of_numbers(tmp_path):
    for literal, text in (("1e16", "1e+16"), ("0.00001", "1e-05"), ("NaN", "nan"), ('1, "answer": 2', "2")):
        assert (
            load_answer(write_lines(tmp_path / "a.jsonl", f'{{"prompt": "a", "answer": {literal}}}'), version=1) == text
        )


def test_columns_without_a_name_may_be_repeated_in_csv_files(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer,,\na,1,,\n")
    assert load_answer(tmp_path / "a.csv") == "1"


# ---- prompt ids


def build_prompt(columns):
    problem = Problem("a:1", "A box.", "1", columns=columns, identity_version=2)
    return problem, preparation.TokenizedPrompt("A box.", ModelInput())


def test_prompt_ids_do_not_depend_on_fields_that_parquet_fills_with_null():
    rows = [build_prompt({"size": [{"x": 1}]}), build_prompt({"size": [{"x": 1.0, "y": None}], "lid": None})]
    first, second = preparation._names(*map(list, zip(*rows, strict=True)))
    assert first == second


@pytest.mark.parametrize("version", [1, 2])
def test_a_list_of_ids_excludes_problems_by_their_ids_of_both_versions(tmp_path, version):
    rows = [build_prompt({"size": 7, "lid": None}), build_prompt({"size": 8})]
    problems, prompts = map(list, zip(*rows, strict=True))
    (tmp_path / "ids").write_text(preparation._names(problems[:1], prompts[:1], version=version)[0])
    assert preparation._exclude_listed(problems, prompts, tmp_path / "ids")[0] == problems[1:]
