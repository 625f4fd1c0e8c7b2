"""What is forgotten of episodes: every word of them, and nothing that is counted."""

import json

import pyarrow as pa

from models.records.schemas import PROMPT_SCHEMA, ROLLOUT_SCHEMA
from models.rollouts.forgotten import FORGOTTEN, forgotten_prompts, without

SECRET = "Ada Lovelace"


def message(role, content, name=None):
    return {"role": role, "content": content, "name": name}


def rollout(prompt_id, words):
    said = [message("user", f"{words}?"), message("assistant", f"I ask {words}"), message("tool", words, "search")]
    turn = {"tokens": 2, "observation": 1, "calls": 1, "errors": 0, "reward": 1.5, "error": None}
    return {
        "prompt_row": 0,
        "sample": 0,
        "prompt_id": prompt_id,
        "prompt": words,
        "completion": words,
        "answer": words,
        "prompt_tokens": [5],
        "images": [],
        "completion_tokens": [7, 8, 9],
        "logprobs": [-1.0, -1.0, 0.0],
        "finish_reason": "failed",
        "seed": 3,
        "segments": [{"policy_version": 0, "tokens": 2}, {"policy_version": -1, "tokens": 1}],
        "turns": [turn, turn | {"error": f"KeyError: {words}"}],
        "messages": said,
    }


def prompts(*words):
    rows = [
        {
            "prompt_id": f"id-{place}",
            "text": text,
            "tokens": [5],
            "images": [],
            "answer": text,
            "columns": json.dumps({"of": text}),
            "messages": [message("user", text)],
        }
        for place, text in enumerate(words)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)


def test_no_word_of_messages_and_turns_is_left_and_what_is_counted_stays():
    gone = forgotten_prompts(prompts(SECRET, "others"), {"id-0"})
    told, changed = without(prompts(SECRET, "others"), gone)
    assert (changed, SECRET in json.dumps(told.to_pylist()), told.to_pylist()[1]["text"]) == (1, False, "others")
    table = pa.Table.from_pylist([rollout("id-0", SECRET), rollout("id-1", "others")], schema=ROLLOUT_SCHEMA)
    emptied, changed = without(table, gone)
    first, second = emptied.to_pylist()
    assert changed == 1
    assert "Ada" not in json.dumps(first)
    assert second == table.to_pylist()[1]
    before = table.to_pylist()[0]
    assert first["segments"] == before["segments"]
    assert [each["role"] for each in first["messages"]] == ["user", "assistant", "tool"]
    assert [each["error"] for each in first["turns"]] == [None, FORGOTTEN]
    assert [each["reward"] for each in first["turns"]] == [1.5, 1.5]
    again, changed = without(emptied, gone)
    assert (again.equals(emptied), changed) == (True, 0)
