"""Problems: made from a seed, read from files, split without overlap, and refused with the place of the fault."""

import csv
import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.errors import BadInput
from models.config.data import ArithmeticData, FileData
from models.config.training import WarmupConfig
from models.data.examples import Example, warmup_examples
from models.data.problems import Message, is_heldout, load_problems

GSM8K = Path(__file__).parents[3] / "configs" / "data" / "gsm8k"


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def numbered(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(count)]


# ---- arithmetic


@given(seed=st.integers(0, 2**63 - 1), operations=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_every_worked_answer_is_right_and_follows_from_its_question(seed, operations):
    data = ArithmeticData(operations=operations, train_problems=20, heldout_problems=1)
    for problem in load_problems(data, "train", seed):
        total, *amounts = (int(number) for number in re.findall(r"\d+", str(problem.prompt)))
        verbs = re.findall(r"buys|finds|sells|loses", str(problem.prompt))
        *work, _, final = problem.worked.split()
        for verb, amount, step in zip(verbs, amounts, work, strict=True):
            sign = "+" if verb in ("buys", "finds") else "-"
            after = total + amount if sign == "+" else total - amount
            assert step == f"{total}{sign}{amount}={after}"
            assert 0 <= after <= 20
            total = after
        assert problem.answer == f"#### {final}" == f"#### {total}"


def test_the_same_seed_makes_the_same_problems_and_another_seed_others():
    first, again, other = (load_problems(ArithmeticData(), "train", seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_training_question_is_never_a_heldout_question_of_any_seed():
    data = ArithmeticData(operations=1, train_problems=3000)
    train = {problem.prompt for seed in range(3) for problem in load_problems(data, "train", seed)}
    heldout = {problem.prompt for seed in range(3) for problem in load_problems(data, "heldout", seed)}
    assert train.isdisjoint(heldout)


def test_asking_for_more_questions_than_exist_is_bad_input():
    with pytest.raises(BadInput, match=r"data.heldout_problems = 3000: only \d+ different questions with 1 operations"):
        load_problems(ArithmeticData(operations=1, heldout_problems=3000), "heldout", 0)


def test_the_heldout_share_is_about_what_was_asked_for():
    kept = sum(is_heldout(f"question {n}", 0.25) for n in range(4000))
    assert 900 < kept < 1100


# ---- warm-up


def test_warm_up_shows_the_asked_share_of_worked_answers_and_mostly_wrong_guesses():
    data, warmup = ArithmeticData(), WarmupConfig(steps=100, batch_size=40, worked_fraction=0.25)
    answers = {problem.prompt: problem for problem in load_problems(data, "train", 5)}
    examples = warmup_examples(data, warmup, 5)
    assert len(examples) == 4000
    worked = [completion for _, completion, *_ in examples if "=" in completion]
    assert 900 < len(worked) < 1100
    assert all(completion == answers[prompt].worked for prompt, completion, *_ in examples if "=" in completion)
    guesses = [(prompt, completion) for prompt, completion, *_ in examples if "=" not in completion]
    assert sum(answers[prompt].answer == guess for prompt, guess in guesses) < 0.1 * len(guesses)


def test_a_pass_of_the_warm_up_shows_every_problem_once():
    data = ArithmeticData(train_problems=50)
    prompts = [prompt for prompt, *_ in warmup_examples(data, WarmupConfig(steps=10, batch_size=10), 0)]
    assert len(set(prompts[:50])) == len(set(prompts[50:])) == 50
    assert prompts[:50] != prompts[50:]


def test_warm_up_on_files_imitates_their_answers(tmp_path):
    data = FileData(path=write_lines(tmp_path / "a.jsonl", *numbered(40)))
    examples = warmup_examples(data, WarmupConfig(steps=5, batch_size=4), 0)
    assert len(examples) == 20
    assert Example("What is 7 + 1?", "8") in warmup_examples(data, WarmupConfig(steps=20, batch_size=4), 0)


def test_warm_up_without_answers_is_bad_input(tmp_path):
    data = FileData(path=write_lines(tmp_path / "a.jsonl", *numbered(40)), answer_column=None)
    with pytest.raises(BadInput, match=r"set data.answer_column, or remove \[warmup\]"):
        warmup_examples(data, WarmupConfig(), 0)


# ---- files


def arrow_file(path: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def arrow_stream(path: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def csv_file(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as content:  # as spreadsheets write it
        written = csv.DictWriter(content, rows[0].keys())
        written.writeheader()
        written.writerows(rows)
    return path


def packed(path: Path) -> Path:
    target = path.with_name(f"{path.name}.gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    return target


def test_every_format_packed_or_not_holds_the_same_problems(tmp_path):
    rows = [row | {"prompt": f'{row["prompt"]}\nSay "one", two.'} for row in numbered(30)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "f.json").write_text(json.dumps(rows, indent=2))
    texts = [write_lines(tmp_path / "a.jsonl", *rows), tmp_path / "f.json", csv_file(tmp_path / "g.csv", rows)]
    paths = [
        *(path for text in texts for path in (text, packed(text))),
        tmp_path / "c.parquet",
        arrow_file(tmp_path / "d.arrow", table),
        arrow_stream(tmp_path / "e.arrow", table),
    ]
    read = [[(p.prompt, p.answer) for p in load_problems(FileData(path=path), "train", 0)] for path in paths]
    assert read[0]
    assert read.count(read[0]) == len(paths) == 9


def test_what_is_in_a_csv_is_text_as_it_stands(tmp_path):
    path = csv_file(tmp_path / "a.csv", [{"prompt": "007", "answer": "1e3"}, {"prompt": "true", "answer": "01"}])
    found = load_problems(FileData(path=path, heldout_path=path), "train", 0)
    assert [(p.prompt, p.answer) for p in found] == [("007", "1e3"), ("true", "01")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'prompt,answer\n"two\nlines",1\nx\n', r"a.csv:4: expected 2 columns, as in the first line, found 1"),
        ("a.csv", b'prompt,answer\n"open,1\n', r"a.csv:2: not CSV in UTF-8: unexpected end of data"),
        ("a.csv", b"prompt,answer\n\xff,1\n", r"a.csv:\d: not CSV in UTF-8: 'utf-8' codec"),
        ("a.json", b'{"prompt": "a"}', r"a.json: expected a JSON array of objects, found dict"),
        ("a.json", b'{"prompt": "a"}\n{"prompt": "b"}', r"a.json: not JSON: .* per line is called .jsonl"),
        ("a.json", b'[{"prompt": "a", "answer": "1"}, 3]', r"a.json\[1\]: expected a JSON object, found int"),
        ("a.jsonl.gz", b"plain", r"a.jsonl.gz: cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}" * 99, mtime=0)[:-9],
            r"a.jsonl.gz: cannot be read: Compressed file ended before",
        ),
        ("a.gz", b"", r"a.gz: unknown suffix '.gz', expected one of .* .arrow, .jsonl.gz, .json.gz, .csv.gz"),
    ],
)
def test_files_that_are_not_what_their_suffix_says_are_bad_input(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message) as raised:
        load_problems(FileData(path=tmp_path / name), "train", 0)
    assert "\n" not in str(raised.value)


def test_a_system_message_stands_before_every_chat_that_has_none_and_moves_no_problem(tmp_path):
    own, brief = {"role": "system", "content": "Own."}, Message("system", "Be brief.")
    chats = [[own, {"role": "user", "content": "1+1?"}], [{"role": "user", "content": "2+2?"}]]
    path = write_lines(tmp_path / "a.jsonl", *({"prompt": chat, "answer": "x"} for chat in chats), *numbered(30))
    plain, told = FileData(path=path), FileData(path=path, template="Q: {prompt}", system="Be brief.")
    for split in ("train", "heldout"):
        for before, after in zip(load_problems(plain, split, 0), load_problems(told, split, 0), strict=True):
            match before.prompt:
                case str(text):
                    assert after.prompt == (brief, Message("user", f"Q: {text}"))
                case (Message("system"), *_):
                    assert after.prompt == before.prompt
                case turns:
                    assert after.prompt == (brief, *turns)


def test_without_a_second_file_the_splits_are_disjoint_complete_and_survive_new_rows(tmp_path):
    few = FileData(path=write_lines(tmp_path / "few.jsonl", *numbered(200)), heldout_fraction=0.2)
    more = FileData(path=write_lines(tmp_path / "more.jsonl", *numbered(400)), heldout_fraction=0.2)
    train, heldout = ({p.prompt for p in load_problems(few, split, 0)} for split in ("train", "heldout"))
    assert train.isdisjoint(heldout)
    assert len(train | heldout) == 200
    assert heldout < {p.prompt for p in load_problems(more, "heldout", 0)}


def test_the_template_surrounds_plain_prompts_of_both_files_and_does_not_move_the_split(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *numbered(50))
    plain = FileData(path=path)
    wrapped = FileData(path=path, template="Q: {prompt}\nA: {x}")
    for split in ("train", "heldout"):
        expected = [f"Q: {p.prompt}\nA: {{x}}" for p in load_problems(plain, split, 0)]
        assert [p.prompt for p in load_problems(wrapped, split, 0)] == expected
    both = FileData(path=path, heldout_path=path, template="Q: {prompt}")
    assert load_problems(both, "heldout", 0)[0].prompt == "Q: What is 0 + 1?"


def test_chats_keep_their_turns(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    path = write_lines(tmp_path / "a.jsonl", {"prompt": chat, "answer": 2})
    [problem] = load_problems(FileData(path=path, heldout_path=path), "train", 0)
    assert problem.prompt == (Message("system", "Be brief."), Message("user", "1+1?"))
    assert problem.answer == "2"


def test_the_limit_counts_problems_not_blank_lines(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", numbered(1)[0], "", *numbered(9))
    assert len(load_problems(FileData(path=path, heldout_path=path, limit=5), "train", 0)) == 5


GOOD = '{"prompt": "a", "answer": "b"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', r"a.jsonl:2: not a JSON line: .* line 1 column 15"),
        ("[1]", r"a.jsonl:2: expected a JSON object, found list"),
        (
            '{"promt": "a", "answer": "b"}',
            r"a.jsonl:2: no column 'prompt', did you mean 'promt'\? \(columns: promt, ans",
        ),
        ('{"prompt": 3, "answer": "b"}', r"a.jsonl:2: prompt: expected text, found int 3"),
        ('{"prompt": " ", "answer": "b"}', r"a.jsonl:2: prompt: expected text, found none"),
        ('{"prompt": "a", "answer": null}', r"a.jsonl:2: answer: expected text, found NoneType"),
        ('{"prompt": "a", "answer": true}', r"a.jsonl:2: answer: expected text, found bool True"),
        ('{"prompt": "\\ud800", "answer": "b"}', r"a.jsonl:2: prompt: not Unicode text"),
        ('{"prompt": [], "answer": "b"}', r"a.jsonl:2: prompt: .* found no message"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', r"a.jsonl:2: prompt\[0\] is no chat message"),
        ('{"prompt": [{"role": "assistant", "content": "x"}], "answer": "b"}', r"assistant's message last"),
        ("[" * 100_000, r"a.jsonl:2: not a JSON line"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path, line, message):
    path = write_lines(tmp_path / "a.jsonl", GOOD, line)
    with pytest.raises(BadInput, match=message) as raised:
        load_problems(FileData(path=path), "train", 0)
    assert "\n" not in str(raised.value)


def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(BadInput, match=r"a.jsonl:2: not a JSON line: 'utf-8' codec"):
        load_problems(FileData(path=tmp_path / "a.jsonl"), "train", 0)


def test_a_wrong_type_in_a_table_is_named_with_its_row(tmp_path):
    pq.write_table(pa.table({"prompt": ["a", None], "answer": ["1", "2"]}), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"a.parquet row 1: prompt: expected text, found NoneType"):
        load_problems(FileData(path=tmp_path / "a.parquet"), "train", 0)


def test_a_table_without_the_column_names_the_ones_it_has(tmp_path):
    pq.write_table(pa.table({"question": ["a"], "answer": ["1"]}), tmp_path / "a.parquet")
    with pytest.raises(BadInput, match=r"a.parquet: no column 'prompt' \(columns: question, answer\)"):
        load_problems(FileData(path=tmp_path / "a.parquet"), "train", 0)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_torn_table_is_bad_input(tmp_path, name):
    (tmp_path / name).write_bytes(b"ARROW1\0\0torn")
    with pytest.raises(BadInput, match=rf"{name}: not a {name[2:]} file"):
        load_problems(FileData(path=tmp_path / name), "train", 0)


def test_files_that_cannot_be_data_are_bad_input(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    (tmp_path / "a.txt").write_text("prompt\n")
    for name, message in [
        ("missing.jsonl", "no such file"),
        ("empty.jsonl", "no problems, the file is empty"),
        ("folder.jsonl", "is a directory"),
        ("a.csv", "no problems, the file is empty"),
        ("a.txt", r"unknown suffix '.txt', expected one of .jsonl, .json, .csv, .parquet, .arrow"),
    ]:
        with pytest.raises(BadInput, match=message):
            load_problems(FileData(path=tmp_path / name), "train", 0)


def test_a_split_without_problems_is_bad_input(tmp_path):
    data = FileData(path=write_lines(tmp_path / "a.jsonl", *numbered(3)), heldout_fraction=0.001)
    with pytest.raises(BadInput, match=r"heldout_fraction = 0.001 leaves no heldout problem"):
        load_problems(data, "heldout", 0)


def test_a_template_without_a_place_for_the_prompt_is_bad_input(tmp_path):
    data = FileData(path=write_lines(tmp_path / "a.jsonl", *numbered(3)), template="Solve it.")
    with pytest.raises(BadInput, match=r"has no \{prompt\}"):
        load_problems(data, "train", 0)


def test_the_gsm8k_that_ships_is_read_whole_and_its_splits_do_not_meet():
    data = FileData(path=GSM8K / "train.jsonl", heldout_path=GSM8K / "heldout.jsonl", prompt_column="question")
    train, heldout = load_problems(data, "train", 0), load_problems(data, "heldout", 0)
    assert (len(train), len(heldout)) == (192, 64)
    assert {p.prompt for p in train}.isdisjoint(p.prompt for p in heldout)
    assert all("\n#### " in p.answer for p in (*train, *heldout))


# ---- what environments are told


def test_environments_are_told_the_columns_that_are_named_as_the_file_has_them(tmp_path):
    row = {"prompt": "A box.", "answer": "7", "size": 7, "more": {"lid": [True, None, 0.5]}}
    path = write_lines(tmp_path / "boxes.jsonl", row)
    data = FileData(path=path, heldout_path=path, environment_columns=("more", "size"))
    [problem] = load_problems(data, "train", 0)
    assert problem.columns == {"size": 7, "more": {"lid": [True, None, 0.5]}}
    [plain] = load_problems(FileData(path=path, heldout_path=path), "train", 0)
    assert plain.columns == {}
    assert plain.identity == "A box."


def test_rows_of_one_prompt_and_other_facts_are_other_problems_and_split_by_them(tmp_path):
    path = write_lines(tmp_path / "boxes.jsonl", *({"prompt": "A box.", "answer": "", "size": n} for n in range(80)))
    data = FileData(path=path, answer_column=None, environment_columns=("size",), heldout_fraction=0.3)
    train, heldout = (load_problems(data, split, 0) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 80
    assert 8 < len(heldout) < 42
    assert len({problem.identity for problem in (*train, *heldout)}) == 80


def test_a_column_for_environments_that_is_not_there_or_no_json_is_bad_input(tmp_path):
    path = write_lines(tmp_path / "boxes.jsonl", {"prompt": "A box.", "answer": "", "size": 7})
    misspelt = FileData(path=path, answer_column=None, environment_columns=("sise",))
    with pytest.raises(BadInput, match=r"boxes\.jsonl:1: no column 'sise', did you mean 'size'\?"):
        load_problems(misspelt, "train", 0)
    table = pa.table({"prompt": ["A box."], "size": [b"7"]})
    pq.write_table(table, tmp_path / "boxes.parquet")
    data = FileData(path=tmp_path / "boxes.parquet", answer_column=None, environment_columns=("size",))
    with pytest.raises(BadInput, match=r"boxes\.parquet row 0: size: expected a JSON value, found b'7'"):
        load_problems(data, "train", 0)
    for columns, message in ((("answer",), "'answer' is what an environment is told anyway"), (("a", "a"), "once")):
        with pytest.raises(ValueError, match=message):
            FileData(path=path, environment_columns=columns)


# ---- all that is wrong with a file


def refusal_of(path: Path, **settings: object) -> str:
    with pytest.raises(BadInput) as refused:
        load_problems(FileData(path=path, heldout_path=path, **settings), "train", 0)
    return str(refused.value)


def test_all_that_is_wrong_with_a_file_is_told_in_one_line(tmp_path):
    lines = [*numbered(2), "{", {"prompt": "", "answer": "1"}, {"prompt": "a"}, {"prompt": " ", "answer": "1"}, [1]]
    path = write_lines(tmp_path / "a.jsonl", *lines)
    assert refusal_of(path) == (
        f"{path}:3: not a JSON line: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); "
        f"{path}:4: prompt: expected text, found none (also {path}:6); "
        f"{path}:5: no column 'answer' (columns: prompt); "
        f"{path}:7: expected a JSON object, found list"
    )


def test_of_very_many_faults_the_others_are_counted(tmp_path):
    alike = write_lines(tmp_path / "a.jsonl", *({"prompt": None, "answer": "1"} for _ in range(1000)))
    told = refusal_of(alike)
    assert told.endswith(f" (also {alike}:2, {alike}:3, {alike}:4); and 996 more")
    assert told.count("found NoneType") == 1
    different = write_lines(tmp_path / "b.jsonl", *({"prompt": n, "answer": "1"} for n in range(1000)))
    told = refusal_of(different)
    assert f"{different}:6: prompt: expected text, found int 5; and 994 more" in told
    assert len(told.split("; ")) == 7


def test_faults_behind_the_limit_are_not_looked_for(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *numbered(3), "{")
    assert len(load_problems(FileData(path=path, heldout_path=path, limit=3), "train", 0)) == 3
    assert refusal_of(path, limit=4).startswith(f"{path}:4: not a JSON line")


def test_ragged_lines_of_a_csv_are_told_together(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\nq,1,2\nq,1\nq\n")
    told = refusal_of(tmp_path / "a.csv")
    assert told.count("a.csv:") == 2
    assert re.search(r"a.csv:2: expected 2 columns, .* found 3; .*a.csv:4: expected 2 columns, .* found 1$", told)
