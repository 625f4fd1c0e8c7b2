"""Promises of the gate: how often it promotes, passes a guard or calls a policy worse by mistake, and its power.

Scores of 0 or 1 are counted by exact enumeration, graded scores are simulated.
"""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from rheostat.models.gate.bounds import betting_lower_bound, betting_power, largest_losses
from rheostat.models.gate.comparison import PairedScores, compare
from rheostat.models.gate.size import RulePower, power_of
from rheostat.models.gate.verdict import MeasuredGain, MeasuredGuard

CLAIMS = {"gain": 0.0, "gain of 0.05": 0.05, "guard of 0.02": -0.02, "guard of 0.1": -0.1}
"""Thresholds that the lower bound has to exceed. "Worse" is "gain" with the two policies exchanged."""


def compare_counts(better, worse, problems, **options):
    """Compare policies of which the challenger alone is right on `better` problems, the champion alone on `worse`."""
    champion = np.repeat([0.0, 1.0, 1.0], [better, worse, problems - better - worse])
    challenger = np.repeat([1.0, 0.0, 1.0], [better, worse, problems - better - worse])
    return compare_scores(champion, challenger, **options)


def compare_scores(champion, challenger, *, alpha=0.01, seed=0, threshold=0.0):
    ids = tuple(f"{number:06}" for number in range(len(champion)))
    scores = PairedScores(ids, champion.reshape(len(ids), -1), challenger.reshape(len(ids), -1))
    return compare(scores, alpha=alpha, seed=seed, score_range=(0.0, 1.0), threshold=threshold)


def compute_chance(losses, better, worse):
    """Return the probability that at most `losses[wins]` problems are lost, for true shares of wins and losses."""
    problems = len(losses) - 1
    wins = np.arange(problems + 1)
    lost = stats.binom.cdf(losses, problems - wins, min(1.0, worse / (1 - better)))
    return float((stats.binom.pmf(wins, problems, better) * lost).sum())


def find_largest_chance(problems, threshold, alpha):
    """Return the largest probability of a false claim, over pairs of policies that differ by exactly the threshold."""
    losses = largest_losses(problems, threshold, alpha=alpha)
    fewest = max(0.0, threshold) + 1e-9
    shares = np.concatenate([fewest + np.geomspace(1e-4, 0.1, 25), np.linspace(fewest, (0.999 + threshold) / 2, 60)])
    return max(compute_chance(losses, share, max(0.0, share - threshold)) for share in shares)


def is_false_claim_rare(problems, claim, alpha):
    assert find_largest_chance(problems, CLAIMS[claim], alpha) <= alpha * 1.01


@pytest.mark.parametrize(
    ("problems", "claim", "alpha"),
    [(30, "guard of 0.02", 0.01), (30, "gain", 0.05), (100, "gain of 0.05", 0.01), (256, "guard of 0.02", 0.05)],
)
def test_a_false_claim_about_scores_of_0_or_1_is_at_most_as_probable_as_alpha(problems, claim, alpha):
    is_false_claim_rare(problems, claim, alpha)


@pytest.mark.slow
@pytest.mark.parametrize(("problems", "claim", "alpha"), list(product((40, 120, 500, 1000), CLAIMS, (0.01, 0.05))))
def test_a_false_claim_is_at_most_as_probable_as_alpha_in_every_cell(problems, claim, alpha):
    is_false_claim_rare(problems, claim, alpha)


@pytest.mark.parametrize(("problems", "threshold"), [(60, 0.0), (60, -0.1), (200, 0.05)])
def test_bounds_exceed_a_threshold_exactly_if_the_enumerated_test_rejects(problems, threshold):
    losses = largest_losses(problems, threshold, alpha=0.05)
    for worse in (losses[25], losses[25] + 1):
        found = compare_counts(25, worse, problems, alpha=0.05, threshold=threshold)
        assert (found.lower > threshold) == (worse <= losses[25]), worse


def test_thirty_equal_answers_exclude_only_losses_that_thirty_problems_would_show():
    """A loss on 14.2% of problems leaves thirty problems untouched with probability 0.01: 1 - 0.01^(1 / 30)."""
    found = compare_counts(0, 0, 30)
    assert -0.17 < found.lower == -found.upper < -0.1423
    assert not MeasuredGuard(suite="a", margin=0.14, difference=found).holds
    assert MeasuredGuard(suite="a", margin=0.17, difference=found).holds


def draw_rare_losses(rng, problems):
    """Small gains and rare large losses: no gain on average, and mostly no loss in a sample."""
    champion = np.full(problems, 0.98)
    lost = rng.random(problems) < 0.02 / 0.98
    return champion, np.where(lost, 0.02, champion + 0.02 - 0.0004)


def draw_rare_gains(rng, problems):
    champion, challenger = draw_rare_losses(rng, problems)
    return challenger, champion


def draw_rare_fractions(rng, problems):
    """Scores that are mostly 0 or 1, so that the exact test is used if no fraction is drawn."""
    champion = rng.integers(0, 2, problems).astype(float)
    drawn = rng.random(problems)
    return np.where(drawn < 0.01, 0.5, champion), np.where(drawn < 0.01, 0.5, rng.permutation(champion))


