"""Shapes of users' data: chats of ShareGPT and OpenAI, nested fields, and folders of shards."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.models.config.data import FileData, MixtureData
from rheostat.models.data.files import read_problems
from rheostat.models.data.image_files import image_files
from rheostat.models.data.messages import read_messages
from rheostat.models.data.nested import find_field
from rheostat.models.data.problems import load_problems
from rheostat.models.data.reading import report_reading
from rheostat.models.data.rows import read_rows
from tests.support.data_files import write_lines
from tests.support.pictures import picture

CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": "it"}}}


# ---- chats


def encode_chat(turns):
    return [message.encode() for message in read_messages("a.jsonl:1", turns, "conversations")]


@pytest.mark.parametrize(
    ("author", "role"),
    [
        ("human", "user"), ("user", "user"), ("Human", "user"),
        ("gpt", "assistant"), ("assistant", "assistant"), ("chatgpt", "assistant"), ("model", "assistant"),
        ("system", "system"), ("tool", "tool"), ("observation", "tool"),
    ],
)  # fmt: skip
def test_turns_of_sharegpt_become_messages(author, role):
    assert encode_chat([{"from": author, "value": "Hi."}]) == [{"role": role, "content": "Hi."}]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "find", "arguments": {"what": "it"}}', [CALL]),
        ('[{"name": "find", "arguments": {"what": "it"}}]', [CALL]),
        ('{"type": "function", "function": {"name": "find", "arguments": {"what": "it"}}}', [CALL]),
    ],
)
def test_function_calls_of_sharegpt_become_tool_calls(text, calls):
    assert encode_chat([{"from": "function_call", "value": text}]) == [{"role": "assistant", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<image>\nWhat is it?", [None, "\nWhat is it?"]),
        ("Is <image> like <image>?", ["Is ", None, " like ", None, "?"]),
        ("<image>\n<image>", [None, None]),
        ("What is it?", "What is it?"),
    ],
)
@pytest.mark.parametrize(("author", "value"), [("from", "value"), ("role", "content")])
def test_image_marks_in_messages_become_images_in_their_places(author, value, text, content, tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    marks = text.count("<image>")
    row = {"conversations": [{author: "user", value: text}], "images": ["a.png"] * marks, "answer": "a"}
    write_lines(tmp_path / "rows.jsonl", row)
    data = FileData(path=tmp_path / "rows.jsonl", prompt_column="conversations", images_column="images")
    [problem] = read_problems(data.path, data)
    parts = [part if isinstance(part, str) else None for part in problem.prompt[0].parts]
    assert parts == ([content] if isinstance(content, str) else content)
    assert len(problem.images) == marks
    text_only = data.model_copy(update={"image_mark": ""})
    [problem] = read_problems(data.path, text_only)
    assert problem.prompt[0].content == text


SYSTEM_CHAT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi."}]


@pytest.mark.parametrize(
    ("column", "chat", "roles"),
    [
        ("Be brief.", SYSTEM_CHAT[1:], ["system", "user"]),
        ("Be brief.", SYSTEM_CHAT, ["system", "user"]),
        ("", SYSTEM_CHAT[1:], ["user"]),
        (None, SYSTEM_CHAT[1:], ["user"]),
        ("Be brief.", "Hi.", None),
    ],
)
def test_the_column_system_is_the_system_message_of_a_chat(column, chat, roles, tmp_path):
    write_lines(tmp_path / "rows.jsonl", {"prompt": chat, "system": column, "answer": "a"})
    [problem] = read_problems(tmp_path / "rows.jsonl", FileData(path=tmp_path / "rows.jsonl"))
    assert problem.prompt == chat if roles is None else [each.role for each in problem.prompt] == roles


def test_text_parts_of_both_chat_formats_are_read():
    parts = [{"type": "text", "text": "Hi"}, {"type": "input_text", "text": " there."}, {"type": "image"}]
    expected = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there."}, {"type": "image"}]
    for turn in ({"from": "human", "value": parts}, {"role": "user", "content": parts}):
        assert encode_chat([turn]) == [{"role": "user", "content": expected}]


def test_messages_with_a_role_keep_their_role():
    assert encode_chat([{"role": "human", "content": "Hi."}]) == [{"role": "human", "content": "Hi."}]


@pytest.mark.parametrize(
    ("turn", "parts"),
    [
        ({"from": "humna", "value": "Hi."}, ["conversations[0].from", "humna", "human"]),
        ({"from": "human"}, ["conversations[0]", "no text"]),
        ({"from": "function_call", "value": "find()"}, ["conversations[0].value", "JSON"]),
        ({"from": "gpt", "value": "Hi.", "weight": 1}, ["conversations[0].weight", "message_fields"]),
    ],
)
def test_turns_that_are_no_messages_are_refused_with_their_place(turn, parts):
    with pytest.raises(BadInput) as error:
        encode_chat([turn])
    assert all(part in str(error.value) for part in ("a.jsonl:1", *parts)), error.value


QUESTION, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
TURNS = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
IN_PARTS = [
    {"role": role, "content": [{"type": "text", "text": text}]}
    for role, text in (("user", "2 + 2?"), ("assistant", "4"))
]
RECOGNIZED = [
    ({"messages": [QUESTION, ANSWER]}, "OpenAI chats in column messages"),
    ({"conversations": TURNS}, "ShareGPT chats in column conversations"),
    ({"id": 1, "data": {"conversation": TURNS}}, "ShareGPT chats in column data.conversation"),
    ({"prompt": [QUESTION, ANSWER]}, "OpenAI chats in column prompt"),
    ({"messages": IN_PARTS}, "OpenAI chats in column messages"),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("row", "name"), RECOGNIZED)
def test_whole_chats_are_recognized_and_their_last_message_is_the_answer(row, name, suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    write_lines(path, row) if suffix == ".jsonl" else pq.write_table(pa.Table.from_pylist([row]), path)
    data = FileData(path=path, heldout_path=path)
    [problem] = load_problems(data, "train", 0)
    assert [(message.role, message.text) for message in problem.prompt] == [("user", "2 + 2?")]
    assert problem.answer == "4"
    [note] = report_reading(data, "train", "heldout").notes
    assert f"recognized as {name}" in note
    assert "the last message of each chat is the reference answer" in note


def test_recognized_chats_have_the_identity_of_the_same_messages_in_a_prompt_column(tmp_path):
    def identify(name, row):
        path = write_lines(tmp_path / name, row)
        return load_problems(FileData(path=path, heldout_path=path), "train", 0)[0].identity

    written = identify("a.jsonl", {"prompt": [QUESTION], "answer": "4"})
    assert {identify("b.jsonl", {"conversations": TURNS}), identify("c.jsonl", {"messages": [QUESTION, ANSWER]})} == {
        written
    }


@pytest.mark.parametrize(
    "row",
    [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": [QUESTION], "answer": "4"}, {"prompt": [QUESTION], "answer": ""}],
)
def test_configured_columns_are_read_without_a_note(row, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", row)
    assert report_reading(FileData(path=path, answer_column="answer"), "train").notes == ()


# ---- dropped rows


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": " ", "answer": "1"}, {"prompt": None, "answer": "1"}, {"prompt": "a", "answer": ""},
        {"prompt": "a", "answer": float("nan")}, {"prompt": [], "answer": "1"},
        {"prompt": [{"role": "user", "content": ""}], "answer": "1"},
    ],
)  # fmt: skip
def test_empty_rows_are_dropped_and_counted_only_if_the_data_allows_it(row, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "kept", "answer": "1"}, row)
    data = FileData(path=path, heldout_path=path, drop=("empty",))
    assert [problem.prompt for problem in load_problems(data, "train", 0)] == ["kept"]
    assert report_reading(data, "train").dropped == {"empty": 1}
    with pytest.raises(BadInput, match=r"a.jsonl:2"):
        load_problems(data.model_copy(update={"drop": ("too_long",)}), "train", 0)


def test_rows_with_other_faults_are_never_dropped(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "kept", "answer": "1"}, {"prompt": 1, "answer": "1"})
    with pytest.raises(BadInput, match=r"a.jsonl:2: prompt"):
        load_problems(FileData(path=path, drop=("empty",)), "train", 0)


def test_a_mixture_drops_and_counts_the_rows_of_all_files(tmp_path):
    rows = [{"prompt": "kept", "answer": "1"}, {"prompt": "", "answer": "1"}]
    sources = [
        {"path": path, "heldout_path": path} for path in (write_lines(tmp_path / f"{n}.jsonl", *rows) for n in "ab")
    ]
    data = MixtureData(sources=sources, drop=("empty",))
    assert len(load_problems(data, "train", 0)) == 2
    assert report_reading(data, "train", "heldout").dropped == {"empty": 4}


def test_drop_with_too_long_is_the_same_as_on_too_long():
    assert FileData(path="a.jsonl", drop=("too_long",)).long_prompts == "drop"
    assert FileData(path="a.jsonl", on_too_long="drop").long_prompts == "drop"
    assert FileData(path="a.jsonl", drop=("empty",)).long_prompts == "refuse"


# ---- folders


def make_rows(count):
    return [
        {"prompt": f"Q{n}?", "extra": {"answer": {"text": str(n), "unit": None if n % 2 else "m"}}, "x.y": f"{n}!"}
        for n in range(count)
    ]


def load_all(path, **keys):
    """Return the problems of both splits, by split."""
    data = FileData(path=path, heldout_fraction=0.3, answer_column="extra.answer.text", **keys)
    return [[(p.prompt, p.answer, p.identity) for p in load_problems(data, split, 0)] for split in ("train", "heldout")]


def write_shards(folder, suffix, rows):
    """Write the rows to two files of a format in a folder, with a file that is no data next to them."""
    folder.mkdir()
    (folder / "README.md").write_text("Rows.")
    (folder / ".hidden.csv").write_text("a")
    for number, part in enumerate((rows[:7], rows[7:])):
        path = folder / f"part-{number}{suffix}"
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(part), path)
        elif suffix == ".feather":
            feather.write_feather(pa.Table.from_pylist(part), path)
        elif suffix == ".jsonl.gz":
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in part).encode()))
        elif suffix == ".json":
            path.write_text(json.dumps(part))
        else:
            write_lines(path, *part)
    return folder


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".feather"])
def test_a_folder_of_shards_has_the_problems_of_one_file_in_every_format(tmp_path, suffix):
    rows = make_rows(20)
    whole = load_all(write_lines(tmp_path / "a.jsonl", *rows), environment_columns=("extra.answer", "x.y"))
    shards = write_shards(tmp_path / "shards", suffix, rows)
    assert load_all(shards, environment_columns=("extra.answer", "x.y")) == whole
    assert all(whole)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_that_datasets_saved_has_the_problems_of_one_file(tmp_path, shards):
    rows = make_rows(20)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=shards)
    assert load_all(tmp_path / "saved") == load_all(write_lines(tmp_path / "a.jsonl", *rows))


def test_the_files_of_a_saved_folder_are_read_in_its_own_order(tmp_path):
    rows = make_rows(3)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=3)
    state = tmp_path / "saved/state.json"
    document = json.loads(state.read_text())
    state.write_text(json.dumps(document | {"_data_files": document["_data_files"][::-1]}))
    data = FileData(path=tmp_path / "saved", heldout_path=tmp_path / "saved", answer_column="")
    assert [problem.prompt for problem in load_problems(data, "train", 0)] == ["Q2?", "Q1?", "Q0?"]


def test_images_of_a_folder_are_found_in_the_folder_and_in_nested_fields(tmp_path):
    for suffix in (".jsonl", ".parquet", ".feather"):
        rows = [{"prompt": f"What is {n}?", "shown": {"image": f"{n}.png"}} for n in range(9)]
        folder = write_shards(tmp_path / suffix, suffix, rows)
        for n in range(9):
            (folder / f"{n}.png").write_bytes(picture("red"))
        data = FileData(path=folder, heldout_path=folder, answer_column="", images_column="shown.image")
        assert len(load_problems(data, "train", 0)[0].images) == 1
        assert [*image_files(data)] == [folder / f"{n}.png" for n in range(9)]


def test_a_place_in_a_folder_names_the_file_and_the_row(tmp_path):
    folder = write_shards(
        tmp_path / "shards", ".jsonl", [*make_rows(8), {"prompt": "", "extra": {"answer": {"text": 1}}}]
    )
    with pytest.raises(BadInput, match=r"shards/part-1.jsonl:2: prompt"):
        load_all(folder)


# ---- nested fields


@pytest.mark.parametrize(
    ("row", "path", "value"),
    [
        ({"a": {"b": 1}}, "a.b", 1),
        ({"a": {"b": {"c": 1}}}, "a.b.c", 1),
        ({"a.b": 2, "a": {"b": 1}}, "a.b", 2),
        ({"a": {"b.c": 2, "b": {"c": 1}}}, "a.b.c", 2),
        ({"a.b": {"c": 2}, "a": {"b": {"c": 1}}}, "a.b.c", 2),
        ({"a.b": {"d": 2}, "a": {"b": {"c": 1}}}, "a.b.c", 1),
        ({"a": None}, "a.b", None),
    ],
)
def test_a_dotted_path_names_a_nested_field_unless_a_name_has_the_dot(row, path, value, tmp_path):
    assert find_field(row, path) == value
    null = pa.schema([("a", pa.struct([("b", pa.int64())]))])
    table = pa.Table.from_pylist([row], null if row == {"a": None} else None)
    for suffix in (".jsonl", ".parquet"):
        path_of_file = tmp_path / f"a{suffix}"
        write_lines(path_of_file, row) if suffix == ".jsonl" else pq.write_table(table, path_of_file)
        [(_, read)] = read_rows(path_of_file, [path], InputErrors(), version=2)
        assert read[path] == value


def test_a_dotted_path_into_a_map_of_a_table_is_read_row_by_row(tmp_path):
    rows = [{"a": [("b", 1)]}, {"a": [("c", 2)]}]
    schema = pa.schema([("a", pa.map_(pa.string(), pa.int64()))])
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "a.parquet")
    errors = InputErrors()
    assert [row["a.b"] for _, row in read_rows(tmp_path / "a.parquet", ["a.b"], errors, version=2)] == [1]
    with pytest.raises(BadInput, match=r"row 1: there is no column 'a.b'"):
        errors.check()


# ---- images by path


def write_image_folder(folder, suffix=".jsonl"):
    """Write two pictures and a metadata file in the form of the `imagefolder` of `datasets`."""
    (folder / "deep").mkdir(parents=True)
    names = ("red.png", "deep/blue.png")
    for name in names:
        (folder / name).write_bytes(picture(folder.joinpath(name).stem))
    rows = [{"file_name": name, "prompt": f"{name}?", "answer": "1"} for name in names]
    write_lines(folder / "metadata.jsonl", *rows)
    if suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        (folder / "metadata.csv").write_text("\n".join(lines))
        (folder / "metadata.jsonl").unlink()
    return [picture("red"), picture("blue")]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
@pytest.mark.parametrize("name", ["", "metadata"])
def test_a_folder_of_images_with_metadata_is_read(name, suffix, tmp_path):
    pictures = write_image_folder(tmp_path / "images", suffix)
    data = FileData(path=tmp_path / "images" / (name and name + suffix), images_column="file_name")
    assert [each.images for each in read_problems(data.path, data)] == [(one,) for one in pictures]
    assert [*image_files(data)] == [tmp_path / "images/red.png", tmp_path / "images/deep/blue.png"]


def test_images_that_datasets_saved_are_read_from_their_bytes(tmp_path):
    write_image_folder(tmp_path / "images")
    loaded = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "images"), cache_dir=str(tmp_path / "cache"))
    loaded["train"].save_to_disk(tmp_path / "saved")
    data = FileData(path=tmp_path / "saved", images_column="image")
    problems = {each.prompt: each.images for each in read_problems(data.path, data)}
    assert problems == {"red.png?": (picture("red"),), "deep/blue.png?": (picture("blue"),)}
