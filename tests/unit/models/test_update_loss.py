"""The whole loss of a micro-batch: importance corrections, penalty and weights of tokens, by hand and as properties."""

import math
from dataclasses import replace
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.config.corrections import MaskedImportance, NoCorrection, TruncatedImportance
from rheostat.models.config.divergence import KlPenalty
from rheostat.models.config.objectives import EntropyBonus, PositiveNll, UpdateConfig
from rheostat.models.config.policy_losses import Gspo, PolicyGradient, PpoClip
from rheostat.models.objectives.importance import correct, needs_old
from rheostat.models.objectives.loss_inputs import LossInputs, MetricSums
from rheostat.models.objectives.losses import summarize_behavior, tally_behavior, tally_mismatch, update_loss
from tests.support.losses import LOSSES, NAMES, doubles, evaluate_loss, move_policy, pass_tokens, random_tokens

TRUNCATED, MASKED, NONE = TruncatedImportance(cap=1.5), MaskedImportance(low=0.5, high=2.0), NoCorrection()
SEQUENCES = (
    TruncatedImportance(cap=1.2, level="sequence"),
    MaskedImportance(low=0.8, high=1.1, level="geometric"),
    MaskedImportance(low=0.5, high=2.0, veto=0.7),
)
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any)


# ---- corrections


@pytest.mark.parametrize(
    ("correction", "weights", "truncated", "masked"),
    [
        (NONE, [1, 1, 1], 0, 0),
        (TRUNCATED, [1.5, 0.25, 1.2], 1, 0),
        (MASKED, [0, 0, 1.2], 0, 2),
        (MaskedImportance(low=0.2, high=5.0), [3.0, 0.25, 1.2], 0, 0),
    ],
)
def test_corrections_weigh_tokens_by_the_ratio_of_the_trainer_to_the_generating_policy(
    correction, weights, truncated, masked
):
    # The trainer finds the tokens 3, 1/4 and 1.2 times as likely as what generated them.
    old_N = torch.tensor([0.6, 0.05, 0.24]).log().double().requires_grad_()
    tokens = pass_tokens([3], behaviour=[math.log(0.2)] * 3, advantages=[1.0] * 3)
    found = correct(old_N, tokens, config=UpdateConfig(correction=correction))
    assert found.weight_N.tolist() == pytest.approx(weights)
    assert (found.truncated_N.sum(), found.masked_N.sum()) == (truncated, masked)
    assert not found.weight_N.requires_grad


def test_each_token_is_weighted_against_the_policy_version_that_generated_it():
    # An earlier version generated the first two tokens with 0.2 and 0.8, the present one the third with 0.3.
    tokens = pass_tokens([3], behaviour=doubles([0.2, 0.8, 0.3]).log().tolist(), advantages=[1, 1, 1])
    _, gradient, _ = evaluate_loss(doubles([0.4, 0.4, 0.3]).log(), tokens, UpdateConfig(correction=TRUNCATED))
    assert gradient.tolist() == pytest.approx([-1.5, -0.5, -1.0])


def test_stale_tokens_have_a_separate_correction():
    # All tokens are 4 times as likely as when versions 0, 1 and 2 before this one generated them.
    tokens = pass_tokens([3], behaviour=[math.log(0.1)] * 3, advantages=[1, 1, 1], staleness=[0, 1, 2])
    logprobs_N = doubles([0.4] * 3).log()
    config = UpdateConfig(loss=PolicyGradient(), correction=TRUNCATED, stale_correction=MASKED)
    _, gradient, sums = evaluate_loss(logprobs_N, tokens, config)
    assert gradient.tolist() == pytest.approx([-1.5, 0, 0])
    assert [sums[f"importance_{name}"] for name in ("truncated", "masked", "weight_mean")] == [1, 2, 1.5]
    _, gradient, _ = evaluate_loss(logprobs_N, tokens, config.model_copy(update={"stale_correction": None}))
    assert gradient.tolist() == pytest.approx([-1.5] * 3)


