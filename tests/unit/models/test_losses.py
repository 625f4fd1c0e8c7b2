"""Losses and weights of tokens, against numbers worked by hand and finite differences."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.config.policy_losses import (
    Cispo,
    ConstantMean,
    Gspo,
    LossConfig,
    PolicyGradient,
    PpoClip,
    SequenceMean,
    TokenMean,
)
from rheostat.models.objectives.loss_inputs import MetricSums
from rheostat.models.objectives.losses import (
    explained_variance,
    fit_sums,
    token_weights,
    value_loss,
)
from rheostat.models.objectives.policy_losses import policy_loss
from rheostat.models.training.trainer import learning_rate
from rheostat.models.training.update_steps import compute_step_ratios
from tests.support.losses import LOSSES, NAMES, doubles, move_policy, pass_tokens, random_tokens

LOGPROBS = st.floats(-50, -0.01)
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
    ours, theirs = move_policy(tokens, seed=3), move_policy(tokens, seed=3)
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
    logprobs_N = move_policy(tokens, seed=0, move=0.5)
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, tokens.old_N, tokens=tokens, config=config).loss_N, (logprobs_N,)
    )


def test_the_gradient_of_cispo_is_that_of_finite_differences_with_constant_weights():
    # Finite differences would move the weights too, which count as constants.
    tokens, config = random_tokens([20], seed=0), LOSSES[3]
    logprobs_N = move_policy(tokens, seed=0)
    weights_N = torch.exp(logprobs_N.detach() - tokens.old_N).clamp(0.7, 1.28)
    assert torch.autograd.gradcheck(lambda x: -weights_N * tokens.advantages_N * x, (logprobs_N,))
    policy_loss(logprobs_N, tokens.old_N, tokens=tokens, config=config).loss_N.sum().backward()
    torch.testing.assert_close(logprobs_N.grad, -weights_N * tokens.advantages_N)


# ---- the loss of the critic


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.1, 1.0, 2.0, 0.9**2 / 2, -0.9, False),  # inside the band: the plain squared error
        (1.5, 1.0, 2.0, 0.8**2 / 2, 0.0, True),  # moved 0.5 to the target, counts as 0.2: the worse error, no gradient
        (0.5, 1.0, 2.0, 1.5**2 / 2, -1.5, False),  # moved away: plain is worse, it may come back
        (2.5, 1.0, 2.0, 0.8**2 / 2, 0.0, True),  # past the target, but less wrong than the clipped one
        (4.0, 1.0, 2.0, 2.0**2 / 2, 2.0, False),  # far past the target: plain is worse again
    ],
)
def test_the_value_loss_is_clipped_outside_a_band_around_the_old_value(value, old, target, loss, gradient, clipped):
    values_N = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    found = value_loss(values_N, old_N=torch.tensor([old]), returns_N=torch.tensor([target]), clip=0.2)
    found.loss_N.sum().backward()
    assert found.loss_N.item() == pytest.approx(loss)
    assert values_N.grad.item() == pytest.approx(gradient)
    assert found.clipped_N.item() is clipped


def test_the_gradient_of_the_value_loss_is_that_of_finite_differences():
    torch.manual_seed(0)
    old, returns = torch.randn(2, 40, dtype=torch.float64)
    values = (old + 0.5 * torch.randn(40, dtype=torch.float64)).requires_grad_()
    clipped = partial(value_loss, old_N=old, returns_N=returns, clip=0.2)
    assert torch.autograd.gradcheck(lambda x: clipped(x).loss_N.sum(), (values,))


def compute_explained_variance(values: list[float], returns: list[float], *, parts: int = 1) -> float:
    tally = MetricSums()
    for part in range(parts):
        tally.add(fit_sums(torch.tensor(values[part::parts]), torch.tensor(returns[part::parts])))
    tally.raise_to({"nothing": torch.zeros(1)})
    return explained_variance(tally.unpacked(*tally.packed())[0])


@pytest.mark.parametrize(
    ("values", "returns", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
        ([5.0, 6.0, 7.0], [1.0, 2.0, 3.0], 1.0),  # a constant error is no variance
        ([2.0, 2.0, 2.0], [1.0, 2.0, 3.0], 0.0),
        ([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], -3.0),  # errors -2, 0, 2 vary four times as much
        ([0.5, 0.1, 0.3], [0.1, 0.1, 0.1], 0.0),
        ([], [], 0.0),
    ],
)
def test_explained_variance_compares_errors_with_returns(values, returns, expected):
    assert compute_explained_variance(values, returns) == pytest.approx(expected)


EIGHTHS = st.integers(-72, 72).map(lambda number: number / 8)
"""Numbers whose sums and squares are exact."""


@given(pairs=st.lists(st.tuples(EIGHTHS, EIGHTHS), min_size=2), parts=st.integers(1, 5))
def test_explained_variance_adds_up_over_micro_batches_and_ranks(pairs, parts):
    values, returns = map(list, zip(*pairs, strict=True))
    whole = compute_explained_variance(values, returns)
    assert compute_explained_variance(values, returns, parts=parts) == pytest.approx(whole)


# ---- weights, learning rates and metrics


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [(TokenMean(), 0.25, 0.25), (SequenceMean(), 0.5, 1 / 6), (ConstantMean(length=10), 0.05, 0.05)],
)
def test_aggregations_weigh_tokens_of_long_and_short_sequences_differently(aggregation, short, long):
    assert token_weights(aggregation, [1, 3]) == pytest.approx([short, long])
    assert token_weights(aggregation, [1, 0, 3])[::2] == token_weights(aggregation, [1, 3])


@pytest.mark.parametrize(
    ("schedule", "floor", "rates"),
    [
        ("constant", 0.0, [0.5, 1, 1, 1, 1]),
        ("linear", 0.0, [0.5, 1, 1, 0.5, 0]),
        ("cosine", 0.0, [0.5, 1, 1, 0.5, 0]),
        ("cosine", 0.1, [0.5, 1, 1, 0.55, 0.1]),
    ],
)
def test_the_learning_rate_warms_up_and_then_stays_or_falls(schedule, floor, rates):
    settings = {"peak": 1.0, "warmup_steps": 2, "schedule": schedule, "floor": floor}
    assert [learning_rate(step, 6, **settings) for step in (0, 1, 2, 4, 6)] == pytest.approx(rates)


def test_log_ratios_of_denoising_steps_are_reported_by_mean_and_deviation_for_steps_with_samples():
    sums = {"loss": 3.0, "denoising_step_1": 2.0, "denoising_step_1_sum": -3.0, "denoising_step_1_square": 5.0}
    sums |= {"denoising_step_2": 0.0, "denoising_step_2_sum": 0.0, "denoising_step_2_square": 0.0}
    found = compute_step_ratios(sums)  # log-ratios -1 and -2
    assert found == pytest.approx({"log_ratio_mean_step_1": -1.5, "log_ratio_std_step_1": 0.5})
