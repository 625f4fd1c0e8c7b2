"""Experts that routers chose, from the column of a rollout to the replayed sample."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.infra.errors import Damaged
from rheostat.models.engines.protocol import Completion
from rheostat.models.records.columns import concatenate_tables
from rheostat.models.records.model_input import ModelInput, attach_experts, sample_columns, select_with_optional
from rheostat.models.records.schemas import EXPERTS, ROLLOUT_SCHEMA, FinishReason
from rheostat.models.rollouts.forgotten import Prompts, erase_prompts
from rheostat.models.rollouts.groups import Group, PartialCompletion, build_table

WIDTH = 3


def experts(tokens: int, *, seed: int, most: int = 255) -> np.ndarray:
    numbers = np.uint8 if most < 256 else np.uint16
    return np.random.default_rng(seed).integers(0, most + 1, (tokens, WIDTH)).astype(numbers)


def completion(tokens: int, chosen: np.ndarray | None) -> Completion:
    return Completion((7,) * tokens, (-1.0,) * tokens, "", FinishReason.STOP, experts=chosen)


def rollouts(lengths: list[tuple[int, int]], *, most: int = 255) -> pa.Table:
    """Build a row per pair of prompt and completion lengths, in two chunks, the second of which is a slice."""
    groups = []
    for row, (prompt, tokens) in enumerate(lengths):
        chosen = experts(prompt + tokens - 1, seed=row, most=most)
        draft = PartialCompletion(seed=0, input=ModelInput.from_prompt([5] * prompt)).append_completion(
            completion(tokens, chosen), 0
        )
        groups.append(group_of(row, draft))
    whole = build_table(groups)
    return pa.concat_tables([whole.slice(0, 1), whole.slice(1)])


def group_of(row: int, draft: PartialCompletion) -> Group:
    return Group(prompt_row=row, prompt_id=str(row), prompt="", answer="", columns={}, chat=(), drafts=(draft,))


LENGTHS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5)


@pytest.mark.parametrize("most", [255, 300])
@given(lengths=LENGTHS, data=st.data())
def test_samples_have_the_experts_of_their_tokens_and_emptied_samples_those_of_the_prompt(most, lengths, data):
    emptied = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    table = rollouts(lengths, most=most)
    columns = sample_columns(table, emptied_K=np.array(emptied, np.bool_))
    rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), max_size=4))
    kept = [prompt if empty else prompt + tokens for (prompt, tokens), empty in zip(lengths, emptied, strict=True)]
    read = attach_experts(
        [ModelInput.from_prompt([5] * kept[row]) for row in rows], pa.table({EXPERTS: columns[EXPERTS]}), rows
    )
    for row, each in zip(rows, read, strict=True):
        expected = experts(sum(lengths[row]) - 1, seed=row, most=most)[: kept[row] - 1]
        assert each.experts.dtype == expected.dtype
        np.testing.assert_array_equal(each.experts, expected)


def test_a_continued_completion_appends_the_experts_of_its_new_tokens():
    first, later = experts(4, seed=0), experts(7, seed=1)
    begun = PartialCompletion(seed=0, input=ModelInput.from_prompt([5, 5])).append_completion(completion(3, first), 0)
    ended = begun.append_completion(completion(3, later), 1)
    np.testing.assert_array_equal(ended.input.experts, np.concatenate([first, later[4:]]))
    assert begun.append_completion(completion(3, None), 1).input.experts is None


def test_experts_of_another_number_of_tokens_are_damaged():
    table = rollouts([(2, 3), (1, 2)])
    with pytest.raises(Damaged, match=r"row 1: .*4 tokens.* 2"):
        attach_experts([ModelInput.from_prompt([5] * 5)], table, [1])


def test_rollouts_without_recorded_experts_have_no_column_of_experts():
    plain = PartialCompletion(seed=0, input=ModelInput.from_prompt([5])).append_completion(completion(2, None), 0)
    table = build_table([group_of(0, plain)])
    assert table.schema == build_table([]).schema == ROLLOUT_SCHEMA
    assert select_with_optional(table, ["sample"]).column_names == ["sample"]


def test_an_empty_shard_can_be_concatenated_with_shards_that_have_experts():
    table = rollouts([(2, 3), (1, 2)])
    assert concatenate_tables([build_table([]), table]).select([EXPERTS]).equals(table.select([EXPERTS]))


def test_experts_of_a_forgotten_completion_are_replaced_by_expert_0():
    table = rollouts([(2, 3), (1, 2)])
    emptied, changed = erase_prompts(table, Prompts(frozenset({"0"}), frozenset({0})))
    first, second = emptied[EXPERTS].to_pylist()
    assert (changed, first, second) == (1, [[0] * WIDTH] * 4, table[EXPERTS].to_pylist()[1])
    assert emptied.schema == table.schema
