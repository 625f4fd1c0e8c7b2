"""What a model reads: who wrote which token, and the columns in which it is stored."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.records.model_input import (
    ModelInput,
    prompt_columns,
    prompt_inputs,
    rollout_columns,
    rollout_inputs,
    sample_columns,
    sample_inputs,
)
from models.records.schemas import PROMPT_SCHEMA, ROLLOUT_SCHEMA, SAMPLE_SCHEMA

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
PAIRS = st.lists(st.tuples(IDS, IDS), max_size=6)


def inputs_of(pairs: list[tuple[list[int], list[int]]]) -> list[ModelInput]:
    return [ModelInput.given(prompt).continued(completion) for prompt, completion in pairs]


def halves(inputs: list[ModelInput]) -> list[tuple[list[int], list[int]]]:
    return [(each.prompt.tolist(), each.completion.tolist()) for each in inputs]


def table(columns: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
    """A table of these columns in two chunks, of which the second is a slice."""
    who = {"completion_tokens": ("segments", "policy_version"), "num_prompt_tokens": ("staleness", "")}
    for there, (name, field) in who.items():
        if there in columns and name not in columns:
            lists = columns["completion_tokens"] if field else columns["tokens"]
            counts = pa.array(columns.get("num_prompt_tokens", [0] * len(lists))).to_pylist()
            lengths = [len(row) - count for row, count in zip(pa.array(lists).to_pylist(), counts, strict=True)]
            wrote = [[{"policy_version": 0, "tokens": length}] if field else [0] * length for length in lengths]
            columns = columns | {name: pa.array(wrote, schema.field(name).type)}
    whole = pa.table(columns, schema=pa.schema([schema.field(name) for name in columns]))
    return pa.concat_tables([whole.slice(0, 2), whole.slice(2)])


def test_a_completion_begins_with_the_first_token_that_is_written():
    read = ModelInput.given([5, 6]).continued([7]).continued([8, 9])
    assert read.tokens.tolist() == [5, 6, 7, 8, 9]
    assert (read.prompt.tolist(), read.completion.tolist()) == ([5, 6], [7, 8, 9])
    assert (len(read), read.num_prompt_tokens, read.num_completion_tokens) == (5, 2, 3)


def test_what_is_given_after_a_written_token_belongs_to_the_completion():
    turns = ModelInput.given([1]).continued([2]).chunks + ModelInput.given([3]).continued([4]).chunks
    read = ModelInput(turns)
    assert (read.prompt.tolist(), read.completion.tolist()) == ([1], [2, 3, 4])
    assert read.written.tolist() == [1, 3]


def episode(*parts: list[int]) -> ModelInput:
    """A prompt, and in turn what the policy and its environment said."""
    read = ModelInput.given(parts[0])
    for number, part in enumerate(parts[1:]):
        read = read.answered(part) if number % 2 else read.continued(part)
    return read


TURNS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=2, max_size=7)


@given(st.lists(TURNS, max_size=5))
def test_episodes_are_read_as_they_were_written_from_rollouts_and_from_samples(played):
    inputs = [episode(*parts) for parts in played]
    segments = [
        [{"policy_version": -1 if number % 2 else 3, "tokens": len(part)} for number, part in enumerate(parts[1:])]
        for parts in played
    ]
    rollouts = table(
        rollout_columns(inputs) | {"segments": pa.array(segments, ROLLOUT_SCHEMA.field("segments").type)},
        ROLLOUT_SCHEMA,
    )
    assert rollout_inputs(rollouts) == inputs
    stale = [[-1 if number % 2 else 2 for number, part in enumerate(parts[1:]) for _ in part] for parts in played]
    columns = sample_columns(rollouts, emptied_K=np.zeros(len(played), np.bool_))
    samples = table(columns | {"staleness": pa.array(stale, SAMPLE_SCHEMA.field("staleness").type)}, SAMPLE_SCHEMA)
    assert sample_inputs(samples) == inputs


def test_the_turn_that_is_written_begins_behind_what_is_given():
    assert ModelInput.given([1, 2]).num_turn_tokens == 0
    assert episode([1], [2, 3], [4]).num_turn_tokens == 0
    assert episode([1], [2, 3], [4], [5, 6, 7]).num_turn_tokens == 3


def test_parts_of_a_turn_weigh_the_same_and_a_turn_as_much_as_it_has_tokens():
    judged = ModelInput.given([1]).continued([2, 3, 4, 5]).continued([6, 7])  # six tokens, three for each part
    assert judged.weights.tolist() == [0.75, 0.75, 0.75, 0.75, 1.5, 1.5]
    assert episode([1], [2, 3, 4], [5], [6]).weights.tolist() == [1, 1, 1, 1]
    assert ModelInput.given([1]).weights.tolist() == []


def test_inputs_are_equal_where_the_same_tokens_have_the_same_authors():
    assert ModelInput.given([1, 2]).continued([3]) == ModelInput.given(np.array([1, 2])).continued((3,))
    assert ModelInput.given([1, 2, 3]) != ModelInput.given([1, 2]).continued([3])
    assert ModelInput.given([1, 2, 3]) != ModelInput().continued([1, 2, 3])
    assert ModelInput.given([1]).continued([]) == ModelInput.given([1])
    with pytest.raises(TypeError):
        hash(ModelInput.given([1]))


@given(PAIRS)
def test_rollouts_are_read_as_they_were_written(pairs):
    columns = rollout_columns(inputs_of(pairs))
    assert {name: column.to_pylist() for name, column in columns.items()} == {
        "prompt_tokens": [prompt for prompt, _ in pairs],
        "completion_tokens": [completion for _, completion in pairs],
        "images": [[] for _ in pairs],
    }
    assert halves(rollout_inputs(table(columns, ROLLOUT_SCHEMA))) == pairs


@given(PAIRS)
def test_prompts_are_read_as_they_were_written(pairs):
    prompts = [ModelInput.given(prompt) for prompt, _ in pairs]
    assert prompt_inputs(table(prompt_columns(prompts), PROMPT_SCHEMA)) == prompts


@given(PAIRS, st.data())
def test_samples_read_what_rollouts_read_but_for_completions_that_are_emptied(pairs, data):
    empties = data.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
    rollouts = table(rollout_columns(inputs_of(pairs)), ROLLOUT_SCHEMA)
    samples = table(sample_columns(rollouts, emptied_K=np.array(empties, np.bool_)), SAMPLE_SCHEMA)
    expected = [(prompt, [] if empty else whole) for (prompt, whole), empty in zip(pairs, empties, strict=True)]
    assert halves(sample_inputs(samples)) == expected


def test_digests_of_images_go_from_prompts_to_rollouts_and_samples_in_order():
    prompts = [ModelInput.given([7, 7, 1], ["b" * 64, "a" * 64]), ModelInput.given([2])]
    assert prompt_inputs(table(prompt_columns(prompts), PROMPT_SCHEMA)) == prompts
    written = [prompt.continued([5]) for prompt in prompts]
    rollouts = table(rollout_columns(written), ROLLOUT_SCHEMA)
    assert rollout_inputs(rollouts) == written
    samples = table(sample_columns(rollouts, emptied_K=np.array([True, False])), SAMPLE_SCHEMA)
    assert [each.images for each in sample_inputs(samples)] == [("b" * 64, "a" * 64), ()]
    assert prompts[0] != ModelInput.given([7, 7, 1], ["a" * 64, "b" * 64])
