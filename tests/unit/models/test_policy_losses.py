"""Policy losses SAPO, GMPO, VESPO and DPPO, against numbers worked by hand and the formulas of their papers."""

import math

import numpy as np
import pytest
import torch

from rheostat.models.config.policy_losses import ConstantMean, Dppo, Gmpo, Gspo, LossConfig, PolicyGradient, Sapo, Vespo
from rheostat.models.objectives.losses import token_weights
from rheostat.models.objectives.policy_losses import binary_kl, policy_loss
from tests.support.losses import doubles, move_policy, pass_tokens


def compute_terms(
    config: LossConfig, ratios: list[float], advantages: list[float], *, lengths: list[int] | None = None
):
    """Return the terms of tokens whose old and behavior probability is 1/4, and the gradients of their log-probs."""
    old = [math.log(0.25)] * len(ratios)
    tokens = pass_tokens(lengths or [len(ratios)], behaviour=old, advantages=advantages)
    logprobs_N = (doubles(old) + doubles(ratios).log()).requires_grad_()
    terms = policy_loss(logprobs_N, doubles(old), tokens=tokens, config=config)
    terms.loss_N.sum().backward()
    return terms, logprobs_N.grad.tolist()


# ---- SAPO


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 3.0, -3.0 * 2, -3.0),  # σ(0) = 1/2: a loss of -A 2/τ with the gradient of -ratio A
        (1.0, -3.0, 3.0 * 1, 3.0),  # the same gradient with the other temperature
        (2.0, 1.0, -4 * 0.731059, -4 * 0.196612 * 2),  # σ(1), and σ(1) (1 - σ(1)) times the ratio
        (2.0, -1.0, 2 * 0.880797, 4 * 0.104994 * 2),  # σ(2): fades faster
        (0.5, 1.0, -4 * 0.377541, -4 * 0.235004 * 0.5),  # σ(-1/2)
    ],
)
def test_sapo_fades_out_tokens_by_a_sigmoid_with_a_temperature_for_each_sign(ratio, advantage, loss, gradient):
    config = Sapo(positive_temperature=1.0, negative_temperature=2.0)
    terms, gradients = compute_terms(config, [ratio], [advantage])
    assert terms.loss_N.item() == pytest.approx(loss, rel=1e-5)
    assert gradients == [pytest.approx(gradient, rel=1e-5)]
    assert not (terms.clipped_low_N.any() or terms.clipped_high_N.any())


def test_sapo_with_a_temperature_near_zero_has_the_gradient_of_the_ratio_without_clipping():
    ratios, advantages = [0.1, 0.7, 1.0, 3.0], [2.0, -1.0, 0.5, -0.25]
    config = Sapo(positive_temperature=1e-4, negative_temperature=1e-4)
    _, gradients = compute_terms(config, ratios, advantages)
    assert gradients == pytest.approx([-r * a for r, a in zip(ratios, advantages, strict=True)], rel=1e-6)


def test_a_token_far_from_the_old_policy_has_no_gradient_in_sapo_and_its_neighbors_keep_theirs():
    _, gradients = compute_terms(Sapo(), [1e6, 1.0, 1e-9], [1.0, 1.0, 1.0])
    assert gradients == pytest.approx([0, -1, 0], abs=1e-8)


# ---- GMPO


def test_gmpo_clips_log_ratios_before_the_geometric_mean_in_the_direction_of_the_advantage():
    # Bounds 1/2 and 2: good ratios 4 and 1/4 count as 2 and 1/4, mean sqrt(1/2); bad ones as 4 and 1/2, mean sqrt(2).
    config = Gmpo(clip_low=math.log(2), clip_high=math.log(2))
    terms, gradients = compute_terms(config, [4, 0.25, 4, 0.25], [3, 3, -3, -3], lengths=[2, 2])
    low, high = math.sqrt(0.5), math.sqrt(2)
    assert terms.loss_N.tolist() == pytest.approx([-3 * low, -3 * low, 3 * high, 3 * high])
    assert gradients == pytest.approx([0, -3 * low, 3 * high, 0])
    assert terms.clipped_high_N.tolist() == [True, False, False, False]
    assert terms.clipped_low_N.tolist() == [False, False, False, True]
    assert terms.ratio_N.tolist() == pytest.approx([1] * 4)  # without clipping


