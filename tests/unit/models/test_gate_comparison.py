"""Comparison of two policies on the same problems, against published numbers, brute force and simulations."""

from functools import cache
from math import ceil, sqrt

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from infra.errors import BadInput, Quarantined
from models.gate.comparison import PairedScores, compare
from models.gate.size import problems_needed, smallest_gain

NAN = float("nan")


def pair_scores(champion, challenger):
    """Pair the scores of P problems; each side is an array of P or of P x S scores."""
    sides = [np.array(side, float).reshape(len(side), -1) for side in (champion, challenger)]
    return PairedScores(tuple(f"p{n}" for n in range(len(champion))), *sides)


def pair_binary_scores(worse, better, problems):
    """Pair scores of 0 or 1: only the champion is right on `worse` problems, only the challenger on `better` ones."""
    same = ([1.0, 0.0] * problems)[: problems - worse - better]
    return pair_scores([1] * worse + [0] * better + same, [0] * worse + [1] * better + same)


def compute_bonett_price(b, c, n, z=1.959964):
    """Return the 95% interval of a difference of paired proportions, with one success added to b and c."""
    share_b, share_c = (b + 1) / (n + 2), (c + 1) / (n + 2)
    half = z * sqrt((share_b + share_c - (share_c - share_b) ** 2) / (n + 2))
    return share_c - share_b - half, share_c - share_b + half


@pytest.mark.parametrize(
    ("b", "c", "n", "p", "interval"),
    [
        (10, 25, 256, 0.0083, (0.0125, 0.1038)),
        (8, 16, 256, 0.0758, (-0.0075, 0.0696)),
        (0, 6, 256, 0.0156, None),
        (12, 12, 256, 0.5806, None),
        (30, 50, 1024, 0.0165, (0.0022, 0.0368)),
    ],
)
def test_bounds_and_exact_p_equal_worked_cases(b, c, n, p, interval):
    found = compare(pair_binary_scores(b, c, n), alpha=0.025, seed=0)
    assert (found.worse, found.better, found.test) == (b, c, "mcnemar")
    assert found.p == pytest.approx(p, abs=1e-4)
    assert found.mean == found.challenger - found.champion == (c - b) / n
    assert found.discordant == found.mean_square == (b + c) / n
    if interval:
        assert compute_bonett_price(b, c, n) == pytest.approx(interval, abs=1e-4)
        assert (found.lower, found.upper) == pytest.approx(interval, abs=1.01 / n)  # resampled means are 1 / n apart
    if (b, c) == (10, 25):  # published interval of the bootstrap
        assert (found.lower, found.upper) == pytest.approx((0.016, 0.102), abs=1 / 256)


def compute_lower_bound(differences, alpha, resamples, seed):
    """Return the lower bound of Efron's BCa interval, from another random stream."""
    d, rng = np.array(differences), np.random.default_rng(seed)
    means = np.sort([d[rng.integers(0, len(d), len(d))].mean() for _ in range(resamples)])
    bias = ndtri(((means < d.mean()).mean() + (means <= d.mean()).mean()) / 2)
    jackknife = np.array([np.delete(d, at).mean() for at in range(len(d))])
    off = jackknife.mean() - jackknife
    acceleration = (off**3).sum() / (6 * (off**2).sum() ** 1.5)
    shifted = bias + ndtri(alpha)
    return np.quantile(means, ndtr(bias + shifted / (1 - acceleration * shifted)))


def test_both_bounds_equal_those_of_brute_force():
    rng = np.random.default_rng(5)
    champion = rng.random(60)
    challenger = champion + rng.exponential(0.3, 60) - 0.2  # skewed, so that the corrections of BCa matter
    found = compare(pair_scores(champion, challenger), alpha=0.05, seed=1)
    gains = challenger - champion
    assert found.test == "wilcoxon"
    assert found.lower == pytest.approx(compute_lower_bound(gains, 0.05, 40_000, 2), abs=0.004)
    assert found.upper == pytest.approx(-compute_lower_bound(-gains, 0.05, 40_000, 3), abs=0.004)
    uncorrected = gains.mean() - 1.645 * gains.std() / sqrt(60)
    assert abs(found.lower - uncorrected) > 0.004


def test_a_seed_gives_the_same_bounds_in_any_order_of_problems():
    rng = np.random.default_rng(7)
    champion, challenger = rng.random((200, 4)), rng.random((200, 4))
    found = compare(pair_scores(champion, challenger), alpha=0.01, seed=3, tests=3)
    order = rng.permutation(200)
    assert compare(pair_scores(champion[order], challenger[order]), alpha=0.01, seed=3, tests=3) == found
    assert compare(pair_scores(champion, challenger), alpha=0.01, seed=4).lower != found.lower
    assert found.holm[0] == found.lower > found.holm[1] > found.holm[2]


def test_more_samples_per_problem_do_not_narrow_the_bounds():
    rng = np.random.default_rng(9)
    champion, challenger = rng.random((50, 1)), rng.random((50, 1))
    once = compare(pair_scores(champion, challenger), alpha=0.05, seed=0)
    often = compare(pair_scores(champion.repeat(8, 1), challenger.repeat(8, 1)), alpha=0.05, seed=0)
    assert often.lower == pytest.approx(once.lower, abs=1e-9)
    assert (often.prompts, often.completions) == (50, 400)


