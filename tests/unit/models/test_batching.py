"""Which sequences meet in which step, on which rank, in which pass."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.modeling.batching import Sequences, balance, pack, pack_groups, plan_steps, split_minibatches
from models.modeling.layout import TrainingSample, lay_out, lay_out_samples
from models.records.model_input import ModelInput

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def in_groups(lengths, *, of, patches=None):
    """Sequences in groups of the same size, each of which has about half of the first one in common."""
    groups = [row // of for row in range(len(lengths))]
    prompts = [min(lengths[group * of : (group + 1) * of]) // 2 for group in groups]
    return Sequences(lengths=lengths, prompts=prompts, groups=groups, patches=patches or [0] * len(lengths))


@given(LENGTHS, st.integers(1, 4), st.integers(1, 5), st.integers(1, 2000), st.integers(0, 9))
def test_every_row_is_in_exactly_one_pass(lengths, ranks, minibatches, budget, seed):
    plans = plan_steps(
        in_groups(lengths, of=4), minibatches=minibatches, ranks=ranks, microbatch_tokens=budget, seed=seed
    )
    assert sorted(row for plan in plans for row in plan.rows) == list(range(len(lengths)))


@given(LENGTHS, st.integers(2, 4), st.integers(1, 2000))
def test_every_rank_runs_as_many_passes(lengths, ranks, budget):
    sequences = in_groups(lengths, of=len(lengths))
    (plan,) = plan_steps(sequences, minibatches=3, ranks=ranks, microbatch_tokens=budget, seed=0)
    assert len(plan.passes) == ranks
    assert len({len(passes) for passes in plan.passes}) == 1


@given(LENGTHS, st.integers(1, 6), st.integers(0, 9))
def test_a_group_is_never_split_over_steps(lengths, minibatches, seed):
    groups = [row // 3 for row in range(len(lengths))]
    parts = split_minibatches(groups, lengths, minibatches=minibatches, seed=seed)
    found = [{groups[row] for row in part} for part in parts]
    assert sum(map(len, found)) == len(set(groups))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_fewer_groups_than_steps_make_fewer_steps():
    assert len(split_minibatches([7, 7, 9], [3, 3, 3], minibatches=4, seed=0)) == 2
    assert split_minibatches([], [], minibatches=4, seed=0) == []


def test_another_seed_deals_other_groups():
    groups, lengths = list(range(16)), [5] * 16
    assert split_minibatches(groups, lengths, minibatches=4, seed=1) == split_minibatches(
        groups, lengths, minibatches=4, seed=1
    )
    assert split_minibatches(groups, lengths, minibatches=4, seed=1) != split_minibatches(
        groups, lengths, minibatches=4, seed=2
    )


def test_largest_differencing_balances_the_textbook_case():
    parts = balance([8, 7, 6, 5, 4], 2)  # Karmarkar and Karp's heuristic ends at 16 and 14
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


@given(LENGTHS, st.integers(1, 5))
def test_no_two_parts_differ_by_more_than_the_longest_item(lengths, parts):
    loads = [sum(lengths[i] for i in part) for part in balance(lengths, parts)]
    assert max(loads) - min(loads) <= max(lengths)


@given(LENGTHS, st.integers(1, 2000))
def test_a_pass_stays_within_its_budget_unless_one_sequence_alone_exceeds_it(lengths, budget):
    for rows in pack(tuple(range(len(lengths))), lengths, budget=budget):
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget


def test_sequences_of_very_different_lengths_do_not_share_a_pass():
    lengths = [300] * 4 + [20] * 40
    assert pack(tuple(range(44)), lengths, budget=20000) == (tuple(range(4)), tuple(range(4, 44)))
    assert len(pack(tuple(range(8)), [20, 20, 20, 20, 19, 19, 19, 19], budget=20000)) == 1


@given(LENGTHS, st.integers(1, 4), st.integers(1, 2000))
def test_a_pass_of_groups_stays_within_its_budget_unless_one_sequence_alone_exceeds_it(lengths, size, budget):
    for rows in pack_groups(tuple(range(len(lengths))), in_groups(lengths, of=size), budget=budget):
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget


@given(LENGTHS, st.integers(1, 4), st.integers(1, 2000))
def test_a_group_that_fits_a_pass_is_in_one(lengths, size, budget):
    sequences = in_groups(lengths, of=size)
    passes = pack_groups(tuple(range(len(lengths))), sequences, budget=budget)
    for group in sequences.grouped(tuple(range(len(lengths)))):
        if len(group) * max(lengths[row] for row in group) <= budget:
            assert sum(not set(group).isdisjoint(rows) for rows in passes) == 1


@given(LENGTHS, st.integers(1, 4), st.integers(1, 2000), st.integers(0, 1000))
def test_a_pass_holds_the_patches_that_the_tower_reads_beside_its_tokens(lengths, size, budget, patches):
    shown = [min(patches, budget // 2) * (row // size % 2) for row in range(len(lengths))]  # of every second group
    sequences = in_groups(lengths, of=size, patches=shown)
    for rows in pack_groups(tuple(range(len(lengths))), sequences, budget=budget):
        read = sum({row // size: shown[row] for row in rows}.values())
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) + read <= budget


def test_images_that_fill_a_pass_leave_half_of_it_for_tokens():
    sequences = in_groups([10] * 8, of=8, patches=[5000] * 8)
    assert [len(rows) for rows in pack_groups(tuple(range(8)), sequences, budget=100)] == [5, 3]


def test_ranks_are_balanced_by_patches_too():
    groups = [row // 4 for row in range(16)]
    sequences = Sequences(
        lengths=[10] * 16, prompts=[6] * 16, groups=groups, patches=[66 * (group == 2) for group in groups]
    )
    (plan,) = plan_steps(sequences, minibatches=1, ranks=2, microbatch_tokens=9999, seed=0)
    assert sorted(sorted({row // 4 for rows in rank for row in rows}) for rank in plan.passes) == [[0, 1, 3], [2]]


def test_groups_stay_whole_on_a_rank_where_that_balances_and_are_split_where_it_does_not():
    groups = [row // 4 for row in range(16)]
    even = Sequences(lengths=[30] * 16, prompts=[2] * 16, groups=groups, patches=[0] * 16)
    (plan,) = plan_steps(even, minibatches=1, ranks=2, microbatch_tokens=9999, seed=0)
    assert sorted(sorted({row // 4 for rows in rank for row in rows}) for rank in plan.passes) in (
        [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]
    )  # fmt: skip
    (plan,) = plan_steps(even, minibatches=1, ranks=8, microbatch_tokens=9999, seed=0)
    assert [sum(map(len, rank)) for rank in plan.passes] == [2] * 8


def sample(prompt: int, completion: int) -> TrainingSample:
    tokens = np.arange(1, prompt + completion + 1)
    return TrainingSample(
        input=ModelInput.given(tokens[:prompt]).continued(tokens[prompt:]),
        logprobs=np.full(completion, -1, np.float32),
        advantages=np.full(completion, 2, np.float32),
        staleness=np.zeros(completion, np.int16),
    )


def test_a_pass_predicts_each_completion_token_from_the_token_before_it():
    batch = lay_out_samples([sample(2, 2), sample(3, 0), sample(1, 1)], [0.5, 1.0, 0.25])
    assert batch.reads.tokens_BT.tolist() == [[1, 2, 3, 4], [1, 2, 3, 0], [1, 2, 0, 0]]
    assert batch.reads.tokens_BT.ravel()[batch.reads.positions_N].tolist() == [2, 3, 1]
    assert batch.reads.targets_N.tolist() == [3, 4, 2]
    assert batch.weights_N.tolist() == [0.5, 0.5, 0.25]
    assert batch.reads.rows_N.tolist() == [0, 0, 2]
    assert batch.values_N is None


def test_tokens_that_stand_between_written_ones_are_read_and_not_predicted():
    turns = ModelInput.given([1, 2]).continued([3]), ModelInput.given([4, 5]).continued([6, 7])
    batch = lay_out([ModelInput(turns[0].chunks + turns[1].chunks)])
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.positions_N.tolist() == [1, 4, 5]
    assert batch.targets_N.tolist() == [3, 6, 7]


def test_a_pass_without_padding_has_every_prompt_once_and_its_sequences_where_attention_looks():
    prompt, other = ModelInput.given([1, 2, 3]), ModelInput.given([1, 2])
    inputs = [prompt.continued([4, 5, 6, 7]), other.continued([3]), prompt.continued([8]), prompt]
    batch = lay_out(inputs)
    shared = batch.shared
    assert shared is not None
    assert sorted(shared.tokens_L.tolist()) == [1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8]
    assert shared.tokens_L[shared.predicting_N].tolist() == [3, 4, 5, 6, 2, 3]
    seen = shared.tokens_L[shared.places_P]
    begin, rows = 0, []
    for count, width in shared.blocks:
        rows += seen[begin : begin + count * width].reshape(count, width).tolist()
        begin += count * width
    expected = sorted(inputs, key=lambda each: -len(each))
    assert [row[: len(each)] for row, each in zip(rows, expected, strict=True)] == [e.tokens.tolist() for e in expected]
    assert shared.places_P[shared.collected_L].tolist() == list(range(11))
    assert sorted(shared.positions_L.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6]


def test_a_pass_that_would_save_too_little_is_padded():
    assert lay_out([ModelInput.given([row, 2]).continued([3, 4]) for row in range(8)]).shared is None


def test_an_empty_pass_has_tokens_to_run_and_nothing_to_learn():
    batch = lay_out_samples([], [])
    assert batch.reads.tokens_BT.size
    assert [len(part) for part in (batch.reads.positions_N, batch.reads.targets_N, batch.reads.rows_N)] == [0, 0, 0]
    assert len(batch.weights_N) == 0
    assert batch.returns_N is not None
    assert len(batch.returns_N) == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_samples_make_no_steps(ranks):
    assert plan_steps(Sequences.apart([]), minibatches=4, ranks=ranks, microbatch_tokens=100, seed=0) == []