def test_gmpo_has_the_value_and_gradient_of_the_product_of_ratios_of_each_sequence():
    lengths, advantages = [3, 1, 5, 2], [0.7, -1.1, -0.4, 1.3]
    per_token = [advantage for advantage, length in zip(advantages, lengths, strict=True) for _ in range(length)]
    old = (-torch.rand(11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 0.5).tolist()
    tokens = pass_tokens(lengths, behaviour=old, advantages=per_token, old=old)
    ours, theirs = move_policy(tokens, seed=3), move_policy(tokens, seed=3)
    config, weights_N = Gmpo(clip_low=0.1, clip_high=0.15), doubles([1 / (4 * n) for n in lengths for _ in range(n)])
    loss = (policy_loss(ours, tokens.old_N, tokens=tokens, config=config).loss_N * weights_N).sum()
    means = []
    for ratios, advantage in zip(torch.split((theirs - tokens.old_N).exp(), lengths), advantages, strict=True):
        bounded = ratios.clamp(max=math.exp(0.15)) if advantage > 0 else ratios.clamp(min=math.exp(-0.1))
        means.append(-advantage * bounded.prod() ** (1 / len(ratios)))
    expected = torch.stack(means).mean()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert ours.grad.count_nonzero() not in (0, 11), "some tokens should be clipped and some not"


def test_gmpo_without_clipping_is_gspo_without_clipping():
    ratios, advantages, lengths = [4, 1, 0.5, 8, 0.1], [1, 1, -2, -2, -2], [2, 3]
    found, gradients = compute_terms(Gmpo(clip_low=99, clip_high=99), ratios, advantages, lengths=lengths)
    wide, expected = compute_terms(Gspo(clip_low=0.999, clip_high=99), ratios, advantages, lengths=lengths)
    assert found.loss_N.tolist() == pytest.approx(wide.loss_N.tolist())
    assert gradients == pytest.approx(expected)


# ---- LUSPO


def test_gspo_summed_over_tokens_has_the_gradient_of_luspo_which_multiplies_each_sequence_by_its_length():
    # LUSPO (arXiv 2602.05261): the mean over sequences of length x min(s A, clip(s) A), with the ratio s of GSPO.
    lengths, advantages = [3, 1, 5, 2], [0.7, -1.1, -0.4, 1.3]
    per_token = [advantage for advantage, length in zip(advantages, lengths, strict=True) for _ in range(length)]
    old = (-torch.rand(11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 0.5).tolist()
    tokens = pass_tokens(lengths, behaviour=old, advantages=per_token, old=old)
    ours, theirs = move_policy(tokens, seed=3), move_policy(tokens, seed=3)
    config = Gspo(clip_low=0.1, clip_high=0.15, aggregation=ConstantMean(length=1))
    weights_N = doubles(np.repeat(token_weights(config.aggregation, lengths), lengths).tolist())
    loss = (policy_loss(ours, tokens.old_N, tokens=tokens, config=config).loss_N * weights_N).sum()
    terms = []
    for log_ratios, advantage in zip(torch.split(theirs - tokens.old_N, lengths), advantages, strict=True):
        s = log_ratios.mean().exp()
        terms.append(-len(log_ratios) * torch.minimum(s * advantage, s.clamp(0.9, 1.15) * advantage))
    expected = torch.stack(terms).mean()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


# ---- VESPO


def test_vespo_weights_the_log_probs_of_a_sequence_by_a_kernel_of_the_product_of_its_ratios():
    # Ratios (4, 1/2), (2, 1, 1/4) and (8): products 2, 1/2 and 8. The last two sequences have the other parameters.
    config = Vespo(positive_power=2, positive_decay=3, negative_power=1, negative_decay=0.5)
    ratios, advantages = [4, 0.5, 2, 1, 0.25, 8], [3, 3, -1, -1, -1, -2]
    terms, gradients = compute_terms(config, ratios, advantages, lengths=[2, 3, 1])
    good, bad, far = 2**2 * math.exp(-3), 0.5 * math.exp(0.25), 8 * math.exp(0.5 * -7)
    expected = [-3 * good, -3 * good, bad, bad, bad, 2 * far]
    assert gradients == pytest.approx(expected)
    logprobs = [math.log(0.25 * ratio) for ratio in ratios]
    assert terms.loss_N.tolist() == pytest.approx([a * b for a, b in zip(expected, logprobs, strict=True)])
    assert terms.ratio_N.tolist() == pytest.approx([2, 2, 0.5, 0.5, 0.5, 8])
    assert not (terms.clipped_low_N.any() or terms.clipped_high_N.any())


def test_vespo_at_the_old_policy_is_the_policy_gradient():
    advantages = [2.0, -3.0, 0.5]
    found, expected = (
        compute_terms(each, [1, 1, 1], advantages, lengths=[2, 1]) for each in (Vespo(), PolicyGradient())
    )
    assert found[1] == pytest.approx(expected[1])
    assert found[0].loss_N.tolist() == pytest.approx(expected[0].loss_N.tolist())


@pytest.mark.parametrize("ratio", [1e30, 1e-30])
def test_a_sequence_far_from_the_old_policy_has_no_gradient_in_vespo_and_other_sequences_keep_theirs(ratio):
    for advantage in (1.0, -1.0):
        _, gradients = compute_terms(Vespo(), [ratio, 1.0, 1.0], [advantage] * 3, lengths=[2, 1])
        assert gradients == pytest.approx([0, 0, -advantage], abs=1e-8)


# ---- DPPO


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient", "low", "high"),
    [
        (1.0, 2.0, -2.0, False, False),
        (1.5, 2.0, -3.0, False, False),  # 3/8 - 1/4 = 0.125, below the threshold of 0.15, though the ratio is 1.5
        (1.7, 2.0, 0.0, False, True),  # 0.175: good and already more likely
        (1.7, -2.0, 3.4, False, False),  # bad: moves back
        (0.3, -2.0, 0.0, True, False),  # -0.175: bad and already less likely
        (0.3, 2.0, -0.6, False, False),
    ],
)
def test_dppo_masks_tokens_whose_probability_moves_further_away(ratio, advantage, gradient, low, high):
    terms, gradients = compute_terms(Dppo(), [ratio], [advantage])
    assert gradients == [pytest.approx(gradient)]
    assert terms.loss_N.item() == pytest.approx(gradient)  # of -ratio A
    assert (terms.clipped_low_N.item(), terms.clipped_high_N.item()) == (low, high)


def test_dppo_trains_rare_tokens_at_high_ratios_and_masks_likely_tokens_at_low_ones():
    old, new = doubles([1e-5, 0.99]).log(), doubles([1e-3, 0.8]).log().requires_grad_()
    tokens = pass_tokens([2], behaviour=old.tolist(), advantages=[1.0, -1.0])
    policy_loss(new, old, tokens=tokens, config=Dppo()).loss_N.sum().backward()
    assert new.grad.tolist() == pytest.approx([-100, 0])


def test_dppo_measures_the_divergence_from_the_engine_and_the_ratio_from_the_old_policy():
    behaviour, old = [math.log(0.25)], doubles([math.log(0.5)])
    tokens = pass_tokens([1], behaviour=behaviour, advantages=[1.0])
    terms = policy_loss(doubles([math.log(0.5)]), old, tokens=tokens, config=Dppo())
    assert (terms.loss_N.item(), terms.ratio_N.item(), terms.clipped_high_N.item()) == (0, pytest.approx(1), True)


def test_the_binary_kl_is_that_of_two_bernoulli_distributions():
    first, second = doubles([0.25, 0.9, 1e-6, 0.5]), doubles([0.5, 0.3, 1e-3, 0.5])
    bernoulli = torch.distributions.Bernoulli
    expected = torch.distributions.kl_divergence(bernoulli(first), bernoulli(second))
    torch.testing.assert_close(binary_kl(first.log(), second.log()), expected, rtol=1e-6, atol=1e-12)
    # 1/4 ln(1/2) + 3/4 ln(3/2)
    assert binary_kl(doubles([0.25]).log(), doubles([0.5]).log()).item() == pytest.approx(0.130812, rel=1e-5)


@pytest.mark.parametrize(("threshold", "is_masked"), [(0.130, True), (0.131, False)])
def test_dppo_masks_by_the_kl_divergence_if_configured(threshold, is_masked):
    terms, _ = compute_terms(Dppo(divergence="kl", threshold=threshold), [2.0], [1.0])
    assert terms.clipped_high_N.item() is is_masked


def test_the_binary_kl_of_a_certain_token_is_finite():
    certain, likely = torch.tensor([0.0, -1e-12, -0.1]), torch.tensor([-0.1, 0.0, 0.0])
    found = binary_kl(certain, likely)
    assert found.isfinite().all()
    assert found[0].item() == pytest.approx(0.1, rel=1e-4)