def test_a_missing_score_excludes_its_pair_and_a_problem_without_pairs_is_excluded():
    champion = np.array([[1, 1], [0, 1], *[[0, 0]] * 40], float)
    challenger = np.array([[1, 0], [1, 1], *[[0, 1]] * 40], float)
    champion[0, 1], challenger[1] = NAN, NAN
    found = compare(pair_scores(champion, challenger), alpha=0.05, seed=0)
    assert (found.prompts, found.completions, found.missing) == (41, 84, 3)
    assert (found.champion, found.challenger) == (pytest.approx(1 / 41), pytest.approx(21 / 41))
    assert found.missing_share == 3 / 84
    assert (found.better, found.worse) == (40, 0)


GRADED = np.linspace(0, 1, 40)


@pytest.mark.parametrize(
    ("champion", "challenger", "gain", "p"),
    [
        (np.ones(40), np.ones(40), 0, 1.0),
        (np.zeros(40), np.ones(40), 1, 0.5**40),
        (GRADED, GRADED + 0.1, pytest.approx(0.1), None),
        (GRADED, GRADED, 0, 1.0),
    ],
)
def test_both_bounds_of_equal_differences_are_that_difference(champion, challenger, gain, p):
    found = compare(pair_scores(champion, challenger), alpha=0.01, seed=0, tests=2)
    assert [found.lower, found.upper, *found.holm] == [gain] * 4
    assert p is None or found.p == pytest.approx(p)


def test_fewer_than_thirty_problems_are_refused():
    with pytest.raises(BadInput, match=r"at least 30 problems.* 29$"):
        compare(pair_binary_scores(0, 5, 29), alpha=0.01, seed=0)
    scores = pair_binary_scores(0, 5, 30)
    assert compare(scores, alpha=0.01, seed=0).prompts == 30
    scores.champion_PS[0] = NAN
    with pytest.raises(Quarantined, match=r"30 problems 29 have scores.* at least 30: 1 of 30"):
        compare(scores, alpha=0.01, seed=0)


def test_scores_are_paired_by_problem_in_any_order_and_problems_of_one_side_are_named():
    champion = {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, 1.0], "short": [1.0]}
    challenger = {"c": [0.0, 1.0], "a": [1.0, NAN], "d": [1.0, 1.0], "short": [1.0]}
    scores = PairedScores.of(champion, challenger)
    assert (scores.prompts, scores.unmatched) == (("a", "c"), ("b", "short", "d"))
    assert scores.champion_PS.tolist() == [[1, 0], [1, 1]]
    assert np.array_equal(scores.challenger_PS, [[1, NAN], [0, 1]], equal_nan=True)


@pytest.mark.parametrize("discordant", [0.02, 0.05, 0.2, 0.42])
def test_at_most_one_and_a_half_percent_of_equal_challengers_are_shown_to_be_better(discordant):
    """At accuracy 0.7, independent answers differ on 0.42 of the problems, answers of similar policies on fewer."""

    @cache  # bounds depend on the counts alone
    def is_shown(worse, better):
        found = compare(pair_binary_scores(worse, better, 200), alpha=0.01, seed=0, resamples=2000)
        return found.lower > 0, found.lower > 0 and found.p <= 0.01

    rng = np.random.default_rng(11)
    differ = rng.binomial(200, discordant, 2000)
    better = rng.binomial(differ, 0.5)
    bound, both = np.mean([is_shown(int(n - c), int(c)) for n, c in zip(differ, better, strict=True)], axis=0)
    assert both <= 0.015
    if discordant > 0.1:
        assert 0.004 < bound <= 0.015  # the bound keeps its level without the test


def test_the_bound_alone_is_above_zero_if_only_five_problems_differ():
    found = compare(pair_binary_scores(0, 5, 200), alpha=0.01, seed=0)
    assert found.lower > 0
    assert found.p == 0.5**5


@pytest.mark.parametrize(
    ("gain", "alpha", "problems"),
    [(0.05, 0.05, 492.51), (0.05, 0.01, 800.21), (0.03, 0.05, 1371.81), (0.03, 0.01, 2227.56)],
)
def test_the_problems_needed_equal_worked_cases_and_the_smallest_gain_is_the_inverse(gain, alpha, problems):
    needed = problems_needed(gain, 0.2, alpha=alpha)
    assert needed == ceil(problems)
    assert smallest_gain(needed, 0.2, alpha=alpha) < gain < smallest_gain(needed - 1, 0.2, alpha=alpha)


def test_the_problems_needed_show_the_gain_with_a_power_of_0_8():
    """Simulate McNemar's statistic, which the formula approximates."""
    rng = np.random.default_rng(2)
    counts = rng.multinomial(problems_needed(0.05, 0.2, alpha=0.01), [0.075, 0.125, 0.8], 20_000)
    z = (counts[:, 1] - counts[:, 0]) / np.sqrt(counts[:, 0] + counts[:, 1])
    assert (z > ndtri(0.99)).mean() == pytest.approx(0.8, abs=0.015)