def test_uncorrected_tokens_use_the_generating_policy_and_corrected_tokens_the_old_policy():
    # π is twice π_behaviour and 1.25 times π_old, for a fresh and for a stale token.
    tokens = pass_tokens(
        [2], behaviour=[math.log(0.2)] * 2, advantages=[1, 1], old=[math.log(0.32)] * 2, staleness=[0, 1]
    )
    config = UpdateConfig(loss=PpoClip(clip_high=9.0), correction=NONE, stale_correction=TruncatedImportance(cap=9.0))
    loss, _, sums = evaluate_loss(doubles([0.4, 0.4]).log(), tokens, config)
    assert sums["ratio_mean"] == pytest.approx(2 + 1.25)
    assert loss == pytest.approx(-2 - 1.25 * 1.6)


@pytest.mark.parametrize(
    ("correction", "stale", "needed"),
    [(NONE, None, False), (NONE, NONE, False), (NONE, MASKED, True), (TRUNCATED, NONE, True), (MASKED, None, True)],
)
def test_old_log_probs_are_required_if_any_correction_in_use_needs_them(correction, stale, needed):
    assert needs_old(UpdateConfig(correction=correction, stale_correction=stale)) is needed


def test_the_mismatch_is_measured_over_tokens_of_the_present_policy():
    # The trainer finds the tokens 3, 1/2 and 9 times as likely; an earlier version generated the last.
    tokens = pass_tokens([3], behaviour=[math.log(0.1)] * 3, advantages=[0.0] * 3, staleness=[0, 0, 1])
    tally = MetricSums()
    tally_mismatch(doubles([0.3, 0.05, 0.9]).log(), tokens, tally=tally)
    sums, maxima = tally.unpacked(*tally.packed())
    assert sums == pytest.approx({
        "mismatch_difference_mean": math.log(3) + math.log(2), "mismatch_ratio_mean": 3.5,
        "mismatch_kl": 2 - math.log(3) - 0.5 + math.log(2), "mismatch_tokens": 2,
    })  # fmt: skip
    assert maxima == pytest.approx({"mismatch_difference_max": math.log(3), "mismatch_ratio_max": 3})


def sums_of(tally):
    tally.raise_to({"maximum": doubles([0.0])})
    return tally.unpacked(*tally.packed())[0]


def test_the_effective_sample_size_is_computed_from_the_weights_of_whole_samples():
    # Ratios of tokens: 2 and 2 in the first sample, 1/2 in the second, a stale one. The third sample has no tokens.
    tokens = pass_tokens([2, 1, 0], behaviour=[math.log(0.2)] * 3, advantages=[0.0] * 3, staleness=[0, 0, 2])
    tally = MetricSums()
    tally_behavior(doubles([0.4, 0.4, 0.1]).log(), tokens, tally=tally)
    metrics = summarize_behavior(sums_of(tally))
    assert metrics["effective_sample_size"] == pytest.approx((4 + 0.5) ** 2 / (2 * (4**2 + 0.5**2)))
    assert metrics["behavior_kl"] == pytest.approx((2 * (1 - math.log(2)) + (-0.5 + math.log(2))) / 3)


@pytest.mark.parametrize(("logs", "share"), [((-60.0, -60.0), 1), ((-60.0, -50.0), 0.5), ((-999.0, -999.0), 0)])
def test_weights_of_policies_that_are_far_apart_are_not_made_equal(logs, share):
    tokens, tally = pass_tokens([1, 1], behaviour=[0.0, 0.0], advantages=[0.0, 0.0]), MetricSums()
    tally_behavior(doubles(logs), tokens, tally=tally)
    assert summarize_behavior(sums_of(tally))["effective_sample_size"] == pytest.approx(share, abs=1e-3)


def test_tokens_of_another_run_count_for_no_mismatch_of_engine_and_trainer():
    tokens, tally = pass_tokens([1], behaviour=[math.log(0.1)], advantages=[0.0]), MetricSums()
    tally_mismatch(doubles([0.3]).log(), tokens, has_same_weights=False, tally=tally)
    sums, maxima = tally.unpacked(*tally.packed())
    assert not any(sums.values()) and not any(maxima.values())


