"""The controller of the KL coefficient."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.algorithms.shaping import next_coefficient
from models.config.objectives import AdaptiveKl

ADAPTIVE = AdaptiveKl(target=0.1, horizon=1000)


@pytest.mark.parametrize(
    ("coefficient", "kl", "completions", "expected"),
    [
        (0.5, 0.10, 200, 0.5),  # on target
        (0.5, 0.11, 200, 0.5 * math.exp(0.1 * 0.2)),  # a tenth too much, over a fifth of the horizon
        (0.5, 0.09, 200, 0.5 * math.exp(-0.1 * 0.2)),
        (0.5, 9.00, 200, 0.5 * math.exp(0.2 * 0.2)),  # errors are clipped at 0.2
        (0.5, -0.5, 200, 0.5 * math.exp(-0.2 * 0.2)),
        (1.0, 0.11, 1, 1 + 1e-3 * 0.1),  # arXiv 1909.08593: beta x (1 + K error), with K = completions / horizon
    ],
)
def test_the_coefficient_follows_the_error(coefficient, kl, completions, expected):
    found = next_coefficient(coefficient, kl=kl, completions=completions, adaptive=ADAPTIVE)
    assert found == pytest.approx(expected, rel=1e-7)


@given(kl=st.floats(-1e6, 1e6), completions=st.integers(0, 100_000))
def test_the_coefficient_stays_positive_for_every_measured_divergence(kl, completions):
    assert next_coefficient(1e-3, kl=kl, completions=completions, adaptive=ADAPTIVE) > 0


@given(first=st.integers(0, 5000), second=st.integers(0, 5000), kl=st.floats(-1, 1))
def test_two_iterations_change_the_coefficient_as_much_as_one_with_all_their_completions(first, second, kl):
    between = next_coefficient(1.0, kl=kl, completions=first, adaptive=ADAPTIVE)
    after = next_coefficient(between, kl=kl, completions=second, adaptive=ADAPTIVE)
    assert after == pytest.approx(next_coefficient(1.0, kl=kl, completions=first + second, adaptive=ADAPTIVE))


@given(start=st.floats(1e-4, 10))
def test_a_divergence_that_falls_with_the_coefficient_reaches_its_target(start):
    coefficient = start
    for _ in range(600):
        coefficient = next_coefficient(coefficient, kl=0.02 / coefficient, completions=100, adaptive=ADAPTIVE)
    assert 0.02 / coefficient == pytest.approx(0.1, rel=1e-2)
