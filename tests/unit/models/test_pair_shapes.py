"""Preference pairs in the shapes of published data sets: read as TRL reads them, from every format of files."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trl

from rheostat.infra.errors import BadInput
from rheostat.models.config.preferences import FilePreferences
from rheostat.models.data.preferences import load_preferences
from rheostat.models.text.tokenizer import render
from tests.support.chat_templates import with_template
from tests.support.data_files import write_lines
from tests.support.demos import ArithmeticData

USER, OTHER = {"role": "user", "content": "What color is the sky?"}, {"role": "user", "content": "And at night?"}
SYSTEM = {"role": "system", "content": "Be brief."}
BLUE, GREEN = ({"role": "assistant", "content": f"It is {color}."} for color in ("blue", "green"))
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

IMPLICIT = [
    {"chosen": [USER, BLUE], "rejected": [USER, GREEN]},
    {"chosen": [SYSTEM, USER, BLUE], "rejected": [SYSTEM, USER, GREEN]},
    {"chosen": [USER, BLUE, OTHER, BLUE], "rejected": [USER, BLUE, OTHER, GREEN]},
    {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"},
    {"chosen": "Q: why?\nA: because", "rejected": "Q: why?\nA: no"},
    {"chosen": "naïve café: oui", "rejected": "naïve café: non"},
]
EXPLICIT = [
    {"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]},
    {"prompt": [SYSTEM, USER], "chosen": [BLUE], "rejected": [GREEN]},
    {"prompt": [USER, BLUE, OTHER], "chosen": [GREEN], "rejected": [BLUE]},
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"},
]
ULTRAFEEDBACK = [
    {"prompt": USER["content"], **IMPLICIT[0], "messages": [USER, BLUE], "score_chosen": 8.0, "score_rejected": 7.5},
    {"prompt": USER["content"], **IMPLICIT[1], "messages": [USER, BLUE], "score_chosen": 8.0, "score_rejected": 7.5},
]
SHAREGPT = [
    {
        "chosen": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": BLUE["content"]}],
        "rejected": [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": GREEN["content"]}],
    }
]


def load(path, **keys):
    """Return the pairs of a file."""
    config = FilePreferences(path=path, heldout_path=path, **keys)
    return load_preferences(config, ArithmeticData(), split="train", seed=0)


def encode(messages):
    return messages if isinstance(messages, str) else [each.encode() for each in messages]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("row", [*IMPLICIT, *EXPLICIT, *ULTRAFEEDBACK], ids=range(14))
def test_pairs_are_those_that_trl_extracts(row, suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    write_lines(path, row) if suffix == ".jsonl" else pq.write_table(pa.Table.from_pylist([row]), path)
    [pair] = load(path)
    expected = (
        trl.extract_prompt(row)
        if isinstance(row["chosen"], list) and len(row["chosen"]) > 1
        else (trl.data_utils.maybe_extract_prompt(dict(row)))
    )
    completions = [
        value if isinstance(value, str) else value[0]["content"] for value in (expected["chosen"], expected["rejected"])
    ]
    assert encode(pair.prompt) == expected["prompt"]
    assert [pair.chosen, pair.rejected] == completions
    if isinstance(row["chosen"], list):
        tokenizer = with_template(CHATML)
        rendered = trl.apply_chat_template(
            {name: expected[name] for name in ("prompt", "chosen", "rejected")}, tokenizer
        )
        assert render([pair.prompt], tokenizer, sources=["row"]) == [rendered["prompt"]]
        assert [rendered["chosen"], rendered["rejected"]] == [f"{text}</>" for text in (pair.chosen, pair.rejected)]


@pytest.mark.parametrize("row", SHAREGPT)
def test_pairs_of_sharegpt_chats_are_those_of_their_messages(row, tmp_path):
    [pair] = load(write_lines(tmp_path / "a.jsonl", row))
    assert (encode(pair.prompt), pair.chosen, pair.rejected) == ([USER], BLUE["content"], GREEN["content"])


def test_texts_of_hh_rlhf_become_chats(tmp_path):
    start = "\n\nHuman: What color is the sky?\n\nAssistant: It is blue.\n\nHuman: And at night?\n\nAssistant:"
    row = {"chosen": f"{start} Black.\nMostly.", "rejected": f"{start} Blue."}
    [pair] = load(write_lines(tmp_path / "a.jsonl", row))
    assert encode(pair.prompt) == [USER, BLUE, OTHER]
    assert (pair.chosen, pair.rejected) == ("Black.\nMostly.", "Blue.")


@pytest.mark.parametrize(
    "columns",
    [
        {"completions": ["a", "b", "c"], "scores": [2, 3, 1]},
        {"responses": [{"text": "a", "score": 0.5}, {"text": "b", "score": 1}, {"text": "c", "score": -1}]},
        {
            "completions": [
                {"response": each, "overall_score": score} for each, score in zip("abc", (4, 9.5, 1), strict=True)
            ]
        },
        {
            "completions": [
                {"content": each, "rating": score} for each, score in zip("abc", ("4", "5", "1"), strict=True)
            ]
        },
    ],
)
def test_lists_of_completions_with_scores_give_the_best_and_the_worst(columns, tmp_path):
    [pair] = load(write_lines(tmp_path / "a.jsonl", {"instruction": "Which?", **columns}))
    assert (pair.prompt, pair.chosen, pair.rejected) == ("Which?", "b", "c")


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("ties", {"chosen": "a", "rejected": "a"}),
        ("ties", {"chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 1.0}),
        ("ties", {"chosen": "a", "rejected": "b", "margin": 0.0}),
        ("empty", {"chosen": "a", "rejected": " "}),
        ("empty", {"chosen": "a", "rejected": None}),
        ("empty", {"prompt": "", "chosen": "a", "rejected": "b"}),
        ("empty", {"chosen": [USER, BLUE], "rejected": []}),
        ("mismatched", {"chosen": [USER, BLUE], "rejected": [OTHER, GREEN]}),
        ("mismatched", {"chosen": [USER, BLUE, OTHER, BLUE], "rejected": [USER, GREEN]}),
        ("mismatched", {"prompt": "Else?", "chosen": [USER, BLUE], "rejected": [USER, GREEN]}),
    ],
)
def test_pairs_are_dropped_only_for_the_reasons_in_drop(reason, row, tmp_path):
    kept = {"prompt": USER["content"], "chosen": "It is blue.", "rejected": "It is green."}
    path = write_lines(tmp_path / "a.jsonl", kept, {"prompt": USER["content"], **row})
    assert len(load(path, drop=(reason,))) == 1
    others = tuple({"ties", "empty", "mismatched"} - {reason})
    if "score_chosen" in row or "margin" in row:
        assert len(load(path, drop=others)) == 2
    else:
        with pytest.raises(BadInput, match=r"a.jsonl:2"):
            load(path, drop=others)


def test_equal_best_scores_are_ties(tmp_path):
    row = {"prompt": "Which?", "completions": ["a", "b", "c"], "scores": [3, 3, 1]}
    path = write_lines(tmp_path / "a.jsonl", row, row | {"scores": [3, 2, 1]})
    with pytest.raises(BadInput, match=r"a.jsonl:1: completions: 2 completions have the score 3.*ties"):
        load(path)
    [pair] = load(path, drop=("ties",))
    assert (pair.chosen, pair.rejected) == ("a", "c")


def test_tools_of_a_row_belong_to_the_prompt_in_its_completions(tmp_path):
    tool = {"type": "function", "function": {"name": "find"}}
    [pair] = load(write_lines(tmp_path / "a.jsonl", {**IMPLICIT[0], "tools": json.dumps([tool])}))
    assert [dict(each) for each in pair.template.tools] == [tool]
