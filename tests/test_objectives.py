"""Losses, penalties and corrections against numbers worked by hand."""

import math

import pytest
import torch

from models.objectives.aggregation import token_weights
from models.objectives.config import (
    ConstantMean,
    KlPenalty,
    NoCorrection,
    PpoClip,
    SequenceMean,
    TokenMean,
    TruncatedImportance,
    UpdateConfig,
)
from models.objectives.importance import mismatch, truncated_weight
from models.objectives.kl import kl_estimate
from models.objectives.policy_loss import ppo_clip
from models.objectives.tally import Tally
from models.objectives.update_loss import PassTokens, update_loss
from models.schedule import learning_rate

CLIP = PpoClip(clip_low=0.2, clip_high=0.28)


def terms(ratio: float, advantage: float):
    logprobs_N = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    found = ppo_clip(logprobs_N, torch.zeros(1), advantages_N=torch.tensor([advantage]).double(), config=CLIP)
    found.loss_N.sum().backward()
    return found.loss_N.item(), logprobs_N.grad.item(), found.clipped_low_N.item(), found.clipped_high_N.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "low", "high"),
    [
        (1.0, 2.0, -2.0, -2.0, False, False),
        (1.5, 2.0, -1.28 * 2, 0.0, False, True),  # good and already more likely: clipped above
        (0.5, 2.0, -0.5 * 2, -0.5 * 2, False, False),  # good but less likely: never clipped
        (0.5, -2.0, 0.8 * 2, 0.0, True, False),  # bad and already less likely: clipped below
        (1.5, -2.0, 1.5 * 2, 1.5 * 2, False, False),  # bad but more likely: never clipped
        (1.25, 2.0, -1.25 * 2, -1.25 * 2, False, False),  # between 1 + low and 1 + high: clip-higher lets it grow
    ],
)
def test_ppo_clips_what_has_moved_far_enough_and_nothing_else(ratio, advantage, loss, gradient, low, high):
    assert terms(ratio, advantage) == (pytest.approx(loss), pytest.approx(gradient), low, high)


def test_kl_estimators_have_their_values_at_a_log_ratio_of_ln_2():
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    found = {kind: kl_estimate(policy, reference, kind=kind).item() for kind in ("k1", "k2", "k3")}
    assert found == {
        "k1": pytest.approx(0.693147, abs=1e-6),
        "k2": pytest.approx(0.240227, abs=1e-6),  # half of its square
        "k3": pytest.approx(0.193147, abs=1e-6),  # 1/2 - 1 + ln 2
    }


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_policy_does_not_diverge_from_itself(kind):
    logprobs = torch.tensor([-0.1, -3.0])
    assert kl_estimate(logprobs, logprobs, kind=kind).tolist() == [0, 0]


def test_aggregations_weigh_tokens_of_long_and_short_sequences_differently():
    lengths = [1, 3]
    assert token_weights(TokenMean(), lengths) == [0.25, 0.25]
    assert token_weights(SequenceMean(), lengths) == [0.5, pytest.approx(1 / 6)]
    assert token_weights(ConstantMean(length=10), lengths) == [0.05, 0.05]


@pytest.mark.parametrize("aggregation", [TokenMean(), SequenceMean(), ConstantMean(length=10)])
def test_sequences_without_tokens_change_no_weight(aggregation):
    assert token_weights(aggregation, [1, 0, 3])[::2] == token_weights(aggregation, [1, 3])


def test_importance_weights_are_capped_and_have_no_gradient():
    old = torch.tensor([math.log(0.6), math.log(0.1)], requires_grad=True)
    weight = truncated_weight(old, torch.tensor([math.log(0.2), math.log(0.2)]), cap=2.0)
    assert weight.tolist() == [2.0, pytest.approx(0.5)]
    assert not weight.requires_grad


def test_each_token_is_weighted_against_the_policy_version_that_wrote_it():
    # An earlier version wrote the first two tokens, with 0.2 and 0.8; the present one the third, with 0.3.
    logprobs = torch.tensor([0.4, 0.4, 0.3]).log().requires_grad_()
    tokens = PassTokens(
        behaviour_N=torch.tensor([0.2, 0.8, 0.3]).log(),
        advantages_N=torch.ones(3),
        weights_N=torch.full((3,), 1 / 3),
        old_N=None,
        reference_N=None,
    )
    config = UpdateConfig(correction=TruncatedImportance(cap=1.5))
    update_loss(logprobs, tokens, config=config, tally=Tally()).backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.5, -0.5, -1.0]) / 3)


def test_mismatch_is_measured_before_the_cap():
    found = mismatch(torch.tensor([math.log(0.6)]), torch.tensor([math.log(0.2)]))
    assert found.difference_N.item() == pytest.approx(math.log(3))
    assert found.weight_N.item() == pytest.approx(3)
    assert found.kl_N.item() == pytest.approx(3 - 1 - math.log(3))


@pytest.mark.parametrize("corrected", [True, False])
def test_the_gradient_of_the_whole_loss_is_that_of_finite_differences(corrected):
    torch.manual_seed(0)
    config = UpdateConfig(kl=KlPenalty(kind="k3", coefficient=0.3))
    if not corrected:
        config = config.model_copy(update={"correction": NoCorrection()})
    behaviour, old, reference = (-torch.rand(12, dtype=torch.float64) - 0.5 for _ in range(3))
    tokens = PassTokens(
        behaviour_N=behaviour,
        advantages_N=torch.randn(12, dtype=torch.float64),
        weights_N=torch.rand(12, dtype=torch.float64),
        old_N=old,
        reference_N=reference,
    )
    logprobs = (old + 0.2 * torch.randn(12, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: update_loss(x, tokens, config=config, tally=Tally()), (logprobs,))


def test_the_first_step_compares_the_policy_with_itself_and_weighs_by_the_mismatch():
    tokens = PassTokens(
        behaviour_N=torch.tensor([math.log(0.4)]),
        advantages_N=torch.tensor([1.0]),
        weights_N=torch.tensor([0.5]),
        old_N=None,
        reference_N=None,
    )
    logprobs = torch.tensor([math.log(0.6)], requires_grad=True)
    loss = update_loss(logprobs, tokens, config=UpdateConfig(), tally=Tally())
    loss.backward()
    assert loss.item() == pytest.approx(-1.5 * 0.5)
    assert logprobs.grad.item() == pytest.approx(-1.5 * 0.5)


def test_the_learning_rate_warms_up_stays_or_falls():
    def course(schedule, floor=0.0):
        return [
            learning_rate(step, 6, peak=1.0, warmup_steps=2, schedule=schedule, floor=floor) for step in (0, 1, 2, 4, 6)
        ]

    assert course("constant") == [0.5, 1, 1, 1, 1]
    assert course("linear") == [0.5, 1, 1, 0.5, 0]
    assert course("cosine") == [0.5, 1, 1, pytest.approx(0.5), pytest.approx(0)]
    assert course("cosine", floor=0.1)[-1] == pytest.approx(0.1)
