"""Problems are generated from a seed or read from files, and split into disjoint training and held-out problems."""

import csv
import gzip
import json
import re
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.models.config.data import FileData
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.data import rows as file_rows
from rheostat.models.data.examples import Example, warmup_examples
from rheostat.models.data.problems import Message, is_heldout, load_problems
from tests.support.data_files import number_problems, write_lines
from tests.support.demos import ArithmeticData

GSM8K = Path(__file__).parents[3] / "configs" / "data" / "gsm8k"
SPLITS = ("train", "heldout")


def load_prompts(data, split="train"):
    return [problem.prompt for problem in load_problems(data, split, 0)]


# ---- arithmetic


@given(seed=st.integers(0, 2**63 - 1), operations=st.integers(1, 8))
@settings(max_examples=30)
def test_the_worked_answer_of_an_arithmetic_problem_follows_from_its_question(seed, operations):
    data = ArithmeticData(operations=operations, train_problems=20, heldout_problems=1)
    for problem in load_problems(data, "train", seed):
        total, *amounts = (int(number) for number in re.findall(r"\d+", str(problem.prompt)))
        verbs = re.findall(r"buys|finds|sells|loses", str(problem.prompt))
        *steps, _, final = problem.worked.split()
        for verb, amount, step in zip(verbs, amounts, steps, strict=True):
            sign = "+" if verb in ("buys", "finds") else "-"
            after = total + amount if sign == "+" else total - amount
            assert step == f"{total}{sign}{amount}={after}"
            assert 0 <= after <= 20
            total = after
        assert problem.answer == f"#### {final}" == f"#### {total}"