# ---- the whole loss


def test_the_first_step_compares_the_policy_with_itself_and_weighs_by_the_mismatch():
    tokens = pass_tokens([1], behaviour=[math.log(0.4)], advantages=[1.0], weights=[0.5])
    loss, gradient, sums = evaluate_loss(doubles([0.6]).log(), tokens, UpdateConfig())
    assert loss == pytest.approx(-1.5 * 0.5)
    assert gradient.tolist() == [pytest.approx(-1.5 * 0.5)]
    assert (sums["kl_old"], sums["entropy"]) == (pytest.approx(0), pytest.approx(-math.log(0.6)))


@pytest.mark.parametrize(
    ("kind", "divergence", "gradient"),
    [("k1", math.log(2), 1.0), ("k2", math.log(2) ** 2 / 2, math.log(2)), ("k3", 0.5 - 1 + math.log(2), 0.5)],
)
def test_the_penalty_is_added_with_the_coefficient_of_the_work_unit(kind, divergence, gradient):
    tokens = pass_tokens([1], behaviour=[-1.0], advantages=[0.0], reference=[math.log(0.25)], weights=[0.5])
    config = UpdateConfig(kl=KlPenalty(kind=kind, coefficient=7.0))
    loss, found, sums = evaluate_loss(doubles([0.5]).log(), tokens, config, kl=0.4)
    assert loss == pytest.approx(0.4 * 0.5 * divergence)
    assert found.tolist() == [pytest.approx(0.4 * 0.5 * gradient)]
    assert sums["kl"] == pytest.approx(divergence)


def test_tokens_without_weight_have_neither_loss_nor_penalty_and_count_in_no_metric():
    tokens = random_tokens([4], seed=0)
    tokens = replace(tokens, weights_N=doubles([0.0, 0.5, 0.0, 0.5]))
    logprobs_N = move_policy(tokens, seed=0)
    _, gradient, sums = evaluate_loss(logprobs_N, tokens, UpdateConfig(kl=KlPenalty()), kl=1.0)
    assert (gradient == 0).tolist() == [True, False, True, False]
    assert sums["trained_tokens"] == 2
    assert sums["entropy"] == pytest.approx(-float(logprobs_N[[1, 3]].sum()))


@pytest.mark.parametrize("field", ["behavior_N", "advantages_N", "old_N", "reference_N"])
@pytest.mark.parametrize("config", LOSSES, ids=NAMES)
def test_values_that_are_not_finite_are_counted_for_any_weight(config, field):
    for correction in (TRUNCATED, MASKED, *SEQUENCES):
        tokens = random_tokens([3, 2], seed=0)
        logprobs_N = move_policy(tokens, seed=0)
        getattr(tokens, field)[1] = math.nan
        update = UpdateConfig(loss=config, correction=correction, kl=KlPenalty())
        assert evaluate_loss(logprobs_N, tokens, update, kl=0.1)[2]["not_finite"] >= 1


@pytest.mark.parametrize("correction", [TRUNCATED, MASKED, NONE, *SEQUENCES])
@pytest.mark.parametrize("stale", [None, TRUNCATED, MASKED])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_gradient_of_the_whole_loss_is_that_of_finite_differences(correction, stale, kind):
    tokens = random_tokens([5, 7], seed=1)
    config = UpdateConfig(correction=correction, stale_correction=stale, kl=KlPenalty(kind=kind))
    assert torch.autograd.gradcheck(
        lambda x: update_loss(x, tokens, config=config, kl_coefficient=0.3, tally=MetricSums()),
        (move_policy(tokens, seed=1),),
    )


# ---- properties

CONFIGS = st.builds(
    UpdateConfig,
    loss=st.sampled_from(LOSSES),
    correction=st.sampled_from([TRUNCATED, MASKED, NONE, *SEQUENCES]),
    stale_correction=st.sampled_from([None, TRUNCATED, MASKED, NONE, *SEQUENCES]),
    kl=st.just(KlPenalty(kind="k2")),
)


