"""Rows of files for supervised training: recognized columns, rows with a prompt and a completion, and plain texts."""

import pytest

from rheostat.models.config.texts import TextRules
from rheostat.models.config.training import ChatTraining
from rheostat.models.data.problems import ImagePlace
from rheostat.models.data.training_chats import TrainingText, load_chats, report_chats
from rheostat.models.text.training_rows import encode_rows
from tests.support.chat_templates import GENERATION, tokenizer_of, with_template
from tests.support.data_files import write_lines
from tests.support.vision import picture


def trained_texts(tokenizer, encoded):
    return [tokenizer.decode(chunk.tokens) for chunk in encoded.chunks if chunk.is_trained]


def encode_all(rows, tokenizer, **options):
    settings = {"loss": "assistant", "rules": TextRules(), "ends": (), "processor": None, **options}
    return encode_rows(rows, tokenizer, **settings)


def load_rows(tmp_path, *rows, **settings):
    path = write_lines(tmp_path / "chats.jsonl", *rows)
    return load_chats(ChatTraining(path=path, heldout_fraction=0, **settings))[0]


USER, REPLY = {"role": "user", "content": "Ana has 3 pens"}, {"role": "assistant", "content": "it is sunny"}


@pytest.mark.parametrize("loss", ["assistant", "last", "completion"])
def test_only_the_completion_of_a_chat_is_trained(loss, tmp_path):
    tokenizer = tokenizer_of("qwen-2.5")
    rows = load_rows(tmp_path, {"prompt": [USER, REPLY, USER], "completion": [REPLY]}, loss=loss)
    [[encoded]] = encode_all(rows, tokenizer, loss=loss)
    end = "<|im_end|>\n" if loss == "completion" else "<|im_end|>"
    assert trained_texts(tokenizer, encoded) == [f"it is sunny{end}"]


def test_turns_of_the_prompt_are_not_trained_if_the_template_marks_generated_turns(tmp_path):
    tokenizer = with_template(GENERATION, backend=tokenizer_of("qwen-2.5").backend_tokenizer)
    rows = load_rows(tmp_path, {"prompt": [USER, REPLY, USER], "completion": [REPLY, USER, REPLY]})
    [[encoded]] = encode_all(rows, tokenizer)
    assert trained_texts(tokenizer, encoded) == ["it is sunny<|im_end|>"] * 2
    assert tokenizer.decode(encoded.prompt).count("it is sunny") == 1


def test_plain_prompts_and_completions_need_no_chat_template(tmp_path):
    tokenizer = with_template(None)
    [row] = load_rows(tmp_path, {"prompt": "Ana has 3 pens,", "completion": " it is sunny"})
    [[encoded]] = encode_all([row], tokenizer)
    assert trained_texts(tokenizer, encoded) == [f" it is sunny{tokenizer.eos_token}"]
    assert tokenizer.decode(encoded.prompt) == "Ana has 3 pens,"
    [[whole]] = encode_all([row], tokenizer, loss="all")
    assert (whole.tokens.tolist(), whole.num_prompt_tokens) == (encoded.tokens.tolist(), 1)


@pytest.mark.parametrize(("column", "settings"), [("text", {}), ("body", {"text_column": "body"})])
@pytest.mark.parametrize("loss", ["assistant", "all"])
def test_plain_text_is_trained_as_a_whole_without_a_chat_template(column, settings, loss, tmp_path):
    tokenizer = with_template(None)
    [row] = load_rows(tmp_path, {column: "Ana has 3 pens", "label": 1}, loss=loss, **settings)
    [[encoded]] = encode_all([row], tokenizer, loss=loss)
    assert tokenizer.decode(encoded.tokens.tolist()) == f"Ana has 3 pens{tokenizer.eos_token}"
    assert encoded.trained_positions.tolist() == [*range(1, len(encoded))]


def test_a_completion_that_ends_with_eos_has_one_eos_if_control_tokens_are_parsed():
    tokenizer = tokenizer_of("qwen-2.5")
    row = TrainingText("t:1", "Ana", f" it is{tokenizer.eos_token}")
    [[encoded]] = encode_all([row], tokenizer, rules=TextRules("parse"))
    assert encoded.tokens.tolist().count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(
    ("row", "settings", "note"),
    [
        ({"prompt": "a b", "completion": "c"}, {}, "in columns prompt and completion (plain text, which is trained"),
        ({"prompt": [USER], "completion": [REPLY]}, {}, "in columns prompt and completion (OpenAI chats)"),
        (
            {"question": "a b", "reply": "c"},
            {"prompt_column": "question", "completion_column": "reply"},
            "reply (plain",
        ),
        ({"conversations": [USER, REPLY]}, {}, "OpenAI chats in column conversations"),
        ({"messages": [USER, REPLY], "prompt": "a b", "completion": "c"}, {}, None),
        ({"text": "a b", "label": 1}, {}, "plain text in column text. Each text is trained as a whole"),
        ({"text": "a b", "messages": [USER, REPLY]}, {}, None),
        ({"text": "a b", "conversations": [USER, REPLY]}, {}, "OpenAI chats in column conversations"),
    ],
)
def test_columns_of_training_chats_are_recognized(row, settings, note, tmp_path):
    config = ChatTraining(path=write_lines(tmp_path / "chats.jsonl", row), heldout_fraction=0, **settings)
    assert len(load_chats(config)[0]) == 1
    notes = report_chats(config)
    assert note in notes[0] if note else notes == []


def test_prompts_with_several_completions_are_in_the_same_split(tmp_path):
    rows = [{"prompt": f"What is {n % 20}?", "completion": f"{n}"} for n in range(40)]
    path = write_lines(tmp_path / "chats.jsonl", *rows)
    train, heldout = load_chats(ChatTraining(path=path, heldout_fraction=0.3))
    assert heldout
    assert {each.prompt for each in train}.isdisjoint(each.prompt for each in heldout)


def test_image_marks_and_the_column_system_are_read_in_training_chats(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(1))
    turns = [{"from": "human", "value": "<image>\nred"}, {"from": "gpt", "value": "see"}]
    row = {"conversations": turns, "system": "Be brief.", "images": "a.png"}
    [chat] = load_rows(tmp_path, row, images_column="images")
    assert [each.role for each in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[1].content == (ImagePlace(), "\nred")
    config = ChatTraining(path=tmp_path / "chats.jsonl", heldout_fraction=0)
    notes = "\n".join(report_chats(config))
    assert "column 'system' contains system messages" in notes
    assert "column 'images', which is not read" in notes
