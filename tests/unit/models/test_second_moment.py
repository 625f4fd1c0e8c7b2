"""The correction that masks the tokens of a minibatch with the largest log-ratios (M2PO), by hand and as properties."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.config.corrections import NoCorrection, SecondMoment, TruncatedImportance
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.objectives.importance import correct
from rheostat.models.training import outliers
from rheostat.models.training.outliers import largest_kept
from rheostat.models.training.ranks import Ranks
from tests.support.losses import LOSSES, NAMES, doubles, evaluate_loss, move_policy, pass_tokens, random_tokens

SQUARES = st.lists(st.sampled_from(np.float32([0.0, 0.01, 0.04, 0.09, 0.25, 1.0, 4.0]).tolist()), max_size=12)
"""Squares without a rounding error in float32, whose sums in float64 are exact."""


@pytest.mark.parametrize(
    ("squares", "max_moment", "kept"),
    [
        ([0.01, 0.09, 0.04], 0.05, 0.09),  # the mean of all is 0.047
        ([0.25, 0.01, 0.04], 0.05, 0.04),  # 0.1 with the largest, 0.025 without it
        ([0.25, 0.01, 0.25], 0.13, 0.01),  # one of two equal squares would do, but both or none are kept
        ([0.25, 0.25], 0.25, 0.25),
        ([0.25, 0.3], 0.1, -1),
        ([], 0.1, -1),
    ],
)
def test_the_fewest_tokens_are_masked_that_bring_the_mean_of_the_others_below_the_maximum(squares, max_moment, kept):
    assert largest_kept(np.array(squares, np.float32), max_moment) == pytest.approx(kept)


@given(squares=SQUARES, max_moment=st.sampled_from([0.005, 0.02, 0.06, 0.3, 2.0]), data=st.data())
def test_the_choice_is_the_best_threshold_and_does_not_depend_on_the_order(squares, max_moment, data):
    means = {value: np.mean([each for each in squares if each <= value]) for value in squares}
    expected = max((value for value, mean in means.items() if mean <= max_moment), default=-1)
    for order in (squares, data.draw(st.permutations(squares))):
        assert largest_kept(np.array(order, np.float32), max_moment) == pytest.approx(expected)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_outliers_have_no_gradient_and_other_tokens_are_weighted_by_their_ratio(loss):
    tokens = random_tokens([4, 3], seed=2)
    tokens = replace(tokens, outlier_N=torch.tensor([False, True, False, False, True, False, False]))
    logprobs_N = move_policy(tokens, seed=2)
    _, gradient, sums = evaluate_loss(logprobs_N, tokens, UpdateConfig(loss=loss, correction=SecondMoment()))
    whole = UpdateConfig(loss=loss, correction=TruncatedImportance(cap=1e9))
    _, plain, _ = evaluate_loss(logprobs_N, replace(tokens, outlier_N=None), whole)
    torch.testing.assert_close(gradient, torch.where(tokens.outlier_N, 0, plain))
    assert sums["importance_masked"] == 2


def test_outliers_are_masked_only_by_the_correction_of_their_kind_of_token():
    tokens = pass_tokens([4], behaviour=[-2.0] * 4, advantages=[1.0] * 4, staleness=[0, 0, 1, 1])
    tokens = replace(tokens, outlier_N=torch.tensor([False, True, False, True]))
    config = UpdateConfig(correction=NoCorrection(), stale_correction=SecondMoment())
    found = correct(doubles([-1.0] * 4), tokens, config=config)
    assert found.masked_N.tolist() == [False, False, False, True]
    assert found.weight_N.tolist() == pytest.approx([1, 1, np.e, 0])


def outliers_of(monkeypatch, **corrections) -> list[list[bool]]:
    """Return the outliers of two micro-batches of one rank. Their log-ratios are 0.1, 1, 2, 0.2 and 3, 0.3.

    The last two tokens of the first micro-batch are stale. The token with the log-ratio 3 has no weight in the loss.
    """
    monkeypatch.setattr(outliers, "broadcast_bytes", lambda data, ranks: data)
    batches = [
        SimpleNamespace(
            behavior_N=np.array(behavior, np.float32), staleness_N=np.array(ages, np.int16), weights_N=np.array(weights)
        )
        for behavior, ages, weights in (
            ([-1.1, -2.0, -3.0, -1.2], [0, 0, 1, 2], [0.1] * 4),
            ([-4.0, -1.3], [0, 0], [0.0, 0.1]),
        )
    ]
    old = [torch.full((4,), -1.0), torch.full((2,), -1.0)]
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    found = outliers.find_outliers(batches, old, config=UpdateConfig(**corrections), ranks=ranks)
    return [each.tolist() for each in found]


def test_outliers_of_a_minibatch_are_chosen_from_all_trained_tokens_of_its_micro_batches(monkeypatch):
    # Squares 0.01, 0.04, 0.09, 1 and 4: without the largest one their mean is 0.285, without two of them it is 0.047.
    found = outliers_of(monkeypatch, correction=SecondMoment(max_moment=0.3))
    assert found == [[False, False, True, False], [False, False]]
    found = outliers_of(monkeypatch, correction=SecondMoment(max_moment=0.2))
    assert found == [[False, True, True, False], [False, False]]


def test_stale_and_fresh_tokens_have_separate_second_moments(monkeypatch):
    # Fresh squares: 0.01, 0.09 and 1. Stale squares: 0.04 and 4.
    one, other = SecondMoment(max_moment=0.3), SecondMoment(max_moment=3)
    both = outliers_of(monkeypatch, correction=one, stale_correction=other)
    assert both == [[False, True, False, False], [False, False]]
    only = outliers_of(monkeypatch, correction=NoCorrection(), stale_correction=one)
    assert only == [[False, False, True, False], [False, False]]


def test_a_minibatch_without_trained_tokens_has_no_outliers(monkeypatch):
    monkeypatch.setattr(outliers, "broadcast_bytes", lambda data, ranks: data)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    batch = SimpleNamespace(behavior_N=np.ones(1, np.float32), staleness_N=np.zeros(1), weights_N=np.zeros(1))
    [found_N] = outliers.find_outliers(
        [batch], [torch.zeros(1)], config=UpdateConfig(correction=SecondMoment()), ranks=ranks
    )
    assert not found_N.any()
