"""Losses of preference pairs, against numbers worked by hand and finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat.infra.variants import check_implementation, implementation_of
from rheostat.models.config.preference_losses import (
    CpoLoss,
    DpoLoss,
    IpoLoss,
    KtoLoss,
    OrpoLoss,
    PreferenceLoss,
    SimpoLoss,
)
from rheostat.models.config.training import DpoConfig
from rheostat.models.objectives.preferences import PairScores, PairStatistics, PairTerms, bradley_terry
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.sequences import SequencePair, mismatch_pairs
from tests.support.losses import doubles

LOGPROBS = st.floats(-50, -0.01)
LOSSES = (
    DpoLoss(beta=0.7, label_smoothing=0.2),
    IpoLoss(tau=0.3),
    SimpoLoss(beta=1.5, margin=0.4),
    CpoLoss(beta=0.7, label_smoothing=0.2, nll_weight=0.6),
    OrpoLoss(weight=0.8),
    KtoLoss(beta=0.7, desirable_weight=1.3, undesirable_weight=0.8),
)
"""One loss of each kind."""
KINDS = [loss.label for loss in LOSSES]


def pair_scores(chosen, rejected, lengths=((1,), (1,))) -> PairScores:
    chosen, rejected = (each if isinstance(each, torch.Tensor) else doubles(each) for each in (chosen, rejected))
    return PairScores(chosen, rejected, *map(torch.tensor, lengths))


def compute_terms(
    config: PreferenceLoss,
    scores: PairScores,
    reference: tuple[list[float], list[float]] | None = None,
    *,
    point: float | None = None,
) -> PairTerms:
    """Return the terms of pairs that are all pairs of their step."""
    step = PairStatistics(
        scores.chosen_lengths_P.double().mean().item(), None if point is None else torch.tensor(point).double()
    )
    baseline = (
        None if reference is None else scores._replace(chosen_P=doubles(reference[0]), rejected_P=doubles(reference[1]))
    )
    return implementation_of(config)(scores, baseline, step=step, config=config)


def test_every_loss_has_a_function_with_the_same_parameters():
    for loss in LOSSES:
        check_implementation(loss, "scores", "reference", where="dpo.loss", named=("step", "config"))


@pytest.mark.parametrize(
    ("chosen", "rejected", "smoothing", "loss", "is_right"),
    [
        (-8.0, -12.0, 0.0, 0.126928, True),  # margin 0.5 x (2 - -2) = 2, ln(1 + e^-2)
        (-12.0, -8.0, 0.0, 2.126928, False),  # ln(1 + e^2)
        (-8.0, -12.0, 0.25, 0.75 * 0.126928 + 0.25 * 2.126928, True),  # a quarter of the pairs is the other way round
    ],
)
def test_dpo_has_its_values_at_margins_worked_by_hand(chosen, rejected, smoothing, loss, is_right):
    found = compute_terms(
        DpoLoss(beta=0.5, label_smoothing=smoothing), pair_scores([chosen], [rejected]), ([-10.0], [-10.0])
    )
    assert found.margins_P.item() == pytest.approx(2 if is_right else -2)
    assert found.loss_P.item() == pytest.approx(loss)
    assert found.right_P.item() is is_right


@given(chosen=LOGPROBS, rejected=LOGPROBS)
def test_dpo_of_the_reference_itself_is_ln_2_and_no_pair_is_right(chosen, rejected):
    found = compute_terms(DpoLoss(label_smoothing=0.1), pair_scores([chosen], [rejected]), ([chosen], [rejected]))
    assert found.loss_P.item() == pytest.approx(math.log(2))
    assert not found.right_P.item()


def test_ipo_is_the_squared_distance_of_the_margin_per_token_from_its_target():
    # chosen: (-8 - -10) / 4 tokens = 0.5; rejected: (-12 - -10) / 2 tokens = -1; target 1 / (2 x 0.25) = 2
    found = compute_terms(IpoLoss(tau=0.25), pair_scores([-8.0], [-12.0], ((4,), (2,))), ([-10.0], [-10.0]))
    assert found.margins_P.item() == pytest.approx(1.5)
    assert found.loss_P.item() == pytest.approx(0.25)
    assert found.right_P.item() is True


def test_simpo_compares_mean_log_probs_with_a_margin_and_the_margin_does_not_count_as_a_reward():
    # means -2 and -2.5, times 2: difference 1, margin 3: ln(1 + e^2)
    found = compute_terms(SimpoLoss(beta=2.0, margin=3.0), pair_scores([-8.0], [-5.0], ((4,), (2,))))
    assert found.margins_P.item() == pytest.approx(1)
    assert found.loss_P.item() == pytest.approx(2.126928)
    assert found.right_P.item() is True


def test_cpo_adds_the_mean_cross_entropy_over_all_chosen_tokens_of_the_step():
    # margins 0.5 x 4 = 2 and 0.5 x -4 = -2; 4 and 2 chosen tokens with log-probs -8 and -10: mean 18 / 6 = 3
    found = compute_terms(
        CpoLoss(beta=0.5, nll_weight=0.1), pair_scores([-8.0, -10.0], [-12.0, -6.0], ((4, 2), (1, 9)))
    )
    assert found.margins_P.tolist() == pytest.approx([2, -2])
    assert found.extra_P["nll"].mean().item() == pytest.approx(3)
    assert found.loss_P.mean().item() == pytest.approx((0.126928 + 2.126928) / 2 + 0.1 * 3)


@given(chosen=LOGPROBS, rejected=LOGPROBS, smoothing=st.floats(0, 0.4))
def test_cpo_without_cross_entropy_is_dpo_with_a_uniform_reference(chosen, rejected, smoothing):
    scores = pair_scores([chosen], [rejected])
    found = compute_terms(CpoLoss(beta=0.3, label_smoothing=smoothing, nll_weight=0), scores)
    expected = compute_terms(DpoLoss(beta=0.3, label_smoothing=smoothing), scores, ([-7.0], [-7.0]))
    assert found.loss_P.item() == pytest.approx(expected.loss_P.item())


def test_orpo_adds_the_odds_ratio_of_mean_probabilities_to_the_cross_entropy():
    # probabilities per token 1/2 (odds 1) and 1/4 (odds 1/3), so the odds ratio is 3: -ln(3/4)
    scores = pair_scores([3 * math.log(0.5)], [2 * math.log(0.25)], ((3,), (2,)))
    found = compute_terms(OrpoLoss(weight=0.5), scores)
    assert found.margins_P.item() == pytest.approx(math.log(3))
    assert found.extra_P["nll"].item() == pytest.approx(math.log(2))
    assert found.loss_P.item() == pytest.approx(math.log(2) - 0.5 * math.log(0.75))


def test_kto_measures_both_completions_from_the_reference_point():
    # log-ratios 2 and -2, reference point 1, beta 1: sigmoid(1 - 2) = 0.268941 and sigmoid(-2 - 1) = 0.047426
    config = KtoLoss(beta=1.0, desirable_weight=2.0, undesirable_weight=3.0)
    found = compute_terms(config, pair_scores([-8.0], [-12.0]), ([-10.0], [-10.0]), point=1.0)
    assert found.loss_P.item() == pytest.approx((2 * 0.268941 + 3 * 0.047426) / 2, abs=1e-6)
    assert found.margins_P.item() == pytest.approx(4)
    assert found.extra_P["reference_point"].tolist() == [1.0]


def test_kto_rates_a_single_completion_by_its_label_and_ignores_the_missing_one():
    # As above, but each completion takes the place of a pair: log-ratios 2 (desirable) and -2 (undesirable).
    config = KtoLoss(beta=1.0, desirable_weight=2.0, undesirable_weight=3.0)
    leaves = [doubles(values).requires_grad_() for values in ([-8.0, 0.0], [0.0, -12.0])]
    scores = pair_scores(*leaves, lengths=([3, 0], [0, 2]))
    baseline = scores._replace(chosen_P=doubles([-10.0, 0.0]), rejected_P=doubles([0.0, -10.0]))
    step = PairStatistics(1.5, torch.tensor(1.0).double(), chosen_share=0.5, rejected_share=0.5)
    found = implementation_of(config)(scores, baseline, step=step, config=config)
    assert found.loss_P.tolist() == pytest.approx([2 * 0.268941, 3 * 0.047426], abs=1e-6)
    assert found.right_P.tolist() == [True, True]
    assert found.margins_P.mean().item() == pytest.approx(2 - -2)
    assert found.extra_P["desirable_reward"].mean().item() == pytest.approx(2)
    assert found.extra_P["undesirable_reward"].mean().item() == pytest.approx(-2)
    found.loss_P.sum().backward()
    assert [leaf.grad.count_nonzero().item() for leaf in leaves] == [1, 1]


def test_the_accuracy_of_a_single_completion_is_the_sign_of_its_reward():
    for log_ratio, right in ((0.5, [True, False]), (-0.5, [False, True])):
        scores = pair_scores([log_ratio, 0.0], [0.0, log_ratio], lengths=([1, 0], [0, 1]))
        step = PairStatistics(0.5, torch.tensor(9.0).double(), 0.5, 0.5)
        reference = pair_scores([0.0, 0.0], [0.0, 0.0], lengths=([1, 0], [0, 1]))
        assert implementation_of(KtoLoss())(scores, reference, step=step, config=KtoLoss()).right_P.tolist() == right


def test_bradley_terry_has_its_values_at_rewards_worked_by_hand():
    found = bradley_terry(pair_scores([1.5, -1.0], [0.5, 1.0]), centering=0.0)
    assert found.loss_P.tolist() == pytest.approx([0.313262, 2.126928])  # ln(1 + e^-1), ln(1 + e^2)
    assert found.margins_P.tolist() == [1.0, -2.0]
    assert found.right_P.tolist() == [True, False]


def test_only_centering_depends_on_the_mean_of_the_rewards():
    pair = pair_scores([3.0], [2.0])
    plain, centred = (bradley_terry(pair, centering=factor).loss_P.item() for factor in (0.0, 0.01))
    assert centred - plain == pytest.approx(0.01 * 25)
    shifted = bradley_terry(pair_scores([0.5], [-0.5]), centering=0.01).loss_P.item()
    assert shifted == pytest.approx(plain)


@pytest.mark.parametrize("loss", LOSSES, ids=KINDS)
@pytest.mark.parametrize(("chosen", "rejected"), [(-1e4, -1.0), (-1.0, -1e4), (0.0, -1.0), (-1.0, 0.0)])
def test_losses_of_distant_and_of_certain_completions_and_their_gradients_stay_finite(loss, chosen, rejected):
    pair = [torch.tensor([value], requires_grad=True) for value in (chosen, rejected)]
    found = compute_terms(loss, pair_scores(*pair), ([-10.0], [-10.0]), point=0.5)
    found.loss_P.sum().backward()
    assert found.loss_P.isfinite().all()
    assert all(each.grad.isfinite().all() for each in pair)


def test_bradley_terry_of_distant_pairs_stays_finite():
    assert bradley_terry(pair_scores([-1e4], [1e4]), centering=0.0).loss_P.item() == 2e4


@pytest.mark.parametrize("loss", LOSSES, ids=KINDS)
def test_gradients_over_pairs_are_those_of_finite_differences(loss):
    torch.manual_seed(0)
    reference = tuple(torch.randn(8).sub(5).tolist() for _ in range(2))
    lengths = tuple(torch.randint(1, 9, (8,)).tolist() for _ in range(2))
    pairs = tuple(torch.randn(8, dtype=torch.float64).sub(9).requires_grad_() for _ in range(2))

    def direct(chosen, rejected):
        return compute_terms(loss, pair_scores(chosen, rejected, lengths), reference, point=0.4).loss_P

    assert torch.autograd.gradcheck(direct, pairs)


def test_gradients_of_bradley_terry_are_those_of_finite_differences():
    torch.manual_seed(0)
    pairs = tuple(torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *pair: bradley_terry(pair_scores(*pair), centering=0.2).loss_P, pairs)


@pytest.mark.parametrize("loss", [each for each in LOSSES if not each.uses_reference], ids=lambda each: each.label)
def test_losses_without_a_reference_do_not_read_one(loss):
    scores = pair_scores([-8.0], [-12.0], ((4,), (2,)))
    assert torch.equal(compute_terms(loss, scores).loss_P, compute_terms(loss, scores, ([-1.0], [-9.0])).loss_P)


@pytest.mark.parametrize("loss", [DpoLoss(), KtoLoss()], ids=lambda each: each.label)
def test_losses_with_a_reference_refuse_to_run_without_one(loss):
    with pytest.raises(AssertionError, match="reference"):
        compute_terms(loss, pair_scores([-8.0], [-12.0]), point=0.0)


# ---- the sequences of the reference point of KTO


def build_pair(prompt: list[int], chosen: list[int], rejected: list[int]) -> SequencePair:
    start = ModelInput.from_prompt(prompt)
    return SequencePair(start.append_completion(chosen), start.append_completion(rejected))


def test_mismatched_pairs_have_the_completions_of_the_next_pair_cut_to_the_context():
    pairs = [
        build_pair([1, 2, 3], [10], [11, 12]),
        build_pair([4], [20, 21], [22]),
        build_pair([5, 6], [30, 31, 32], [33, 34]),
    ]
    assert mismatch_pairs(pairs, context=4) == [
        build_pair([1, 2, 3], [20], [22]),  # 20, 21 does not fit
        build_pair([4], [30, 31, 32], [33, 34]),
        build_pair([5, 6], [10], [11, 12]),
    ]


def test_mismatched_completions_with_labels_come_from_the_next_row_with_any_label():
    one, two = build_pair([1, 2], [10], [11]), build_pair([3], [20, 21], [22])
    rows = [SequencePair(one.chosen, ModelInput()), SequencePair(ModelInput(), two.rejected)]
    assert mismatch_pairs(rows, context=4) == [
        SequencePair(build_pair([1, 2], [22], [0]).chosen, ModelInput()),
        SequencePair(ModelInput(), build_pair([3], [0], [10]).rejected),
    ]
    assert [row.size for row in rows] == [3, 2]


# ---- configuration


def test_dpo_without_a_table_for_its_loss_is_the_dpo_loss_with_the_same_settings():
    config = DpoConfig(beta=0.3, label_smoothing=0.2)
    assert config.objective == DpoLoss(beta=0.3, label_smoothing=0.2)
    assert DpoConfig(loss=DpoLoss(beta=0.3, label_smoothing=0.2)).objective == config.objective
    assert config.as_recorded() == config.model_dump(mode="json", exclude={"loss"})
    assert config.describe() == "200 steps of 32 pairs"
    assert DpoConfig(loss=SimpoLoss()).describe() == "200 steps of 32 pairs, loss 'simpo'"
