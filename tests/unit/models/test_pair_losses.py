"""Losses over pairs of completions, against numbers worked by hand and finite differences."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.objectives.losses import DpoTerms, bradley_terry, dpo

LOGPROBS = st.floats(-50, -0.01)


def compute_dpo(chosen: float, rejected: float, *, smoothing: float = 0.0) -> DpoTerms:
    """Return the terms of one pair with beta 0.5; the reference has log-prob -10 for both completions."""
    reference_P = torch.tensor([-10.0])
    return dpo(
        torch.tensor([chosen], dtype=torch.float64),
        torch.tensor([rejected], dtype=torch.float64),
        reference_chosen_P=reference_P,
        reference_rejected_P=reference_P,
        beta=0.5,
        label_smoothing=smoothing,
    )


@pytest.mark.parametrize(
    ("chosen", "rejected", "smoothing", "loss", "is_right"),
    [
        (-8.0, -12.0, 0.0, 0.126928, True),  # margin 0.5 x (2 - -2) = 2, ln(1 + e^-2)
        (-12.0, -8.0, 0.0, 2.126928, False),  # ln(1 + e^2)
        (-8.0, -12.0, 0.25, 0.75 * 0.126928 + 0.25 * 2.126928, True),  # a quarter of the pairs is the other way round
    ],
)
def test_dpo_has_its_values_at_margins_worked_by_hand(chosen, rejected, smoothing, loss, is_right):
    found = compute_dpo(chosen, rejected, smoothing=smoothing)
    assert found.margins_P.item() == pytest.approx(2 if is_right else -2)
    assert found.loss_P.item() == pytest.approx(loss)
    assert found.right_P.item() is is_right


@given(chosen=LOGPROBS, rejected=LOGPROBS)
def test_dpo_of_the_reference_itself_is_ln_2_and_no_pair_is_right(chosen, rejected):
    same = torch.tensor([chosen]), torch.tensor([rejected])
    found = dpo(*same, reference_chosen_P=same[0], reference_rejected_P=same[1], beta=0.1, label_smoothing=0.1)
    assert found.loss_P.item() == pytest.approx(math.log(2))
    assert not found.right_P.item()


def test_bradley_terry_has_its_values_at_rewards_worked_by_hand():
    found = bradley_terry(torch.tensor([1.5, -1.0]), torch.tensor([0.5, 1.0]), centering=0.0)
    assert found.loss_P.tolist() == pytest.approx([0.313262, 2.126928])  # ln(1 + e^-1), ln(1 + e^2)
    assert found.margins_P.tolist() == [1.0, -2.0]
    assert found.right_P.tolist() == [True, False]


def test_only_centering_depends_on_the_mean_of_the_rewards():
    pair = torch.tensor([3.0]), torch.tensor([2.0])
    plain, centred = (bradley_terry(*pair, centering=factor).loss_P.item() for factor in (0.0, 0.01))
    assert centred - plain == pytest.approx(0.01 * 25)
    shifted = bradley_terry(pair[0] - 2.5, pair[1] - 2.5, centering=0.01).loss_P.item()
    assert shifted == pytest.approx(plain)


def test_losses_of_distant_pairs_stay_finite():
    assert bradley_terry(torch.tensor([-1e4]), torch.tensor([1e4]), centering=0.0).loss_P.item() == 2e4
    assert compute_dpo(-1e4, -1.0).loss_P.isfinite()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradients_over_pairs_are_those_of_finite_differences(smoothing):
    torch.manual_seed(0)
    chosen, rejected = torch.randn(2, 8, dtype=torch.float64)
    references = {"reference_chosen_P": chosen, "reference_rejected_P": rejected}
    pairs = tuple(torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    direct = partial(dpo, **references, beta=0.7, label_smoothing=smoothing)
    assert torch.autograd.gradcheck(lambda c, r: direct(c, r).loss_P, pairs)
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, centering=smoothing).loss_P, pairs)
