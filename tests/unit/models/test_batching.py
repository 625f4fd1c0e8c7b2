"""Distribution of sequences over optimizer steps, ranks and micro-batches, and the layout of a micro-batch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.modeling.batching import Sequences, balance, pack, pack_groups, plan_steps, split_minibatches
from rheostat.models.modeling.layout import TrainingSample, lay_out, lay_out_samples
from rheostat.models.records.model_input import ModelInput

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)
SIZES, BUDGETS = st.integers(1, 4), st.integers(1, 2000)


def build_sequences(lengths, *, group_size, prompts=None, patches=None):
    """Group the sequences by position; prompts have half of the shortest length of their group by default."""
    groups = [row // group_size for row in range(len(lengths))]
    halves = [min(lengths[group * group_size : (group + 1) * group_size]) // 2 for group in groups]
    return Sequences(lengths=lengths, prompts=prompts or halves, groups=groups, patches=patches or [0] * len(lengths))


def rows_of(lengths):
    return tuple(range(len(lengths)))


def groups_per_rank(plan, *, group_size):
    return sorted(sorted({row // group_size for rows in rank for row in rows}) for rank in plan.microbatches)


# ---- optimizer steps and ranks


@given(LENGTHS, st.integers(1, 4), st.integers(1, 5), BUDGETS, st.integers(0, 9))
def test_every_row_is_in_one_micro_batch_and_all_ranks_have_equally_many_micro_batches(
    lengths, ranks, minibatches, budget, seed
):
    sequences = build_sequences(lengths, group_size=4)
    plans = plan_steps(sequences, minibatches=minibatches, ranks=ranks, microbatch_tokens=budget, seed=seed)
    assert sorted(row for plan in plans for row in plan.rows) == list(range(len(lengths)))
    for plan in plans:
        assert len(plan.microbatches) == ranks
        assert len({len(microbatches) for microbatches in plan.microbatches}) == 1


@given(LENGTHS, st.integers(1, 6), st.integers(0, 9))
def test_a_group_is_never_split_over_steps_and_steps_have_about_as_many_groups(lengths, minibatches, seed):
    groups = [row // 3 for row in range(len(lengths))]
    steps = split_minibatches(groups, lengths, minibatches=minibatches, seed=seed)
    found = [{groups[row] for row in step} for step in steps]
    assert sum(map(len, found)) == len(set(groups))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_fewer_groups_than_steps_make_fewer_steps():
    assert len(split_minibatches([7, 7, 9], [3, 3, 3], minibatches=4, seed=0)) == 2
    assert split_minibatches([], [], minibatches=4, seed=0) == []
    for ranks in (1, 3):
        assert plan_steps(Sequences.unrelated([]), minibatches=4, ranks=ranks, microbatch_tokens=100, seed=0) == []


def test_the_seed_decides_which_groups_are_in_a_step():
    first, again, other = (split_minibatches([*range(16)], [5] * 16, minibatches=4, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_largest_differencing_balances_the_textbook_case():
    parts = balance([8, 7, 6, 5, 4], 2)  # Karmarkar and Karp's heuristic ends at 16 and 14
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


@given(LENGTHS, st.integers(1, 5))
def test_no_two_parts_differ_by_more_than_the_longest_item(lengths, parts):
    loads = [sum(lengths[i] for i in part) for part in balance(lengths, parts)]
    assert max(loads) - min(loads) <= max(lengths)


def test_ranks_are_balanced_by_patches_too():
    patches = [66 * (row // 4 == 2) for row in range(16)]
    sequences = build_sequences([10] * 16, group_size=4, prompts=[6] * 16, patches=patches)
    (plan,) = plan_steps(sequences, minibatches=1, ranks=2, microbatch_tokens=9999, seed=0)
    assert groups_per_rank(plan, group_size=4) == [[0, 1, 3], [2]]


def test_groups_are_split_over_ranks_only_if_whole_groups_do_not_balance():
    even = build_sequences([30] * 16, group_size=4, prompts=[2] * 16)
    (plan,) = plan_steps(even, minibatches=1, ranks=2, microbatch_tokens=9999, seed=0)
    assert groups_per_rank(plan, group_size=4) in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]])
    (plan,) = plan_steps(even, minibatches=1, ranks=8, microbatch_tokens=9999, seed=0)
    assert [sum(map(len, rank)) for rank in plan.microbatches] == [2] * 8


# ---- micro-batches


@given(LENGTHS, SIZES, BUDGETS, st.integers(0, 1000))
def test_a_micro_batch_exceeds_its_budget_only_with_a_single_sequence(lengths, group_size, budget, patches):
    for rows in pack(rows_of(lengths), lengths, budget=budget):
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget
    every_second = [min(patches, budget // 2) * (row // group_size % 2) for row in range(len(lengths))]
    for shown in ([0] * len(lengths), every_second):  # patches of images count once for each group
        sequences = build_sequences(lengths, group_size=group_size, patches=shown)
        for rows in pack_groups(rows_of(lengths), sequences, budget=budget):
            read = sum({row // group_size: shown[row] for row in rows}.values())
            assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) + read <= budget


@given(LENGTHS, SIZES, BUDGETS)
def test_a_group_that_fits_a_micro_batch_is_in_one(lengths, group_size, budget):
    sequences = build_sequences(lengths, group_size=group_size)
    packed = pack_groups(rows_of(lengths), sequences, budget=budget)
    for group in sequences.split_groups(rows_of(lengths)):
        if len(group) * max(lengths[row] for row in group) <= budget:
            assert sum(not set(group).isdisjoint(rows) for rows in packed) == 1


def test_sequences_of_very_different_lengths_are_not_packed_together():
    lengths = [300] * 4 + [20] * 40
    assert pack(rows_of(lengths), lengths, budget=20000) == (tuple(range(4)), tuple(range(4, 44)))
    assert len(pack(tuple(range(8)), [20, 20, 20, 20, 19, 19, 19, 19], budget=20000)) == 1


def test_images_that_exceed_a_micro_batch_leave_half_of_it_for_tokens():
    sequences = build_sequences([10] * 8, group_size=8, patches=[5000] * 8)
    assert [len(rows) for rows in pack_groups(tuple(range(8)), sequences, budget=100)] == [5, 3]


# ---- layout of a micro-batch


def build_sample(prompt: int, completion: int) -> TrainingSample:
    tokens = np.arange(1, prompt + completion + 1)
    return TrainingSample(
        input=ModelInput.from_prompt(tokens[:prompt]).append_completion(tokens[prompt:]),
        logprobs=np.full(completion, -1, np.float32),
        advantages=np.full(completion, 2, np.float32),
        staleness=np.zeros(completion, np.int16),
    )


def test_each_completion_token_is_predicted_from_the_token_before_it():
    batch = lay_out_samples([build_sample(2, 2), build_sample(3, 0), build_sample(1, 1)], [0.5, 1.0, 0.25])
    assert batch.microbatch.tokens_BT.tolist() == [[1, 2, 3, 4], [1, 2, 3, 0], [1, 2, 0, 0]]
    assert batch.microbatch.tokens_BT.ravel()[batch.microbatch.positions_N].tolist() == [2, 3, 1]
    assert batch.microbatch.targets_N.tolist() == [3, 4, 2]
    assert batch.weights_N.tolist() == [0.5, 0.5, 0.25]
    assert batch.microbatch.rows_N.tolist() == [0, 0, 2]
    assert batch.values_N is None


def test_context_tokens_between_completion_tokens_are_read_and_not_predicted():
    turns = (
        ModelInput.from_prompt([1, 2]).append_completion([3]),
        ModelInput.from_prompt([4, 5]).append_completion([6, 7]),
    )
    batch = lay_out([ModelInput(turns[0].chunks + turns[1].chunks)])
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.positions_N.tolist() == [1, 4, 5]
    assert batch.targets_N.tolist() == [3, 6, 7]


def test_an_unpadded_layout_has_every_prompt_once_and_every_sequence_in_the_attention_blocks():
    prompt, other = ModelInput.from_prompt([1, 2, 3]), ModelInput.from_prompt([1, 2])
    inputs = [
        prompt.append_completion([4, 5, 6, 7]),
        other.append_completion([3]),
        prompt.append_completion([8]),
        prompt,
    ]
    shared = lay_out(inputs).shared
    assert shared is not None
    assert sorted(shared.tokens_L.tolist()) == [1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8]
    assert shared.tokens_L[shared.predicting_N].tolist() == [3, 4, 5, 6, 2, 3]
    attended = shared.tokens_L[shared.places_P]
    begin, rows = 0, []
    for count, width in shared.blocks:
        rows += attended[begin : begin + count * width].reshape(count, width).tolist()
        begin += count * width
    expected = [each.tokens.tolist() for each in sorted(inputs, key=len, reverse=True)]
    assert [row[: len(each)] for row, each in zip(rows, expected, strict=True)] == expected
    assert shared.places_P[shared.collected_L].tolist() == list(range(11))
    assert sorted(shared.positions_L.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6]


def test_a_micro_batch_that_would_save_too_little_is_padded():
    assert lay_out([ModelInput.from_prompt([row, 2]).append_completion([3, 4]) for row in range(8)]).shared is None


def test_an_empty_micro_batch_has_tokens_to_run_and_nothing_to_train_on():
    batch = lay_out_samples([], [])
    assert batch.microbatch.tokens_BT.size
    assert [
        len(part) for part in (batch.microbatch.positions_N, batch.microbatch.targets_N, batch.microbatch.rows_N)
    ] == [0, 0, 0]
    assert [len(part) for part in (batch.weights_N, batch.returns_N)] == [0, 0]
