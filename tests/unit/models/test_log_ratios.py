"""Log-ratios that no exponential survives: a token that has one spoils neither the loss nor its gradients."""

import math
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
import torch

from models.algorithms.shaping import divergence
from models.config.objectives import (
    Cispo,
    Gspo,
    KlPenalty,
    LossConfig,
    MaskedImportance,
    NoCorrection,
    PolicyGradient,
    PpoClip,
    TruncatedImportance,
    UpdateConfig,
)
from models.objectives.importance import correct, mismatch
from models.objectives.loss_inputs import LossInputs, MetricSums
from models.objectives.losses import kl_estimate, policy_loss, tally_mismatch, update_loss
from tests.support.losses import LOSSES, NAMES, doubles, pass_tokens

MOST = 485165195.40979028
"""e^20, from a table of exponentials."""
CORRECTIONS = [NoCorrection(), TruncatedImportance(cap=2.0), MaskedImportance(low=0.5, high=2.0)]
HUGE = [1000.0, -1000.0]


def single(tokens: LossInputs) -> LossInputs:
    """The same tokens in float32, whose largest number is about e^88."""
    held = {each.name: getattr(tokens, each.name) for each in fields(tokens)}
    floats = {name: value for name, value in held.items() if value is not None and value.dtype == torch.float64}
    return replace(tokens, **{name: value.float() for name, value in floats.items()})


def updated(config: UpdateConfig, tokens: LossInputs, logprobs: list[float], old: list[float]):
    """The loss of a pass, its gradients, and everything that it says of itself."""
    leaf_N, tally = torch.tensor(logprobs, requires_grad=True), MetricSums()
    tokens = replace(tokens, old_N=torch.tensor(old))
    tally_mismatch(tokens.old_N, tokens, tally=tally)
    loss = update_loss(leaf_N, tokens, config=config, kl_coefficient=0.1, tally=tally)
    loss.backward()
    sums, maxima = tally.unpacked(*tally.packed())
    return loss.item(), leaf_N.grad.tolist(), sums | maxima


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: correction.kind)
@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
@pytest.mark.parametrize("moved", ["policy", "behaviour", "reference"])
def test_a_huge_ratio_of_a_token_that_counts_for_nothing_leaves_everything_finite(correction, loss, moved):
    for huge, idle, kind in product(HUGE, ("advantage", "weight"), ("k1", "k2", "k3")):
        config = UpdateConfig(loss=loss, correction=correction, kl=KlPenalty(kind=kind))
        found, gradients, told = with_an_idle_token(config, moved=moved, huge=huge, idle=idle)
        assert all(map(math.isfinite, (found, *gradients, *told.values()))), (huge, idle, kind, gradients, told)
        assert told["not_finite"] == 0
        assert gradients[0] and gradients[2], "the other tokens still teach"


def with_an_idle_token(config: UpdateConfig, *, moved: str, huge: float, idle: str):
    """Update on three sequences of a token; the policy, what generated or the reference is e^±1000 off the second."""
    logprobs = {name: [-1.0, 0.0, -2.0] for name in ("policy", "behaviour", "reference")}
    logprobs[moved][1] = huge
    tokens = pass_tokens(
        [1, 1, 1],
        behaviour=logprobs["behaviour"],
        reference=logprobs["reference"],
        advantages=[1.0, 0.0 if idle == "advantage" else -1.0, -0.5],
        weights=[0.5, 0.0 if idle == "weight" else 0.25, 0.25],
    )
    return updated(config, single(tokens), logprobs["policy"], [-1.0, 0.0, -2.0])


def test_without_a_penalty_an_idle_token_of_a_huge_ratio_adds_exactly_nothing():
    tokens = pass_tokens([3], behaviour=[-1.0, 0.0, -2.0], advantages=[1.0, 0.0, -0.5])
    config = UpdateConfig(loss=PpoClip(), correction=NoCorrection())
    loss, gradients, _ = updated(config, single(tokens), [-1.0, 1000.0, -2.0], [-1.0, 0.0, -2.0])
    assert loss == pytest.approx(-1 + 0.5)
    assert gradients == pytest.approx([-1, 0, 0.5])


