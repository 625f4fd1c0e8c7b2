"""Policy losses per token, against numbers worked by hand and against finite differences."""

import math

import pytest
import torch

from models.config.objectives import Cispo, Gspo, LossConfig, PolicyGradient, PpoClip
from models.objectives.losses import policy_loss
from tests.support.losses import LOSSES, NAMES, doubles, moved, pass_tokens, random_tokens

CLIP = PpoClip(clip_low=0.2, clip_high=0.28)
DUAL = PpoClip(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def compute_terms(
    config: LossConfig, ratios: list[float], advantages: list[float], *, lengths: list[int] | None = None
):
    """Return the terms of tokens whose old probability is 1/4, and the gradients of their log-probs."""
    tokens = pass_tokens(lengths or [len(ratios)], behaviour=[0.0] * len(ratios), advantages=advantages)
    old_N = torch.full((len(ratios),), math.log(0.25), dtype=torch.float64)
    logprobs_N = (old_N + doubles(ratios).log()).requires_grad_()
    terms = policy_loss(logprobs_N, old_N, tokens=tokens, config=config)
    terms.loss_N.sum().backward()
    return terms, logprobs_N.grad.tolist()


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
def test_ppo_clips_only_tokens_that_have_moved_far_enough(ratio, advantage, loss, gradient, low, high):
    for config in (CLIP, DUAL):
        terms, gradients = compute_terms(config, [ratio], [advantage])
        assert (terms.loss_N.item(), gradients) == (pytest.approx(loss), [pytest.approx(gradient)])
        assert (terms.clipped_low_N.item(), terms.clipped_high_N.item()) == (low, high)
        assert terms.ratio_N.item() == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "dual"),
    [
        (2.9, -2.0, 2.9 * 2, 2.9 * 2, False),
        (5.0, -2.0, 3.0 * 2, 0.0, True),  # bad and far more likely: the loss is at most 3 x 2
        (5.0, 2.0, -1.28 * 2, 0.0, False),  # good: the upper bound, as ever
    ],
)
def test_the_dual_clip_bounds_only_the_loss_of_bad_tokens(ratio, advantage, loss, gradient, dual):
    terms, gradients = compute_terms(DUAL, [ratio], [advantage])
    assert (terms.loss_N.item(), gradients) == (pytest.approx(loss), [pytest.approx(gradient)])
    assert terms.dual_clipped_N.item() is dual
    assert compute_terms(CLIP, [ratio], [advantage])[0].dual_clipped_N is None


def test_gspo_has_one_ratio_per_sequence_the_geometric_mean_over_its_tokens():
    # Sequences of ratios (4, 1) and (1, 8, 1): geometric means 2 and 2, though no token has that ratio.
    terms, gradients = compute_terms(
        Gspo(clip_low=0.5, clip_high=2.0), [4, 1, 1, 8, 1], [3, 3, -1, -1, -1], lengths=[2, 3]
    )
    assert terms.ratio_N.tolist() == pytest.approx([2] * 5)
    assert terms.loss_N.tolist() == pytest.approx([-6, -6, 2, 2, 2])
    assert gradients == pytest.approx([-6, -6, 2, 2, 2])


def test_gspo_clips_whole_sequences():
    config = Gspo(clip_low=0.5, clip_high=0.5)
    terms, gradients = compute_terms(config, [4, 1, 0.25, 0.25, 4, 1], [1, 1, -1, -1, -1, -1], lengths=[2, 2, 2])
    assert terms.loss_N.tolist() == pytest.approx([-1.5, -1.5, 0.5, 0.5, 2, 2])
    assert gradients == pytest.approx([0, 0, 0, 0, 2, 2])  # good and likelier, bad and less likely: cut off
    assert terms.clipped_high_N.tolist() == [True, True, False, False, False, False]
    assert terms.clipped_low_N.tolist() == [False, False, True, True, False, False]


