"""Inputs of models: which tokens the policy generated, and the columns in which inputs are stored."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.records.model_input import (
    ModelInput,
    prompt_columns,
    prompt_inputs,
    rollout_columns,
    rollout_inputs,
    sample_columns,
    sample_inputs,
)
from rheostat.models.records.schemas import PROMPT_SCHEMA, ROLLOUT_SCHEMA, SAMPLE_SCHEMA

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
PAIRS = st.lists(st.tuples(IDS, IDS), max_size=6)


def inputs_of(pairs: list[tuple[list[int], list[int]]]) -> list[ModelInput]:
    return [ModelInput.from_prompt(prompt).append_completion(completion) for prompt, completion in pairs]


def halves(inputs: list[ModelInput]) -> list[tuple[list[int], list[int]]]:
    return [(each.prompt.tolist(), each.completion.tolist()) for each in inputs]


def in_chunks(columns: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
    """Build a table of two chunks, the second of which is a slice."""
    whole = pa.table(columns, schema=pa.schema([schema.field(name) for name in columns]))
    return pa.concat_tables([whole.slice(0, 2), whole.slice(2)])


def rollouts_of(inputs: list[ModelInput], segments: list[list[dict[str, int]]] | None = None) -> pa.Table:
    """Build rollouts; the policy generated all completion tokens unless segments are passed."""
    whole = [[{"policy_version": 0, "tokens": each.num_completion_tokens}] for each in inputs]
    column = pa.array(whole if segments is None else segments, ROLLOUT_SCHEMA.field("segments").type)
    return in_chunks(rollout_columns(inputs) | {"segments": column}, ROLLOUT_SCHEMA)


def samples_of(rollouts: pa.Table, *, emptied: list[bool], staleness: list[list[int]]) -> pa.Table:
    columns = sample_columns(rollouts, emptied_K=np.array(emptied, np.bool_))
    column = pa.array(staleness, SAMPLE_SCHEMA.field("staleness").type)
    return in_chunks(columns | {"staleness": column}, SAMPLE_SCHEMA)


def test_a_completion_begins_with_the_first_token_of_the_policy():
    read = ModelInput.from_prompt([5, 6]).append_completion([7]).append_completion([8, 9])
    assert read.tokens.tolist() == [5, 6, 7, 8, 9]
    assert (read.prompt.tolist(), read.completion.tolist()) == ([5, 6], [7, 8, 9])
    assert (len(read), read.num_prompt_tokens, read.num_completion_tokens) == (5, 2, 3)


def test_context_after_a_token_of_the_policy_belongs_to_the_completion():
    turns = (
        ModelInput.from_prompt([1]).append_completion([2]).chunks
        + ModelInput.from_prompt([3]).append_completion([4]).chunks
    )
    read = ModelInput(turns)
    assert (read.prompt.tolist(), read.completion.tolist()) == ([1], [2, 3, 4])
    assert read.trained_positions.tolist() == [1, 3]


def build_episode(*parts: list[int]) -> ModelInput:
    """Build an input from a prompt, and then in turn tokens of the policy and of its environment."""
    read = ModelInput.from_prompt(parts[0])
    for number, part in enumerate(parts[1:]):
        read = read.append_observation(part) if number % 2 else read.append_completion(part)
    return read


TURNS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=2, max_size=7)


@given(st.lists(TURNS, max_size=5))
def test_episodes_are_restored_from_rollouts_and_from_samples(episodes):
    inputs = [build_episode(*parts) for parts in episodes]
    versions = [[(-1 if number % 2 else 3, len(part)) for number, part in enumerate(parts[1:])] for parts in episodes]
    segments = [[{"policy_version": version, "tokens": count} for version, count in row] for row in versions]
    rollouts = rollouts_of(inputs, segments)
    assert rollout_inputs(rollouts) == inputs
    staleness = [[-1 if version < 0 else 2 for version, count in row for _ in range(count)] for row in versions]
    assert sample_inputs(samples_of(rollouts, emptied=[False] * len(inputs), staleness=staleness)) == inputs


def test_the_present_turn_begins_after_the_last_context_token():
    assert ModelInput.from_prompt([1, 2]).num_turn_tokens == 0
    assert build_episode([1], [2, 3], [4]).num_turn_tokens == 0
    assert build_episode([1], [2, 3], [4], [5, 6, 7]).num_turn_tokens == 3


def test_parts_of_a_turn_have_equal_weight_and_a_turn_has_its_number_of_tokens():
    judged = (
        ModelInput.from_prompt([1]).append_completion([2, 3, 4, 5]).append_completion([6, 7])
    )  # six tokens, three for each part
    assert judged.weights.tolist() == [0.75, 0.75, 0.75, 0.75, 1.5, 1.5]
    assert build_episode([1], [2, 3, 4], [5], [6]).weights.tolist() == [1, 1, 1, 1]
    assert ModelInput.from_prompt([1]).weights.tolist() == []


def test_inputs_are_equal_if_tokens_and_their_authors_are_equal():
    assert ModelInput.from_prompt([1, 2]).append_completion([3]) == ModelInput.from_prompt(
        np.array([1, 2])
    ).append_completion((3,))
    assert ModelInput.from_prompt([1, 2, 3]) != ModelInput.from_prompt([1, 2]).append_completion([3])
    assert ModelInput.from_prompt([1, 2, 3]) != ModelInput().append_completion([1, 2, 3])
    assert ModelInput.from_prompt([1]).append_completion([]) == ModelInput.from_prompt([1])
    with pytest.raises(TypeError):
        hash(ModelInput.from_prompt([1]))


@given(PAIRS)
def test_inputs_are_restored_from_rollouts(pairs):
    columns = rollout_columns(inputs_of(pairs))
    assert {name: column.to_pylist() for name, column in columns.items()} == {
        "prompt_tokens": [prompt for prompt, _ in pairs],
        "completion_tokens": [completion for _, completion in pairs],
        "images": [[] for _ in pairs],
    }
    assert halves(rollout_inputs(rollouts_of(inputs_of(pairs)))) == pairs
    prompts = [ModelInput.from_prompt(prompt) for prompt, _ in pairs]
    assert prompt_inputs(in_chunks(prompt_columns(prompts), PROMPT_SCHEMA)) == prompts


@given(PAIRS, st.data())
def test_inputs_are_restored_from_samples_except_for_emptied_completions(pairs, data):
    empties = data.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs)))
    expected = [(prompt, [] if empty else whole) for (prompt, whole), empty in zip(pairs, empties, strict=True)]
    staleness = [[0] * len(completion) for _, completion in expected]
    samples = samples_of(rollouts_of(inputs_of(pairs)), emptied=empties, staleness=staleness)
    assert halves(sample_inputs(samples)) == expected


def test_digests_of_images_are_passed_from_prompts_to_rollouts_and_samples_in_order():
    prompts = [ModelInput.from_prompt([7, 7, 1], ["b" * 64, "a" * 64]), ModelInput.from_prompt([2])]
    assert prompt_inputs(in_chunks(prompt_columns(prompts), PROMPT_SCHEMA)) == prompts
    inputs = [prompt.append_completion([5]) for prompt in prompts]
    rollouts = rollouts_of(inputs)
    assert rollout_inputs(rollouts) == inputs
    samples = samples_of(rollouts, emptied=[True, False], staleness=[[], [0]])
    assert [each.images for each in sample_inputs(samples)] == [("b" * 64, "a" * 64), ()]
    assert prompts[0] != ModelInput.from_prompt([7, 7, 1], ["a" * 64, "b" * 64])