@given(config=CONFIGS, lengths=LENGTHS, seed=st.integers(0, 1000))
def test_every_loss_has_the_policy_gradient_at_the_first_step(config, lengths, seed):
    tokens = random_tokens(lengths, seed=seed, mismatch=0.0)  # the engine's log-probs are the trainer's
    _, gradient, sums = evaluate_loss(tokens.old_N, tokens, config)
    torch.testing.assert_close(gradient, -tokens.advantages_N * tokens.weights_N)
    assert sums["clip_fraction_low"] + sums["clip_fraction_high"] == 0


@given(config=CONFIGS, lengths=LENGTHS, seed=st.integers(0, 1000), factor=st.just(0.0) | st.floats(0.1, 10))
def test_the_policy_loss_is_proportional_to_the_advantages_and_zero_without_them(config, lengths, seed, factor):
    tokens = random_tokens(lengths, seed=seed)
    larger = replace(tokens, advantages_N=tokens.advantages_N * factor)
    one, other = (evaluate_loss(move_policy(tokens, seed=seed), some, config) for some in (tokens, larger))
    assert other[0] == pytest.approx(one[0] * factor)
    torch.testing.assert_close(other[1], one[1] * factor)
    assert factor or not other[1].any()


def select_sequences(tokens: LossInputs, rows: list[int]) -> tuple[LossInputs, np.ndarray]:
    """Return the micro-batch of some of the sequences in the given order, and the former places of its tokens."""
    at = np.concatenate([np.flatnonzero(tokens.rows_N.numpy() == row) for row in rows])
    index = torch.from_numpy(at)
    lengths = tokens.lengths_B[rows]
    columns = ("behavior_N", "advantages_N", "staleness_N", "weights_N", "old_N", "reference_N")
    picked = {name: getattr(tokens, name)[index] for name in columns}
    rows_N = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    return LossInputs(rows_N=rows_N, lengths_B=lengths, **picked), at


@given(config=CONFIGS, lengths=LENGTHS, seed=st.integers(0, 1000), data=st.data())
def test_micro_batches_of_any_size_and_order_add_up_to_the_same_loss(config, lengths, seed, data):
    tokens = random_tokens(lengths, seed=seed)
    logprobs_N = move_policy(tokens, seed=seed)
    loss, gradient, metrics = evaluate_loss(logprobs_N, tokens, config, kl=0.2)
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths) - 1)))) if len(lengths) > 1 else []
    parts = [list(part) for part in np.split(np.array(order), cuts)]
    total, pieces, added = 0.0, torch.zeros_like(gradient), dict.fromkeys(metrics, 0.0)
    for part in parts:
        some, at = select_sequences(tokens, part)
        share, piece, counted = evaluate_loss(logprobs_N.detach()[torch.from_numpy(at)], some, config, kl=0.2)
        total += share
        pieces[torch.from_numpy(at)] = piece
        added = {name: (max if name.endswith("_max") else add)(added[name], counted[name]) for name in metrics}
    assert total == pytest.approx(loss)
    torch.testing.assert_close(pieces, gradient)
    assert added == pytest.approx(metrics)


def test_gspo_differs_from_ppo_if_tokens_of_a_sequence_have_different_ratios():
    tokens = random_tokens([6, 6], seed=0)
    logprobs_N = move_policy(tokens, seed=0)
    wide = [
        evaluate_loss(logprobs_N, tokens, UpdateConfig(loss=loss))[0]
        for loss in (Gspo(clip_low=0.9, clip_high=9.0), PpoClip(clip_low=0.9, clip_high=9.0))
    ]
    assert wide[0] != pytest.approx(wide[1], rel=1e-3)


# ---- the entropy bonus