def test_gspo_has_the_value_and_gradient_of_its_formula_per_sequence():
    # The mean over sequences of min(s A, clip(s) A) with s = exp(mean log-ratio), differentiated by autograd.
    lengths, advantages = [3, 1, 5, 2], [0.7, -1.1, -0.4, 1.3]
    per_token = [advantage for advantage, length in zip(advantages, lengths, strict=True) for _ in range(length)]
    config = Gspo(clip_low=0.1, clip_high=0.15)
    old_N = -torch.rand(11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 0.5
    tokens = pass_tokens(lengths, behaviour=[0.0] * 11, advantages=per_token, old=old_N.tolist())
    ours, theirs = moved(tokens, seed=3), moved(tokens, seed=3)
    weights_N = doubles([1 / (4 * length) for length in lengths for _ in range(length)])
    loss = (policy_loss(ours, old_N, tokens=tokens, config=config).loss_N * weights_N).sum()
    ratios = [part.mean().exp() for part in torch.split(theirs - old_N, lengths)]
    expected = torch.stack(
        [torch.maximum(-s * a, -s.clamp(0.9, 1.15) * a) for s, a in zip(ratios, advantages, strict=True)]
    ).mean()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert ours.grad.count_nonzero() not in (0, 11), "some sequences should be clipped and some not"


def test_sequences_without_completion_tokens_change_no_other_ratio():
    terms, _ = compute_terms(Gspo(clip_low=0.5, clip_high=2.0), [2, 3, 3], [1, 1, 1], lengths=[0, 1, 0, 2, 0])
    assert terms.ratio_N.tolist() == pytest.approx([2, 3, 3])


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "low", "high"),
    [
        (1.0, 2.0, 1.0, False, False),
        (3.0, 2.0, 1.28, False, True),  # the weight is cut, the gradient is not
        (3.0, -2.0, 1.28, False, True),  # bad tokens too
        (0.1, 2.0, 0.7, True, False),
    ],
)
def test_cispo_clips_the_weight_and_keeps_every_gradient(ratio, advantage, weight, low, high):
    terms, gradients = compute_terms(Cispo(clip_low=0.3, clip_high=0.28), [ratio], [advantage])
    assert terms.loss_N.item() == pytest.approx(-weight * advantage * math.log(0.25 * ratio))
    assert gradients == [pytest.approx(-weight * advantage)]
    assert (terms.clipped_low_N.item(), terms.clipped_high_N.item()) == (low, high)


def test_cispo_has_no_lower_bound_by_default():
    assert compute_terms(Cispo(), [1e-6], [1.0])[1] == [pytest.approx(-1e-6)]


def test_the_policy_gradient_is_log_prob_times_advantage_for_every_ratio():
    terms, gradients = compute_terms(PolicyGradient(), [0.5, 2.0], [2.0, -3.0])
    assert terms.loss_N.tolist() == pytest.approx([-2 * math.log(0.125), 3 * math.log(0.5)])
    assert gradients == pytest.approx([-2, 3])
    assert terms.ratio_N.tolist() == pytest.approx([0.5, 2.0])
    assert not terms.clipped_low_N.any()


# ---- gradients


@pytest.mark.parametrize("config", [LOSSES[0], LOSSES[1], LOSSES[4]], ids=[NAMES[0], NAMES[1], NAMES[4]])
def test_gradients_are_those_of_finite_differences(config):
    tokens = random_tokens([4, 9, 1, 6], seed=0, move=0.5)
    logprobs_N = moved(tokens, seed=0, move=0.5)
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, tokens.old_N, tokens=tokens, config=config).loss_N, (logprobs_N,)
    )


def test_the_gradient_of_cispo_is_that_of_finite_differences_with_constant_weights():
    # Finite differences would move the weights too, which count as constants.
    tokens, config = random_tokens([20], seed=0), LOSSES[3]
    logprobs_N = moved(tokens, seed=0)
    weights_N = torch.exp(logprobs_N.detach() - tokens.old_N).clamp(0.7, 1.28)
    assert torch.autograd.gradcheck(lambda x: -weights_N * tokens.advantages_N * x, (logprobs_N,))
    policy_loss(logprobs_N, tokens.old_N, tokens=tokens, config=config).loss_N.sum().backward()
    torch.testing.assert_close(logprobs_N.grad, -weights_N * tokens.advantages_N)
