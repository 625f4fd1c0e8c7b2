"""Comparison of two policies on the same problems, against published numbers, brute force and simulations."""

from math import sqrt

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from rheostat.infra.errors import BadInput, Quarantined
from rheostat.models.gate.comparison import PairedScores, compare
from rheostat.models.gate.size import problems_needed, smallest_gain

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
    assert found.method == "exact"
    if interval:
        assert compute_bonett_price(b, c, n) == pytest.approx(interval, abs=1e-4)
        assert (found.lower, found.upper) == pytest.approx(interval, abs=1.01 / n)


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
    champion = 2 + rng.random(60)  # outside 0 to 1, so that the range is unknown
    challenger = champion + rng.exponential(0.3, 60) - 0.2  # skewed, so that the corrections of BCa matter
    found = compare(pair_scores(champion, challenger), alpha=0.05, seed=1)
    gains = challenger - champion
    assert (found.test, found.method) == ("wilcoxon", "bootstrap")
    assert found.lower == pytest.approx(compute_lower_bound(gains, 0.05, 40_000, 2), abs=0.004)
    assert found.upper == pytest.approx(-compute_lower_bound(-gains, 0.05, 40_000, 3), abs=0.004)
    uncorrected = gains.mean() - 1.645 * gains.std() / sqrt(60)
    assert abs(found.lower - uncorrected) > 0.004


def test_a_seed_gives_the_same_bounds_in_any_order_of_problems():
    rng = np.random.default_rng(7)
    champion, challenger = rng.random((200, 4)), rng.random((200, 4))
    order = rng.permutation(200)
    for shift, method in ((0, "betting"), (1, "bootstrap")):
        scores = pair_scores(champion + shift, challenger + shift)
        found = compare(scores, alpha=0.01, seed=3, tests=3)
        ids = tuple(scores.prompts[at] for at in order)
        reordered = PairedScores(ids, scores.champion_PS[order], scores.challenger_PS[order])
        assert compare(reordered, alpha=0.01, seed=3, tests=3) == found
        assert compare(scores, alpha=0.01, seed=4).lower != found.lower
        assert found.holm[0] == found.lower > found.holm[1] > found.holm[2]
        assert found.method == method


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
        (GRADED, GRADED + 0.1, pytest.approx(0.1), None),
        (GRADED + 1, GRADED + 1, 0, 1.0),
    ],
)
def test_both_bootstrap_bounds_of_equal_differences_are_that_difference(champion, challenger, gain, p):
    found = compare(pair_scores(champion, challenger), alpha=0.01, seed=0, tests=2)
    assert [found.lower, found.upper, *found.holm] == [gain] * 4
    assert p is None or found.p == pytest.approx(p)


def test_fewer_than_thirty_problems_are_refused():
    with pytest.raises(BadInput, match=r"at least 30 problems.* only 29\."):
        compare(pair_binary_scores(0, 5, 29), alpha=0.01, seed=0)
    scores = pair_binary_scores(0, 5, 30)
    assert compare(scores, alpha=0.01, seed=0).prompts == 30
    scores.champion_PS[0] = NAN
    with pytest.raises(Quarantined, match=r"only 29 of 30 problems.* at least 30, because 1 of 30"):
        compare(scores, alpha=0.01, seed=0)


def test_scores_are_paired_by_problem_in_any_order_and_problems_of_one_side_are_named():
    champion = {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, 1.0], "short": [1.0]}
    challenger = {"c": [0.0, 1.0], "a": [1.0, NAN], "d": [1.0, 1.0], "short": [1.0]}
    scores = PairedScores.of(champion, challenger)
    assert (scores.prompts, scores.unmatched) == (("a", "c"), ("b", "short", "d"))
    assert scores.champion_PS.tolist() == [[1, 0], [1, 1]]
    assert np.array_equal(scores.challenger_PS, [[1, NAN], [0, 1]], equal_nan=True)


def test_a_score_outside_the_stated_range_is_refused_with_the_setting():
    scores = pair_scores(np.zeros(40), np.full(40, -0.5))
    with pytest.raises(Quarantined, match=r"between -0\.5 and 0, but the range is 0 to 1.* `range`"):
        compare(scores, alpha=0.01, seed=0, score_range=(0, 1))
    assert compare(scores, alpha=0.01, seed=0, score_range=(-1, 1)).method == "betting"
    assert compare(scores, alpha=0.01, seed=0).method == "bootstrap"


def test_bounds_of_scores_at_both_ends_of_a_range_are_those_of_0_and_1_in_its_unit():
    unit = compare(pair_binary_scores(5, 12, 60), alpha=0.05, seed=0)
    scores = pair_binary_scores(5, 12, 60)
    doubled = PairedScores(scores.prompts, 2 * scores.champion_PS - 1, 2 * scores.challenger_PS - 1)
    found = compare(doubled, alpha=0.05, seed=0, score_range=(-1, 1))
    assert (found.method, found.lower, found.upper) == ("exact", 2 * unit.lower, 2 * unit.upper)


@pytest.mark.parametrize(
    ("gain", "alpha", "problems"),
    [(0.05, 0.05, 492.51), (0.05, 0.01, 800.21), (0.03, 0.05, 1371.81), (0.03, 0.01, 2227.56)],
)
def test_the_problems_needed_are_within_two_percent_of_worked_cases(gain, alpha, problems):
    """Connor's formula, which is a normal approximation, gives these numbers."""
    needed = problems_needed(gain, 0.2, alpha=alpha)
    assert needed == pytest.approx(problems, rel=0.02)
    assert smallest_gain(needed, 0.2, alpha=alpha) == pytest.approx(gain, rel=0.02)
