"""A curriculum chooses one of several prompts by their solve rates, and loses and repeats none within an epoch."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import ceil
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.infra.errors import BadInput
from rheostat.models.config.reward_terms import RegexReward, TargetReward
from rheostat.models.data.curriculum import Cursor, Part, PromptChoice, PromptOrder, give_back, take_rows
from rheostat.models.rewards.scores import measure_solve_rates

PARTS = (Part(range(40), 3), Part(range(40, 50), 1), Part(range(50, 150), 0.5))
ROWS = 150

CHOICE = PromptChoice(
    solve_rates={0: 1.0, 3: 0.4, 2: 0.1, 6: 0.5, 1: 0.5}, target=0.5, candidates=2, explore=0.25, unseen=0.25
)
"""Choice between pairs of rows. Every fourth position explores: 3, 7, 11, …"""


def take(count, *, position=0, choice=CHOICE, **options):
    """Take rows from the stream of 8 prompts with seed 3: 0 3, 4 2, 6 5, 7 1 and then 0 2, 6 3, … in pairs."""
    order = PromptOrder(8, 3, choice=choice)
    return take_rows(Cursor(position=position), count, order, **{"taken": ()} | options)


def test_each_pair_supplies_the_prompt_that_is_nearer_to_the_target_and_unseen_ones_count_as_configured():
    """Distances to 0.5: row 0 0.5, 3 0.1, 4 and 5 (unseen) 0.25, 2 0.4, 6 0. The fourth pair explores: 7 is unseen."""
    assert take(5) == ((3, 4, 6, 7, 2), Cursor(position=5))
    assert CHOICE.metrics((3, 4, 6, 7, 2)) == {"seen_prompts": 3, "solve_rate_sum": 1.0}
    assert take(2, choice=replace(CHOICE, unseen=0.0))[0] == (3, 2)
    assert take(3, choice=replace(CHOICE, target=0.9))[0] == (0, 4, 6)


def test_equal_distances_and_exploration_without_unseen_prompts_take_the_first_candidate():
    assert take(1, choice=replace(CHOICE, solve_rates={0: 0.75, 3: 0.25}))[0] == (0,)
    assert take(1, choice=replace(CHOICE, solve_rates={0: 0.25, 3: 0.75}))[0] == (0,)
    assert take(1, position=3, choice=replace(CHOICE, solve_rates={7: 0.0, 1: 0.5}))[0] == (7,)


def test_prompts_of_the_iteration_are_no_candidates_and_wait_only_if_all_candidates_are_used():
    assert take(1, position=5, taken=(6,)) == ((3,), Cursor(position=6))
    _, after = take(1, position=5, taken=(6, 3))
    assert after.position > 6 and after.returned[0] == 6


def test_excluded_prompts_are_no_candidates_and_never_wait():
    assert take(1, position=5, excluded=(6,)) == ((3,), Cursor(position=6))
    [row], after = take(1, position=5, excluded=(6, 3))
    assert row not in (6, 3) and after == Cursor(position=6)


def test_waiting_prompts_are_issued_before_the_curriculum_chooses():
    cursor = give_back(Cursor(), (5, 1))
    rows, after = take_rows(cursor, 3, PromptOrder(8, 3, choice=CHOICE), taken=())
    assert (rows, after) == ((5, 1, 3), Cursor(position=1))


@pytest.mark.parametrize(("explore", "positions"), [(0.25, [3, 7, 11]), (0.4, [2, 4, 7, 9]), (1.0, [*range(12)])])
def test_the_share_of_exploring_positions_is_exact(explore, positions):
    """Row 1 is at the target, so the first row is chosen only where the choice explores."""
    choice = replace(CHOICE, solve_rates={0: 0.0, 1: 0.5}, explore=explore)
    assert [number for number in range(12) if choice.choose(number, (0, 1)) == 0] == positions


choices = st.builds(
    PromptChoice,
    solve_rates=st.dictionaries(st.integers(0, 23), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    target=st.just(0.5),
    candidates=st.integers(1, 5),
    explore=st.sampled_from([0.1, 0.5, 1.0]),
    unseen=st.sampled_from([0.25, 0.5]),
)


@given(st.integers(2, 24), choices, st.data())
def test_no_prompt_is_lost_or_issued_twice_within_an_epoch(num_prompts, choice, data):
    cursor, used = Cursor(), Counter()
    for _ in range(data.draw(st.integers(1, 8))):
        iteration = []
        for _ in range(data.draw(st.integers(1, 3))):
            count = data.draw(st.integers(0, num_prompts - len(iteration)))
            order = PromptOrder(num_prompts, 7, choice=choice)
            rows, cursor = take_rows(cursor, count, order, taken=iteration)
            assert len(rows) == count
            iteration += rows
        assert len(set(iteration)) == len(iteration)
        returned = data.draw(st.lists(st.sampled_from(iteration), unique=True)) if iteration else []
        cursor = give_back(cursor, returned)
        used += Counter(iteration) - Counter(returned)
        issued = used + Counter(cursor.returned)
        assert issued.total() == cursor.position, "each position issued one prompt, which is used or waits"
        epochs = ceil(Fraction(cursor.position * choice.candidates, num_prompts))
        assert all(count <= epochs for count in issued.values())


@given(st.integers(3, 24), choices, st.data())
def test_two_waves_choose_the_same_prompts_as_one_wave_of_their_total_size(num_prompts, choice, data):
    total = data.draw(st.integers(2, num_prompts))
    size = data.draw(st.integers(1, total - 1))
    cursor = Cursor(position=data.draw(st.integers(0, 3 * num_prompts)), returned=(1,))
    order = PromptOrder(num_prompts, 1, choice=choice)
    rows, after = take_rows(cursor, total, order, taken=())
    first, between = take_rows(cursor, size, order, taken=())
    second, last = take_rows(between, total - size, order, taken=first)
    assert (first + second, last.position, sorted(last.returned)) == (rows, after.position, sorted(after.returned))


@pytest.mark.parametrize("parts", [(), PARTS])
def test_a_choice_among_one_candidate_is_the_random_order(parts):
    for position in (0, 7, 160):
        cursor, plain = Cursor(position=position), PromptOrder(ROWS, 7, parts)
        order = replace(plain, choice=replace(CHOICE, candidates=1))
        assert take_rows(cursor, 20, order, taken=(3,)) == take_rows(cursor, 20, plain, taken=(3,))


@pytest.mark.parametrize("seed", range(3))
def test_the_hardest_prompt_is_rare_but_never_starves(seed):
    """A quarter of 600 choices among 4 of 12 prompts explores, and row 0 is the first candidate in 1/12 of them."""
    cursor, used = Cursor(), Counter()
    choice = PromptChoice({0: 0.0} | dict.fromkeys(range(1, 12), 0.5), 0.5, 4, 0.25, 0.25)
    for _ in range(200):
        rows, cursor = take_rows(cursor, 3, PromptOrder(12, seed, choice=choice), taken=())
        used.update(rows)
    assert used[0] == pytest.approx(600 / 4 / 12, abs=10)
    assert used[0] > 0 and min(used[row] for row in range(1, 12)) > 30


@pytest.mark.parametrize("seed", range(3))
def test_the_weights_of_a_mixture_hold_although_one_part_is_too_hard(seed):
    cursor, rows = Cursor(), list[int]()
    rates = {row: 0.0 if row in PARTS[1].rows else 0.5 for row in range(ROWS)}
    order = PromptOrder(ROWS, seed, PARTS, replace(CHOICE, solve_rates=rates, candidates=3))
    for _ in range(500):
        taken, cursor = take_rows(cursor, 8, order, taken=())
        rows += taken
    found = Counter(next(n for n, part in enumerate(PARTS) if row in part.rows) for row in rows)
    for number, part in enumerate(PARTS):
        assert found[number] == pytest.approx(4000 * part.weight / 4.5, abs=8)


def test_parts_of_a_mixture_choose_among_their_own_prompts():
    """The one prompt near the target is in the first part, and the positions of the second part never issue it."""
    parts = (Part(range(4), 1), Part(range(4, 8), 1))
    choice = replace(CHOICE, solve_rates={0: 0.5} | dict.fromkeys(range(1, 8), 0.0), candidates=4, explore=0.01)
    rows, _ = take_rows(Cursor(), 2, PromptOrder(8, 3, parts, choice), taken=())
    assert 0 in rows and len({*rows} & {*range(4, 8)}) == 1


def test_the_best_of_four_uniform_solve_rates_is_at_a_fifth_of_the_largest_distance_on_average():
    """The smallest of four distances that are uniform between 0 and 1/2 has the mean 1/2 · 1/5."""
    rates = dict(enumerate(Random(0).choices(range(1001), k=8000)))
    choice = PromptChoice({row: rate / 1000 for row, rate in rates.items()}, 0.5, 4, 1e-6, 0.25)
    rows, _ = take_rows(Cursor(), 2000, PromptOrder(8000, 1, choice=choice), taken=())
    assert sum(abs(rates[row] / 1000 - 0.5) for row in rows) / 2000 == pytest.approx(0.1, abs=0.01)


def build_scores(*rows):
    """Build a score shard from pairs of a prompt row and the scores of its completions, None if one is missing."""
    pairs = [(row, value) for row, values in rows for value in values]
    scores = pa.array([value for _, value in pairs], pa.float64())
    return pa.table({"prompt_row": [row for row, _ in pairs], "reward": scores, "reward_even": scores})


def test_the_solve_rate_is_the_mean_of_the_scored_completions_of_a_prompt():
    shards = [build_scores((4, (0, 1, None, 0)), (7, (None, None))), build_scores((2, (1, 1)), (9, (0.25, 0.5)))]
    reward = RegexReward(pattern="x", name="even")
    assert measure_solve_rates(shards, reward) == {2: 1.0, 4: pytest.approx(1 / 3), 9: 0.375}


@pytest.mark.parametrize("scores", [(3, 1), (-1, 0)])
def test_a_mean_score_outside_of_an_unknown_range_is_refused(scores):
    reward = TargetReward(target="a:b", name="even")
    assert measure_solve_rates([build_scores((2, (0.5, 1)))], reward) == {2: 0.75}
    with pytest.raises(BadInput, match=r"needs scores from 0 to 1, but a prompt has the mean score .* 'even'"):
        measure_solve_rates([build_scores((0, scores), (2, (0.5, 1)))], reward)


def test_scores_of_another_range_are_a_share_of_the_range():
    class Signed(RegexReward):
        @property
        def score_range(self):
            return -1.0, 1.0

    shards = [build_scores((0, (-1, 1)), (1, (0.5, 0.5)))]
    assert measure_solve_rates(shards, Signed(pattern="x", name="even")) == {0: 0.5, 1: 0.75}
