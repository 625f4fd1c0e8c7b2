"""Log-ratios whose exponential overflows: a token that has one spoils neither the loss nor its gradients."""

import math
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
import torch

from rheostat.models.algorithms.shaping import divergence
from rheostat.models.config.corrections import MaskedImportance, NoCorrection, TruncatedImportance
from rheostat.models.config.divergence import KlPenalty
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy_losses import (
    Cispo,
    Dppo,
    Gmpo,
    Gspo,
    LossConfig,
    PolicyGradient,
    PpoClip,
    Sapo,
    Vespo,
)
from rheostat.models.objectives.importance import correct, mismatch
from rheostat.models.objectives.loss_inputs import LossInputs
from rheostat.models.objectives.losses import kl_estimate
from rheostat.models.objectives.policy_losses import policy_loss
from tests.support.losses import LOSSES, NAMES, doubles, evaluate_loss, pass_tokens

MAX_RATIO = 485165195.40979028
"""e^20, from a table of exponentials."""
CORRECTIONS = [
    NoCorrection(),
    TruncatedImportance(cap=2.0),
    MaskedImportance(low=0.5, high=2.0),
    TruncatedImportance(cap=2.0, level="sequence"),
]
HUGE = [1000.0, -1000.0]


def evaluate_in_single_precision(config: UpdateConfig, tokens: LossInputs, logprobs: list[float], old: list[float]):
    """Return the loss, its gradients and its metrics in float32, whose largest number is about e^88."""
    loss, gradient_N, metrics = evaluate_loss(
        torch.tensor(logprobs), to_single_precision(replace(tokens, old_N=doubles(old))), config, kl=0.1
    )
    return loss, gradient_N.tolist(), metrics


def to_single_precision(tokens: LossInputs) -> LossInputs:
    columns = {each.name: getattr(tokens, each.name) for each in fields(tokens)}
    tensors = {name: value for name, value in columns.items() if isinstance(value, torch.Tensor)}
    return replace(tokens, **{name: each.float() for name, each in tensors.items() if each.dtype == torch.float64})


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda each: f"{each.kind}_{getattr(each, 'level', '')}")
@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
@pytest.mark.parametrize("moved", ["policy", "behaviour", "reference"])
def test_a_huge_ratio_of_a_token_without_advantage_or_weight_leaves_everything_finite(correction, loss, moved):
    for huge, idle, kind in product(HUGE, ("advantage", "weight"), ("k1", "k2", "k3")):
        config = UpdateConfig(loss=loss, correction=correction, kl=KlPenalty(kind=kind))
        logprobs = {name: [-1.0, 0.0, -2.0] for name in ("policy", "behaviour", "reference")}
        logprobs[moved][1] = huge
        tokens = pass_tokens(
            [1, 1, 1],
            behaviour=logprobs["behaviour"],
            reference=logprobs["reference"],
            advantages=[1.0, 0.0 if idle == "advantage" else -1.0, -0.5],
            weights=[0.5, 0.0 if idle == "weight" else 0.25, 0.25],
        )
        found = evaluate_in_single_precision(config, tokens, logprobs["policy"], [-1.0, 0.0, -2.0])
        loss_found, gradients, metrics = found
        assert all(map(math.isfinite, (loss_found, *gradients, *metrics.values()))), (huge, idle, kind, found)
        assert metrics["not_finite"] == 0
        assert gradients[0] and gradients[2], "the other tokens still have gradients"


def test_without_a_penalty_a_token_without_advantage_adds_exactly_nothing_despite_its_huge_ratio():
    tokens = pass_tokens([3], behaviour=[-1.0, 0.0, -2.0], advantages=[1.0, 0.0, -0.5])
    config = UpdateConfig(loss=PpoClip(), correction=NoCorrection())
    loss, gradients, _ = evaluate_in_single_precision(config, tokens, [-1.0, 1000.0, -2.0], [-1.0, 0.0, -2.0])
    assert loss == pytest.approx(-1 + 0.5)
    assert gradients == pytest.approx([-1, 0, 0.5])


@pytest.mark.parametrize(
    ("config", "loss", "gradient"),
    [
        (PpoClip(), 2 * MAX_RATIO, 0.0),  # the surrogate at e^20, beyond which it is flat
        (PpoClip(dual_clip=3.0), 6.0, 0.0),
        (Gspo(), 2 * MAX_RATIO, 2 * MAX_RATIO),  # the gradient of the log-prob times the ratio, which is a constant
        (Cispo(clip_high=0.28), 1.28 * 2 * 1000, 1.28 * 2),
        (PolicyGradient(), 2 * 1000, 2.0),
        (Sapo(negative_temperature=4.0), 2.0, 0.0),  # the gate is at its limit of 4 / τ
        (Gmpo(), 2 * MAX_RATIO, 2 * MAX_RATIO),  # as in GSPO
        (Dppo(), 2 * MAX_RATIO, 0.0),  # a token that moves back is not masked
        (Vespo(), 0.0, 0.0),  # the weight has faded out
    ],
    ids=NAMES,
)
def test_a_bad_token_of_log_ratio_1000_has_the_loss_of_ratio_e_to_the_20(config: LossConfig, loss, gradient):
    tokens = pass_tokens([1], behaviour=[0.0], advantages=[-2.0])
    logprobs_N = doubles([1000.0]).requires_grad_()
    terms = policy_loss(logprobs_N, doubles([0.0]), tokens=tokens, config=config)
    terms.loss_N.sum().backward()
    assert terms.ratio_N.item() == pytest.approx(MAX_RATIO)
    assert (terms.loss_N.item(), logprobs_N.grad.item()) == (pytest.approx(loss), pytest.approx(gradient))