def test_the_entropy_bonus_is_subtracted_with_the_weights_of_the_loss():
    tokens, config = random_tokens([3, 2], seed=0), UpdateConfig(entropy=EntropyBonus(coefficient=0.5))
    logprobs_N, entropies_N = move_policy(tokens, seed=0), doubles([1, 2, 3, 4, 5]).requires_grad_()
    settings = {"kl_coefficient": 0.0, "tally": MetricSums()}
    plain = update_loss(logprobs_N, tokens, config=UpdateConfig(), **settings)
    loss = update_loss(logprobs_N, tokens, config=config, entropies_N=entropies_N, **settings)
    loss.backward()
    assert loss.item() == pytest.approx(plain.item() - 0.5 * float(tokens.weights_N @ entropies_N.detach()))
    torch.testing.assert_close(entropies_N.grad, -0.5 * tokens.weights_N)


def test_tokens_without_weight_have_no_entropy_bonus():
    tokens, tally = replace(random_tokens([3], seed=0), weights_N=doubles([0.5, 0.0, 0.5])), MetricSums()
    entropies_N, config = doubles([1, 2, 4]).requires_grad_(), UpdateConfig(entropy=EntropyBonus(coefficient=0.1))
    update_loss(
        move_policy(tokens, seed=0), tokens, config=config, kl_coefficient=0.0, entropies_N=entropies_N, tally=tally
    ).backward()
    assert entropies_N.grad.tolist() == pytest.approx([-0.05, 0, -0.05])
    assert tally.unpacked(*tally.packed())[0]["full_entropy"] == 5


@pytest.mark.parametrize(
    ("bonus", "total", "coefficients"),
    [
        (EntropyBonus(coefficient=0.1), 3, [0.1, 0.1, 0.1]),
        (EntropyBonus(coefficient=0.1, final=0.0), 5, [0.1, 0.075, 0.05, 0.025, 0.0]),
        (EntropyBonus(coefficient=0.0, final=0.2), 3, [0.0, 0.1, 0.2]),
        (EntropyBonus(coefficient=0.1, final=0.0), 1, [0.1]),
    ],
)
def test_the_entropy_coefficient_changes_linearly_to_its_final_value_in_the_last_iteration(bonus, total, coefficients):
    config = UpdateConfig(entropy=bonus)
    found = [config.with_entropy_at(step, total).entropy.coefficient for step in range(total)]
    assert found == pytest.approx(coefficients)
    assert UpdateConfig().with_entropy_at(0, 5) == UpdateConfig()


# ---- the likelihood of correct completions


def test_the_likelihood_of_correct_completions_is_added_with_separate_weights():
    # Only the first of two sequences is correct: the weight of its two tokens is 1/2 whatever their weight in the loss.
    tokens = replace(random_tokens([2, 2], seed=0), positive_weights_N=doubles([0.5, 0.5, 0, 0]))
    config = UpdateConfig(positive_nll=PositiveNll(coefficient=0.2))
    logprobs_N = move_policy(tokens, seed=0)
    plain, plain_gradient, _ = evaluate_loss(logprobs_N, tokens, UpdateConfig())
    loss, gradient, sums = evaluate_loss(logprobs_N, tokens, config)
    assert loss == pytest.approx(plain - 0.2 * (logprobs_N[0] + logprobs_N[1]).item() / 2)
    torch.testing.assert_close(gradient, plain_gradient - doubles([0.1, 0.1, 0, 0]))
    assert (sums["positive_nll"], sums["positive_fraction"]) == (pytest.approx(-logprobs_N[:2].sum().item()), 2)


def test_the_likelihood_of_correct_completions_is_neither_masked_nor_corrected():
    tokens = random_tokens([2], seed=0)
    tokens = replace(tokens, positive_weights_N=doubles([0.5, 0.5]), low_entropy_N=torch.tensor([True, True]))
    config = UpdateConfig(positive_nll=PositiveNll(coefficient=1), correction=MaskedImportance(low=0.998, high=1.002))
    _, gradient, sums = evaluate_loss(move_policy(tokens, seed=0), tokens, config)
    assert sums["importance_masked"] == 2
    assert gradient.tolist() == pytest.approx([-0.5, -0.5])
