"""Importance corrections of whole completions: weights by hand, limits, and completions with stale tokens."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.config.corrections import MaskedImportance, NoCorrection, TruncatedImportance
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy_losses import PolicyGradient
from rheostat.models.objectives.importance import correct
from tests.support.losses import LOSSES, doubles, evaluate_loss, move_policy, pass_tokens, random_tokens

LEVELS = ("sequence", "geometric")
RATIOS = [3.0, 0.5, 0.25, 4.0, 4.0, 0.5]
"""Ratios of the tokens of completions of 2, 1 and 3 tokens. Their products are 1.5, 0.25 and 8."""
PRODUCTS = [1.5, 1.5, 0.25, 8, 8, 8]
ROOTS = [1.5**0.5, 1.5**0.5, 0.25, 2, 2, 2]


def weigh(correction, ratios=RATIOS, lengths=(2, 1, 0, 3)):
    """Return the correction of tokens with these ratios of the trainer to the generating policy."""
    tokens = pass_tokens(lengths, behaviour=[-2.0] * len(ratios), advantages=[1.0] * len(ratios))
    return correct(doubles(ratios).log() - 2, tokens, config=UpdateConfig(correction=correction))


@pytest.mark.parametrize(
    ("correction", "weights", "truncated", "masked"),
    [
        (TruncatedImportance(level="sequence", cap=100), PRODUCTS, 0, 0),
        (TruncatedImportance(level="sequence", cap=1.2), [1.2, 1.2, 0.25, 1.2, 1.2, 1.2], 5, 0),
        (MaskedImportance(level="sequence", low=0.5, high=2), [1.5, 1.5, 0, 0, 0, 0], 0, 4),
        (TruncatedImportance(level="geometric", cap=1.5), [*ROOTS[:3], 1.5, 1.5, 1.5], 3, 0),
        (MaskedImportance(level="geometric", low=0.5, high=2.1), [*ROOTS[:2], 0, 2, 2, 2], 0, 1),
        (MaskedImportance(level="geometric", low=0, high=1.1), [0, 0, 0.25, 0, 0, 0], 0, 5),
    ],
)
def test_all_tokens_of_a_completion_are_weighted_by_the_product_or_geometric_mean_of_their_ratios(
    correction, weights, truncated, masked
):
    found = weigh(correction)
    assert found.weight_N.tolist() == pytest.approx(weights)
    assert (found.truncated_N.sum(), found.masked_N.sum()) == (truncated, masked)


@given(lengths=st.lists(st.integers(0, 1), min_size=1, max_size=6).filter(any), seed=st.integers(0, 1000))
def test_completions_of_one_token_have_the_same_weights_at_every_level(lengths, seed):
    tokens = random_tokens(lengths, seed=seed)
    for kind in (TruncatedImportance(cap=1.1), MaskedImportance(low=0.8, high=1.2)):
        token, *others = (
            correct(tokens.old_N, tokens, config=UpdateConfig(correction=kind.model_copy(update={"level": level})))
            for level in ("token", *LEVELS)
        )
        for other in others:
            for one, same in zip(token, other, strict=True):
                torch.testing.assert_close(same, one)


def test_a_ratio_of_a_completion_is_bounded_as_a_whole_and_not_per_token():
    # Log-ratios of 48 and -30 have the sum 18 and the mean 9. The sum of 40 and 0 is bounded to 20.
    ratios = [math.exp(48), math.exp(-30), math.exp(40), 1.0]
    product = weigh(TruncatedImportance(level="sequence", cap=1e12), ratios, (2, 2)).weight_N
    assert product.log().tolist() == pytest.approx([18, 18, 20, 20])
    mean = weigh(TruncatedImportance(level="geometric", cap=1e12), ratios, (2, 2)).weight_N
    assert mean.log().tolist() == pytest.approx([9, 9, 20, 20])


def test_the_ratio_of_a_completion_includes_its_stale_and_its_fresh_tokens():
    tokens = pass_tokens([2], behaviour=[math.log(0.2)] * 2, advantages=[1, 1], staleness=[0, 1])
    config = UpdateConfig(
        loss=PolicyGradient(),
        correction=TruncatedImportance(cap=9),
        stale_correction=TruncatedImportance(cap=9, level="sequence"),
    )
    # Ratios of 2 and 3. The fresh token has its own ratio, the stale one that of the completion.
    _, gradient, _ = evaluate_loss(doubles([0.4, 0.6]).log(), tokens, config)
    assert gradient.tolist() == pytest.approx([-2, -6])


@pytest.mark.parametrize("level", LEVELS)
def test_tokens_of_a_masked_completion_have_no_gradient_and_the_others_keep_theirs(level):
    tokens = random_tokens([4, 3], seed=3)
    tokens.behavior_N[:4] = tokens.old_N[:4] - 1  # every ratio of the first completion is e
    config = UpdateConfig(loss=PolicyGradient(), correction=MaskedImportance(level=level, low=0, high=2))
    _, gradient, sums = evaluate_loss(move_policy(tokens, seed=3), tokens, config)
    log_ratios_N = (tokens.old_N - tokens.behavior_N)[4:]
    ratio = (log_ratios_N.sum() if level == "sequence" else log_ratios_N.mean()).exp()
    assert 0 < ratio < 2
    expected = -(tokens.advantages_N * tokens.weights_N * ratio)[4:]
    torch.testing.assert_close(gradient, torch.cat([doubles([0.0] * 4), expected]))
    assert sums["importance_masked"] == 4


def test_log_probs_in_single_precision_are_added_in_double_precision():
    # 20000 log-ratios of one thousandth: their sum in single precision would lose the last digits.
    count = 20000
    tokens = pass_tokens([count], behaviour=[-5.0] * count, advantages=[1.0] * count)
    old_N = torch.full((count,), -4.999)
    tokens = replace(tokens, behavior_N=tokens.behavior_N.float())
    found = correct(old_N, tokens, config=UpdateConfig(correction=TruncatedImportance(cap=1e9, level="sequence")))
    exact = float((old_N - tokens.behavior_N)[0].double() * count)
    assert found.weight_N.dtype == torch.float32
    assert float(found.weight_N[0].log()) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("veto", "masked"), [(None, [1, 2]), (0.2, [1, 2]), (0.26, [1, 2]), (0.6, [0, 1, 2, 3, 4, 5]), (0.4, [1, 2])]
)
def test_a_completion_is_masked_if_one_of_its_tokens_has_a_ratio_below_the_veto(veto, masked):
    found = weigh(MaskedImportance(low=0.51, high=9, veto=veto), [3.0, 0.5, 0.25, 4.0, 4.0, 0.55])
    assert found.masked_N.nonzero().flatten().tolist() == masked
    assert (found.weight_N == 0).tolist() == found.masked_N.tolist()


def test_a_veto_below_the_clamp_of_ratios_compares_the_ratios_before_the_clamp():
    # e^-30 is clamped to e^-20, which is above a veto of 1e-10.
    correction = MaskedImportance(low=0, high=9, veto=1e-10)
    assert weigh(correction, [math.exp(-30), 1.0, math.exp(-21), 1.0], (2, 2)).masked_N.tolist() == [1, 1, 0, 0]


def test_a_veto_masks_completions_that_pass_the_bounds_of_their_geometric_mean():
    correction = MaskedImportance(level="geometric", low=0.5, high=2, veto=1e-3)
    found = weigh(correction, [1e-4, 1e4, 1.0, 0.1, 10.0], (2, 3))
    assert found.weight_N.tolist() == pytest.approx([0, 0, 1, 1, 1])


# The loss dppo compares with the behavior log-probs, which this test replaces.
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss.kind != "dppo"], ids=lambda loss: loss.kind)
def test_a_masked_token_has_icepops_objective(loss):
    # The weight is the ratio inside the bounds, so the loss of each token is M(ratio) times the token's policy loss.
    tokens = random_tokens([9, 8], seed=1, mismatch=1.0)
    logprobs_N = move_policy(tokens, seed=1)
    _, gradient, sums = evaluate_loss(
        logprobs_N, tokens, UpdateConfig(loss=loss, correction=MaskedImportance(low=0.5, high=5))
    )
    same_policy = replace(tokens, behavior_N=tokens.old_N)
    _, plain, _ = evaluate_loss(logprobs_N, same_policy, UpdateConfig(loss=loss, correction=NoCorrection()))
    ratio_N = (tokens.old_N - tokens.behavior_N).exp()
    inside_N = (ratio_N >= 0.5) & (ratio_N <= 5)
    assert 0 < sums["importance_masked"] == float((~inside_N).sum()) < 17
    torch.testing.assert_close(gradient, torch.where(inside_N, ratio_N, 0) * plain)