def draw_votes(rng, problems):
    """Mean scores of four samples of equal policies."""
    right = rng.beta(0.5, 0.5, problems)
    return rng.binomial(4, right) / 4, rng.binomial(4, right) / 4


GRADED = [draw_rare_losses, draw_rare_gains, draw_rare_fractions, draw_votes]


def count_false_claims(draw, problems, alpha, simulations):
    """Return the number of simulations in which equal policies are called better, and worse."""
    rng = np.random.default_rng(problems)
    compared = [compare_scores(*draw(rng, problems), alpha=alpha, seed=seed) for seed in range(simulations)]
    gains = [MeasuredGain(suite="a", difference=each) for each in compared]
    return sum(gain.shows(1) for gain in gains), sum(gain.is_loss for gain in gains)


def test_skewed_scores_of_equal_policies_are_rarely_called_better():
    better, worse = count_false_claims(draw_rare_losses, 60, 0.01, 40)
    assert max(better, worse) <= 3  # of 40 with probability 0.01 each, more than 3 have probability 0.0007


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "problems"), list(product(GRADED, (40, 250))))
def test_equal_policies_with_graded_scores_are_called_better_or_worse_at_most_at_rate_alpha(draw, problems):
    most = stats.binom.ppf(0.9999, 300, 0.05)
    assert max(count_false_claims(draw, problems, 0.05, 300)) <= most


def simulate_power(power: RulePower, gain, simulations=20_000):
    """Return the share of simulated sets of scores of 0 or 1 that pass the rule, for a true gain."""
    rng = np.random.default_rng(power.problems)
    differ = max(power.discordant, gain)
    counts = rng.multinomial(power.problems, [(differ + gain) / 2, (differ - gain) / 2, 1 - differ], simulations)
    threshold = power.asked if power.kind == "primary" else -power.asked
    return (counts[:, 1] <= largest_losses(power.problems, threshold, alpha=power.alpha)[counts[:, 0]]).mean()


def rule(kind, problems, *, asked=0.0, discordant=0.2, alpha=0.05, method="exact"):
    return RulePower(
        rule="a", kind=kind, problems=problems, asked=asked, discordant=discordant, alpha=alpha, method=method
    )


def check_power(problems, discordant, alpha):
    primary = rule("primary", problems, discordant=discordant, alpha=alpha)
    assert simulate_power(primary, primary.shown) == pytest.approx(0.8, abs=0.02)
    guard = rule("guard", problems, asked=0.05, discordant=discordant, alpha=alpha)
    assert simulate_power(guard, 0.0) == pytest.approx(guard.power, abs=0.02)


@pytest.mark.parametrize(("problems", "discordant", "alpha"), [(100, 0.2, 0.05), (250, 0.1, 0.01)])
def test_the_stated_power_is_the_simulated_one(problems, discordant, alpha):
    check_power(problems, discordant, alpha)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problems", "discordant", "alpha"), list(product((60, 150, 600, 1500), (0.2, 0.4), (0.01, 0.05)))
)
def test_the_stated_power_is_the_simulated_one_in_every_cell(problems, discordant, alpha):
    check_power(problems, discordant, alpha)


@pytest.mark.slow
@pytest.mark.parametrize(("problems", "alpha"), list(product((100, 250), (0.01, 0.05))))
def test_the_stated_power_for_graded_scores_is_the_simulated_one(problems, alpha):
    gain = rule("primary", problems, discordant=0.03, alpha=alpha, method="betting").shown
    spread = np.sqrt(3 * (0.03 - gain**2))
    rng, simulations = np.random.default_rng(0), 1500
    changes = rng.uniform(gain - spread, gain + spread, (simulations, problems)) / 2
    passed = [compare_scores(0.5 - each, 0.5 + each, alpha=alpha, seed=at).lower > 0 for at, each in enumerate(changes)]
    assert np.mean(passed) == pytest.approx(0.8, abs=0.02 + 0.02)  # two standard errors of the simulation


def test_no_gain_is_stated_that_cannot_happen():
    """Five percent of problems differ, so the largest gain is 0.05. Thirty problems show it with probability 0.2."""
    power = rule("primary", 30, discordant=0.05)
    assert (power.shown, power.is_short) == (None, True)
    assert power_of(30, 0.05, 0.05, alpha=0.05) < 0.8 <= power_of(power.needed, 0.05, 0.05, alpha=0.05) + 0.02
    assert "no possible gain" in power.text()


def test_the_lowest_bound_and_the_lowest_threshold_have_a_value():
    assert betting_lower_bound(np.full(40, -1.0), level=0.01, width=1.0, seed=0) == -1.0
    assert betting_power(40, gain=0.4, mean_square=0.2, threshold=-1.0, alpha=0.01) == 1.0
    assert betting_power(40, gain=-1.0, mean_square=1.0, threshold=-1.0, alpha=0.01) == 0.0
