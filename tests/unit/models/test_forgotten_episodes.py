"""Forgetting prompts removes all their text from episodes and keeps the numbers."""

import json

import pyarrow as pa

from rheostat.models.records.schemas import PROMPT_SCHEMA, ROLLOUT_SCHEMA
from rheostat.models.rollouts.forgotten import FORGOTTEN, erase_prompts, find_prompts

SECRET = "Ada Lovelace"


def build_message(role, content, name=None):
    return {"role": role, "content": content, "name": name}


def build_rollout(prompt_id, text):
    """Return a rollout with the text in each field that can contain text of a user."""
    turn = {"tokens": 2, "observation": 1, "calls": 1, "errors": 0, "reward": 1.5, "error": None}
    turns = [turn, turn | {"error": f"KeyError: {text}"}]
    messages = [("user", f"{text}?"), ("assistant", f"I ask {text}"), ("tool", text, "search")]
    rollout = {"prompt_row": 0, "sample": 0, "prompt_id": prompt_id, "seed": 3, "finish_reason": "failed"}
    rollout |= {"prompt": text, "completion": text, "answer": text, "images": [], "turns": turns}
    rollout |= {"prompt_tokens": [5], "completion_tokens": [7, 8, 9], "logprobs": [-1.0, -1.0, 0.0]}
    rollout["segments"] = [{"policy_version": 0, "tokens": 2}, {"policy_version": -1, "tokens": 1}]
    return rollout | {"messages": [build_message(*message) for message in messages]}


def build_prompt(prompt_id, text):
    columns, messages = json.dumps({"of": text}), [build_message("user", text)]
    prompt = {"prompt_id": prompt_id, "text": text, "tokens": [5], "images": []}
    return prompt | {"answer": text, "columns": columns, "messages": messages}


def build_table(build, schema):
    return pa.Table.from_pylist([build("id-0", SECRET), build("id-1", "others")], schema=schema)


def test_forgetting_a_prompt_removes_its_text_from_every_field_and_keeps_the_numbers():
    prompts, rollouts = build_table(build_prompt, PROMPT_SCHEMA), build_table(build_rollout, ROLLOUT_SCHEMA)
    forgotten = find_prompts(prompts, {"id-0"})
    for table in (prompts, rollouts):
        emptied, changed = erase_prompts(table, forgotten)
        assert changed == 1
        assert "Ada" not in json.dumps(emptied.to_pylist()[0])
        assert emptied.to_pylist()[1] == table.to_pylist()[1]
        again, changed = erase_prompts(emptied, forgotten)
        assert (again.equals(emptied), changed) == (True, 0)
    first = emptied.to_pylist()[0]
    assert first["segments"] == rollouts.to_pylist()[0]["segments"]
    assert [each["role"] for each in first["messages"]] == ["user", "assistant", "tool"]
    assert [each["error"] for each in first["turns"]] == [None, FORGOTTEN]
    assert [each["reward"] for each in first["turns"]] == [1.5, 1.5]