@pytest.mark.parametrize(
    ("config", "loss", "gradient"),
    [
        (PpoClip(), 2 * MOST, 0.0),  # bad and far likelier: the surrogate at e^20, beyond which it is flat
        (PpoClip(dual_clip=3.0), 6.0, 0.0),
        (Gspo(), 2 * MOST, 2 * MOST),  # its ratio is a constant that the log-prob's gradient is multiplied by
        (Cispo(clip_high=0.28), 1.28 * 2 * 1000, 1.28 * 2),
        (PolicyGradient(), 2 * 1000, 2.0),
    ],
    ids=NAMES,
)
def test_a_bad_token_of_log_ratio_1000_is_worth_what_e_to_the_20_is(config: LossConfig, loss, gradient):
    tokens = pass_tokens([1], behaviour=[0.0], advantages=[-2.0])
    logprobs_N = doubles([1000.0]).requires_grad_()
    terms = policy_loss(logprobs_N, doubles([0.0]), tokens=tokens, config=config)
    terms.loss_N.sum().backward()
    assert terms.ratio_N.item() == pytest.approx(MOST)
    assert (terms.loss_N.item(), logprobs_N.grad.item()) == (pytest.approx(loss), pytest.approx(gradient))


def test_the_ratio_of_a_sequence_is_bounded_as_a_whole_and_not_token_by_token():
    # Means of 16 and of 500: tokens of 48 and 0 and 0 make a sequence of e^16, which no bound touches.
    tokens = pass_tokens([3, 2], behaviour=[0.0] * 5, advantages=[1.0] * 5)
    terms = policy_loss(doubles([48, 0, 0, 1000, 0]), doubles([0.0] * 5), tokens=tokens, config=Gspo())
    assert terms.ratio_N.tolist() == pytest.approx([math.exp(16)] * 3 + [MOST] * 2)


def test_weights_and_measurements_of_a_log_ratio_of_1000_are_those_of_20():
    zero_N, fresh_N = doubles([0.0, 0.0]), torch.zeros(2, dtype=torch.int16)
    found = mismatch(doubles(HUGE), zero_N)
    assert found.difference_N.tolist() == [1000, 1000]  # never exponentiated: as it is
    assert found.weight_N.tolist() == pytest.approx([MOST, 1 / MOST])
    assert found.kl_N.tolist() == pytest.approx([MOST - 1 - 20, 1 / MOST - 1 + 20])
    free = UpdateConfig(correction=TruncatedImportance(cap=1e12))
    assert correct(doubles(HUGE), zero_N, staleness_N=fresh_N, config=free).weight_N.tolist() == pytest.approx(
        [MOST, 1 / MOST]
    )


def test_k3_of_a_log_ratio_of_1000_is_that_of_20_in_the_loss_and_in_the_reward():
    expected = [1 / MOST - 1 + 20, MOST - 1 - 20]
    assert kl_estimate(doubles(HUGE), doubles([0.0, 0.0]), kind="k3").tolist() == pytest.approx(expected)
    assert divergence(np.array(HUGE), np.zeros(2), "k3").tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_up_to_20_not_one_bit_is_another(loss):
    # The formulas without a bound, on log-ratios up to 20 both ways in float32.
    generator = torch.Generator().manual_seed(3)
    log_ratio_N = torch.cat([torch.rand(500, generator=generator) * 40 - 20, torch.tensor([20.0, -20.0, 0.0])])
    zero_N = torch.zeros_like(log_ratio_N)
    ratio_N, k3_N = torch.exp(log_ratio_N), torch.expm1(-log_ratio_N) + log_ratio_N
    tokens = pass_tokens([1] * 503, behaviour=[0.0] * 503, advantages=[1.0] * 503)
    assert torch.equal(policy_loss(log_ratio_N, zero_N, tokens=single(tokens), config=loss).ratio_N, ratio_N)
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
def test_a_log_prob_that_is_no_number_is_still_counted_as_not_finite(broken, place):
    values = {name: [-1.0, -1.0] for name in ("policy", "behaviour", "old", "reference")}
    values[place][1] = broken
    tokens = pass_tokens([2], behaviour=values["behaviour"], reference=values["reference"], advantages=[1.0, 1.0])
    config = UpdateConfig(loss=PpoClip(), kl=KlPenalty(kind="k3"))
    assert updated(config, single(tokens), values["policy"], values["old"])[2]["not_finite"] >= 1
