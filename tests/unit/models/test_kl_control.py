"""The controller of the KL coefficient."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.algorithms.shaping import next_coefficient
from models.config.objectives import AdaptiveKl

ADAPTIVE = AdaptiveKl(target=0.1, horizon=1000)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.10, 0.5),  # on target
        (0.11, 0.5 * math.exp(0.1 * 0.2)),  # a tenth too much, over a fifth of the horizon
        (0.09, 0.5 * math.exp(-0.1 * 0.2)),
        (9.00, 0.5 * math.exp(0.2 * 0.2)),  # errors are cut at 0.2
        (-0.5, 0.5 * math.exp(-0.2 * 0.2)),
    ],
)
def test_the_coefficient_follows_the_error(kl, expected):
    assert next_coefficient(0.5, kl=kl, completions=200, adaptive=ADAPTIVE) == pytest.approx(expected)


def test_small_changes_are_those_of_the_paper():
    # arXiv 1909.08593: beta x (1 + K error), with K = completions / horizon
    assert next_coefficient(1.0, kl=0.11, completions=1, adaptive=ADAPTIVE) == pytest.approx(1 + 1e-3 * 0.1, rel=1e-7)


@given(kl=st.floats(-1e6, 1e6), completions=st.integers(0, 100_000))
def test_the_coefficient_stays_positive_whatever_is_measured(kl, completions):
    assert next_coefficient(1e-3, kl=kl, completions=completions, adaptive=ADAPTIVE) > 0


@given(first=st.integers(0, 5000), second=st.integers(0, 5000), kl=st.floats(-1, 1))
def test_two_iterations_change_it_as_much_as_one_of_as_many_completions(first, second, kl):
    between = next_coefficient(1.0, kl=kl, completions=first, adaptive=ADAPTIVE)
    after = next_coefficient(between, kl=kl, completions=second, adaptive=ADAPTIVE)
    assert after == pytest.approx(next_coefficient(1.0, kl=kl, completions=first + second, adaptive=ADAPTIVE))


@given(start=st.floats(1e-4, 10))
def test_a_divergence_that_falls_with_the_coefficient_is_brought_to_its_target(start):
    coefficient = start
    for _ in range(600):
        coefficient = next_coefficient(coefficient, kl=0.02 / coefficient, completions=100, adaptive=ADAPTIVE)
    assert 0.02 / coefficient == pytest.approx(0.1, rel=1e-2)
