"""Losses over pairs of completions, against numbers worked by hand and finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.objectives.losses import DpoTerms, bradley_terry, dpo

LOGPROBS = st.floats(-50, -0.01)


def preferred(chosen: float, rejected: float, *, beta: float = 0.5, smoothing: float = 0.0) -> DpoTerms:
    """Log-probs of one pair under the policy; the reference has -10 for both."""
    return dpo(
        torch.tensor([chosen], dtype=torch.float64),
        torch.tensor([rejected], dtype=torch.float64),
        reference_chosen_P=torch.tensor([-10.0]),
        reference_rejected_P=torch.tensor([-10.0]),
        beta=beta,
        label_smoothing=smoothing,
    )


def test_dpo_has_its_values_at_hand_worked_margins():
    found = preferred(-8.0, -12.0)  # 0.5 x (2 - -2) = 2
    assert found.margins_P.item() == pytest.approx(2)
    assert found.loss_P.item() == pytest.approx(0.126928)  # ln(1 + e^-2)
    assert found.right_P.item() is True
    wrong = preferred(-12.0, -8.0)
    assert wrong.loss_P.item() == pytest.approx(2.126928)  # ln(1 + e^2)
    assert wrong.right_P.item() is False


def test_label_smoothing_takes_some_pairs_to_be_the_wrong_way_round():
    assert preferred(-8.0, -12.0, smoothing=0.25).loss_P.item() == pytest.approx(0.75 * 0.126928 + 0.25 * 2.126928)


@settings(deadline=None)  # a busy machine is not wrong
@given(chosen=LOGPROBS, rejected=LOGPROBS)
def test_dpo_of_the_reference_itself_is_ln_2_and_nothing_is_right_yet(chosen, rejected):
    same = torch.tensor([chosen]), torch.tensor([rejected])
    found = dpo(*same, reference_chosen_P=same[0], reference_rejected_P=same[1], beta=0.1, label_smoothing=0.1)
    assert found.loss_P.item() == pytest.approx(math.log(2))
    assert not found.right_P.item()


def test_bradley_terry_has_its_values_at_hand_worked_rewards():
    found = bradley_terry(torch.tensor([1.5, -1.0]), torch.tensor([0.5, 1.0]), centering=0.0)
    assert found.loss_P.tolist() == pytest.approx([0.313262, 2.126928])  # ln(1 + e^-1), ln(1 + e^2)
    assert found.margins_P.tolist() == [1.0, -2.0]
    assert found.right_P.tolist() == [True, False]


def test_centering_alone_says_where_zero_is():
    pair = torch.tensor([3.0]), torch.tensor([2.0])
    plain, centred = (bradley_terry(*pair, centering=factor).loss_P.item() for factor in (0.0, 0.01))
    assert centred - plain == pytest.approx(0.01 * 25)
    moved = bradley_terry(pair[0] - 2.5, pair[1] - 2.5, centering=0.01).loss_P.item()
    assert moved == pytest.approx(plain)


def test_losses_of_far_apart_pairs_stay_finite():
    assert bradley_terry(torch.tensor([-1e4]), torch.tensor([1e4]), centering=0.0).loss_P.item() == 2e4
    assert preferred(-1e4, -1.0).loss_P.isfinite()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradients_over_pairs_are_those_of_finite_differences(smoothing):
    torch.manual_seed(0)
    reference_chosen, reference_rejected = torch.randn(2, 8, dtype=torch.float64)
    chosen, rejected = (torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def direct(c: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return dpo(
            c,
            r,
            reference_chosen_P=reference_chosen,
            reference_rejected_P=reference_rejected,
            beta=0.7,
            label_smoothing=smoothing,
        ).loss_P

    assert torch.autograd.gradcheck(direct, (chosen, rejected))
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, centering=smoothing).loss_P, (chosen, rejected))