def test_the_seed_decides_the_arithmetic_problems():
    first, again, other = (load_problems(ArithmeticData(), "train", seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_training_question_is_never_a_held_out_question_of_any_seed():
    data = ArithmeticData(operations=1, train_problems=3000)
    train, heldout = (
        {problem.prompt for seed in range(3) for problem in load_problems(data, split, seed)} for split in SPLITS
    )
    assert train.isdisjoint(heldout)


def test_the_held_out_share_is_about_the_configured_share():
    assert 900 < sum(is_heldout(f"question {n}", 0.25) for n in range(4000)) < 1100


# ---- warm-up


def test_warm_up_has_the_configured_share_of_worked_answers_and_mostly_wrong_guesses():
    data, warmup = ArithmeticData(), SupervisedWarmup(steps=100, batch_size=40, worked_answer_fraction=0.25)
    problems = {problem.prompt: problem for problem in load_problems(data, "train", 5)}
    examples = [(prompt, completion) for prompt, completion, *_ in warmup_examples(data, warmup, 5)]
    assert len(examples) == 4000
    worked = [(prompt, completion) for prompt, completion in examples if "=" in completion]
    assert 900 < len(worked) < 1100
    assert all(completion == problems[prompt].worked for prompt, completion in worked)
    guesses = [(prompt, completion) for prompt, completion in examples if "=" not in completion]
    assert sum(problems[prompt].answer == guess for prompt, guess in guesses) < 0.1 * len(guesses)


def test_an_epoch_of_the_warm_up_contains_every_problem_once_in_its_own_order():
    data = ArithmeticData(train_problems=50)
    prompts = [prompt for prompt, *_ in warmup_examples(data, SupervisedWarmup(steps=10, batch_size=10), 0)]
    assert len(set(prompts[:50])) == len(set(prompts[50:])) == 50
    assert prompts[:50] != prompts[50:]


def test_warm_up_on_files_uses_the_answers_of_the_file(tmp_path):
    data = FileData(path=write_lines(tmp_path / "a.jsonl", *number_problems(40)))
    assert len(warmup_examples(data, SupervisedWarmup(steps=5, batch_size=4), 0)) == 20
    assert Example("What is 7 + 1?", "8") in warmup_examples(data, SupervisedWarmup(steps=20, batch_size=4), 0)
    with pytest.raises(BadInput, match=r"data\.answer_column.*\[warmup\]"):
        warmup_examples(data.model_copy(update={"answer_column": None}), SupervisedWarmup(), 0)


# ---- files


def write_arrow(path: Path, table: pa.Table, open_writer) -> Path:
    with pa.OSFile(str(path), "wb") as sink, open_writer(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def write_csv(path: Path, rows: list[dict[str, str]], *, delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:  # with a byte order mark, as spreadsheets save it
        writer = csv.DictWriter(file, rows[0].keys(), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def compress(path: Path) -> Path:
    target = path.with_name(f"{path.name}.gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    return target


def compress_zstd(path: Path) -> Path:
    target = path.with_name(f"{path.name}.zst")
    with pa.output_stream(target, compression="zstd") as packed:
        packed.write(path.read_bytes())
    return target


def test_every_format_gives_the_same_problems_compressed_or_not(tmp_path):
    rows = [row | {"prompt": f'{row["prompt"]}\nSay\t"one", two.'} for row in number_problems(30)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "f.json").write_text(json.dumps(rows, indent=2))
    texts = [
        write_lines(tmp_path / "a.jsonl", *rows),
        tmp_path / "f.json",
        write_csv(tmp_path / "g.csv", rows),
        write_csv(tmp_path / "h.tsv", rows, delimiter="\t"),
    ]
    paths = [
        *(path for text in texts for path in (text, compress(text), compress_zstd(text))),
        tmp_path / "c.parquet",
        write_arrow(tmp_path / "d.arrow", table, pa.ipc.new_file),
        write_arrow(tmp_path / "e.arrow", table, pa.ipc.new_stream),
        write_arrow(tmp_path / "i.feather", table, pa.ipc.new_file),
    ]
    contents = [[(p.prompt, p.answer) for p in load_problems(FileData(path=path), "train", 0)] for path in paths]
    assert contents[0]
    assert contents.count(contents[0]) == len(paths) == 16


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.json.gz"])
def test_a_compressed_file_with_an_endless_line_is_refused_without_reading_all_of_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr(file_rows, "MAX_LINE_MEBIBYTES", 1)
    monkeypatch.setattr(file_rows, "MAX_ARRAY_MEBIBYTES", 1)
    content = tmp_path / name
    with gzip.open(content, "wb", compresslevel=1) as packed:
        packed.writelines(b"0" * 2**20 for _ in range(3))
        packed.flush()
    content.write_bytes(content.read_bytes()[:-8] + b"torn")  # reading to the end would report another error
    with pytest.raises(BadInput, match=r"a\.\w+\.gz.*1 MiB, the maximum"):
        load_problems(FileData(path=content), "train", 0)


def test_values_of_a_csv_file_stay_text(tmp_path):
    path = write_csv(tmp_path / "a.csv", [{"prompt": "007", "answer": "1e3"}, {"prompt": "true", "answer": "01"}])
    problems = load_problems(FileData(path=path, heldout_path=path), "train", 0)
    assert [(p.prompt, p.answer) for p in problems] == [("007", "1e3"), ("true", "01")]


def test_the_system_message_is_put_before_chats_without_one_and_the_split_stays(tmp_path):
    own, brief = {"role": "system", "content": "Own."}, Message("system", "Be brief.")
    chats = [[own, {"role": "user", "content": "1+1?"}], [{"role": "user", "content": "2+2?"}]]
    rows = [*({"prompt": chat, "answer": "x"} for chat in chats), *number_problems(30)]
    plain = FileData(path=write_lines(tmp_path / "a.jsonl", *rows))
    briefed = plain.model_copy(update={"template": "Q: {prompt}", "system": "Be brief."})
    for split in SPLITS:
        for before, after in zip(load_prompts(plain, split), load_prompts(briefed, split), strict=True):
            match before:
                case str(text):
                    assert after == (brief, Message("user", f"Q: {text}"))
                case (Message("system"), *_):
                    assert after == before
                case turns:
                    assert after == (brief, *turns)


def test_splits_of_one_file_are_disjoint_and_complete_and_new_rows_do_not_move_problems(tmp_path):
    few = FileData(path=write_lines(tmp_path / "few.jsonl", *number_problems(200)), heldout_fraction=0.2)
    more = FileData(path=write_lines(tmp_path / "more.jsonl", *number_problems(400)), heldout_fraction=0.2)
    train, heldout = (set(load_prompts(few, split)) for split in SPLITS)
    assert train.isdisjoint(heldout)
    assert len(train | heldout) == 200
    assert heldout < set(load_prompts(more, "heldout"))


def test_the_template_is_applied_to_both_files_and_does_not_move_the_split(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *number_problems(50))
    for split in SPLITS:
        expected = [f"Q: {prompt}\nA: {{x}}" for prompt in load_prompts(FileData(path=path), split)]
        assert load_prompts(FileData(path=path, template="Q: {prompt}\nA: {x}"), split) == expected
    both = FileData(path=path, heldout_path=path, template="Q: {prompt}")
    assert load_prompts(both, "heldout")[0] == "Q: What is 0 + 1?"


def test_a_chat_keeps_its_turns(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    path = write_lines(tmp_path / "a.jsonl", {"prompt": chat, "answer": 2})
    [problem] = load_problems(FileData(path=path, heldout_path=path), "train", 0)
    assert problem.prompt == (Message("system", "Be brief."), Message("user", "1+1?"))
    assert problem.answer == "2"


def test_the_bundled_gsm8k_files_are_complete_and_their_splits_are_disjoint():
    data = FileData(path=GSM8K / "train.jsonl", heldout_path=GSM8K / "heldout.jsonl", prompt_column="question")
    train, heldout = (load_problems(data, split, 0) for split in SPLITS)
    assert (len(train), len(heldout)) == (192, 64)
    assert {p.prompt for p in train}.isdisjoint(p.prompt for p in heldout)
    assert all("\n#### " in p.answer for p in (*train, *heldout))


# ---- columns for environments


def test_environments_receive_the_named_columns_with_their_values_in_the_file(tmp_path):
    row = {"prompt": "A box.", "answer": "7", "size": 7, "more": {"lid": [True, None, 0.5]}}
    path = write_lines(tmp_path / "boxes.jsonl", row)
    data = FileData(path=path, heldout_path=path, environment_columns=("more", "size"))
    [problem] = load_problems(data, "train", 0)
    assert problem.columns == {"size": 7, "more": {"lid": [True, None, 0.5]}}
    [plain] = load_problems(FileData(path=path, heldout_path=path), "train", 0)
    assert plain.columns == {}
    assert plain.identity == "A box."


def test_rows_with_one_prompt_and_different_columns_are_different_problems_in_the_split(tmp_path):
    path = write_lines(tmp_path / "boxes.jsonl", *({"prompt": "A box.", "answer": "", "size": n} for n in range(80)))
    data = FileData(path=path, answer_column=None, environment_columns=("size",), heldout_fraction=0.3)
    train, heldout = (load_problems(data, split, 0) for split in SPLITS)
    assert len(train) + len(heldout) == 80
    assert 8 < len(heldout) < 42
    assert len({problem.identity for problem in (*train, *heldout)}) == 80


# ---- several faults in one file


def refuse_file(path: Path, **settings: object) -> str:
    with pytest.raises(BadInput) as refused:
        load_problems(FileData(path=path, heldout_path=path, **settings), "train", 0)
    return str(refused.value)


def test_all_faults_of_a_file_are_reported_in_one_line(tmp_path):
    faults = ["{", {"prompt": "", "answer": "1"}, {"prompt": "a"}, {"prompt": " ", "answer": "1"}, [1]]
    path = write_lines(tmp_path / "a.jsonl", *number_problems(2), *faults)
    message = refuse_file(path)
    assert "\n" not in message
    assert [re.findall(r"a\.jsonl:\d+", part) for part in message.split("; ")] == [
        ["a.jsonl:3"], ["a.jsonl:4", "a.jsonl:6"], ["a.jsonl:5"], ["a.jsonl:7"]
    ]  # fmt: skip


def test_only_the_first_of_very_many_faults_are_listed_and_the_rest_is_counted(tmp_path):
    same = write_lines(tmp_path / "a.jsonl", *({"prompt": None, "answer": "1"} for _ in range(1000)))
    message = refuse_file(same)
    assert re.search(rf"\(also {same}:2, {same}:3, {same}:4\); .*\b996\b", message)
    assert message.count("NoneType") == 1
    different = write_lines(tmp_path / "b.jsonl", *({"prompt": n, "answer": "1"} for n in range(1000)))
    message = refuse_file(different)
    assert re.search(rf"{different}:6: prompt: .*int 5; .*\b994\b", message)
    assert len(message.split("; ")) == 7


def test_the_limit_counts_problems_without_blank_lines_and_faults_after_it_are_ignored(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", number_problems(1)[0], "", *number_problems(2), "{")
    assert len(load_prompts(FileData(path=path, heldout_path=path, limit=3))) == 3
    assert f"{path}:5: " in refuse_file(path, limit=4)


def test_a_small_json_file_is_read_with_little_memory(tmp_path):
    (tmp_path / "rows.json").write_text('[{"prompt": "one"}]')
    tracemalloc.start()
    [(_, row)] = file_rows.read_rows(tmp_path / "rows.json", ["prompt"], InputErrors())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert row == {"prompt": "one"} and peak < 2**24