def test_the_ratio_of_a_sequence_is_bounded_as_a_whole_and_not_per_token():
    # Mean log-ratios 16 and 500: tokens of 48, 0 and 0 make a sequence of e^16, which is below the bound.
    tokens = pass_tokens([3, 2], behaviour=[0.0] * 5, advantages=[1.0] * 5)
    terms = policy_loss(doubles([48, 0, 0, 1000, 0]), doubles([0.0] * 5), tokens=tokens, config=Gspo())
    assert terms.ratio_N.tolist() == pytest.approx([math.exp(16)] * 3 + [MAX_RATIO] * 2)


def test_weights_and_metrics_of_a_log_ratio_of_1000_are_those_of_20():
    zero_N = doubles([0.0, 0.0])
    found = mismatch(doubles(HUGE), zero_N)
    assert found.difference_N.tolist() == [1000, 1000]  # not bounded, because it is not exponentiated
    assert found.weight_N.tolist() == pytest.approx([MAX_RATIO, 1 / MAX_RATIO])
    assert found.kl_N.tolist() == pytest.approx([MAX_RATIO - 1 - 20, 1 / MAX_RATIO - 1 + 20])
    config = UpdateConfig(correction=TruncatedImportance(cap=1e12))
    tokens = pass_tokens([2], behaviour=[0.0, 0.0], advantages=[0.0, 0.0])
    corrected = correct(doubles(HUGE), tokens, config=config)
    assert corrected.weight_N.tolist() == pytest.approx([MAX_RATIO, 1 / MAX_RATIO])


def test_k3_of_a_log_ratio_of_1000_is_that_of_20_in_the_loss_and_in_the_reward():
    expected = [1 / MAX_RATIO - 1 + 20, MAX_RATIO - 1 - 20]
    assert kl_estimate(doubles(HUGE), doubles([0.0, 0.0]), kind="k3").tolist() == pytest.approx(expected)
    assert divergence(np.array(HUGE), np.zeros(2), "k3").tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_log_ratios_up_to_20_have_the_same_bits_as_without_a_bound(loss):
    generator = torch.Generator().manual_seed(3)
    log_ratio_N = torch.cat([torch.rand(500, generator=generator) * 40 - 20, torch.tensor([20.0, -20.0, 0.0])])
    zero_N = torch.zeros_like(log_ratio_N)
    ratio_N, k3_N = torch.exp(log_ratio_N), torch.expm1(-log_ratio_N) + log_ratio_N
    tokens = pass_tokens([1] * 503, behaviour=[0.0] * 503, advantages=[1.0] * 503)
    assert torch.equal(
        policy_loss(log_ratio_N, zero_N, tokens=to_single_precision(tokens), config=loss).ratio_N, ratio_N
    )
    ours, theirs = (log_ratio_N.clone().requires_grad_() for _ in range(2))
    kl_estimate(ours, zero_N, kind="k3").sum().backward()
    (torch.expm1(-theirs) + theirs).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(kl_estimate(log_ratio_N, zero_N, kind="k3"), k3_N)
    assert torch.equal(mismatch(log_ratio_N, zero_N).weight_N, ratio_N)
    assert torch.equal(mismatch(log_ratio_N, zero_N).kl_N, torch.expm1(log_ratio_N) - log_ratio_N)
    log_ratio_T = log_ratio_N.numpy()
    assert np.array_equal(divergence(log_ratio_T, zero_N.numpy(), "k3"), np.expm1(-log_ratio_T) + log_ratio_T)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["policy", "behaviour", "old", "reference"])
def test_a_log_prob_that_is_not_finite_is_counted(broken, place):
    values = {name: [-1.0, -1.0] for name in ("policy", "behaviour", "old", "reference")}
    values[place][1] = broken
    tokens = pass_tokens([2], behaviour=values["behaviour"], reference=values["reference"], advantages=[1.0, 1.0])
    config = UpdateConfig(loss=PpoClip(), kl=KlPenalty(kind="k3"))
    _, _, metrics = evaluate_in_single_precision(config, tokens, values["policy"], values["old"])
    assert metrics["not_finite"] >= 1
