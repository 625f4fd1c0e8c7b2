"""Tokens that losses select by the covariance of log-prob and advantage in a whole minibatch."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from rheostat.infra.store.storage import open_store
from rheostat.models.config.corrections import NoCorrection
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy_losses import ClipCov, KlCov, PolicyLoss, PpoClip
from rheostat.models.modeling.batching import plan_steps
from rheostat.models.objectives.policy_losses import policy_loss
from rheostat.models.objectives.selection import covariances, select_largest, select_randomly
from rheostat.models.training.samples import open_samples
from rheostat.models.training.selections import select_tokens
from rheostat.models.training.step_plans import build_batches
from tests.support.losses import doubles, evaluate_loss, move_policy, pass_tokens, random_tokens
from tests.support.training import write_samples

SELECTING = [ClipCov(fraction=0.2, covariance_low=0.0, covariance_high=99.0), KlCov(fraction=0.2)]
KINDS = [loss.kind for loss in SELECTING]
LOGPROBS = np.array([-1, -3, -2, -6, -0.5, -5.5], np.float32)  # mean -3
ADVANTAGES = np.array([2, -2, 0, 1, 0, -1], np.float32)  # mean 0
COVARIANCES = [4, 0, 0, -3, 0, 2.5]


def test_covariances_are_products_of_the_deviations_from_the_means_of_the_minibatch():
    assert covariances(LOGPROBS, ADVANTAGES).tolist() == pytest.approx(COVARIANCES)
    shifted = covariances(LOGPROBS + 7, ADVANTAGES - 2)
    assert shifted.tolist() == pytest.approx(COVARIANCES)
    assert shifted.mean() == pytest.approx(np.cov(LOGPROBS, ADVANTAGES, bias=True)[0, 1])


@pytest.mark.parametrize(("fraction", "places"), [(0.01, [0]), (0.35, [0, 5]), (0.5, [0, 1, 5]), (1.0, [*range(6)])])
def test_kl_cov_selects_the_tokens_of_largest_covariance_and_at_least_one(fraction, places):
    selected = select_largest(LOGPROBS, ADVANTAGES, config=KlCov(fraction=fraction), rng=Random(0))
    assert np.flatnonzero(selected).tolist() == places


def test_clip_cov_samples_only_tokens_with_a_covariance_between_its_bounds():
    config = ClipCov(fraction=0.4, covariance_low=-0.5, covariance_high=3.0)  # 2 of 6 tokens, out of four
    found = [
        np.flatnonzero(select_randomly(LOGPROBS, ADVANTAGES, config=config, rng=Random(seed))).tolist()
        for seed in (*range(100), 0)
    ]
    assert {len(places) for places in found} == {2}
    assert {place for places in found for place in places} == {1, 2, 4, 5}
    assert found[0] == found[-1]


def test_clip_cov_selects_fewer_tokens_if_too_few_have_a_high_covariance():
    few = ClipCov(fraction=1.0, covariance_low=2.0, covariance_high=5.0)
    assert np.flatnonzero(select_randomly(LOGPROBS, ADVANTAGES, config=few, rng=Random(0))).tolist() == [0, 5]
    assert not select_randomly(LOGPROBS, ADVANTAGES * 0, config=few, rng=Random(0)).any()


def test_bounds_of_the_covariance_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match="covariance_low is 6, but it must be less than covariance_high, which is 5"):
        ClipCov(covariance_low=6)


# ---- the losses


def test_clip_cov_is_ppo_clip_without_the_gradient_of_the_selected_tokens():
    tokens = random_tokens([5, 4], seed=0)
    selected_N = torch.tensor([True, False, True] * 3)
    config = {"correction": NoCorrection()}
    logprobs_N = move_policy(tokens, seed=0)
    _, plain, _ = evaluate_loss(logprobs_N, tokens, UpdateConfig(loss=PpoClip(), **config))
    _, found, sums = evaluate_loss(
        logprobs_N, replace(tokens, selected_N=selected_N), UpdateConfig(loss=ClipCov(), **config)
    )
    assert plain[selected_N].any()
    assert not found[selected_N].any()
    torch.testing.assert_close(found[~selected_N], plain[~selected_N])
    assert sums["selected_fraction"] == 6


@pytest.mark.parametrize(
    ("ratio", "is_selected", "loss", "gradient"),
    [
        (2.0, False, -2.0 * 3, -2.0 * 3),  # no clipping
        (2.0, True, -2.0 * 3 + 5 * 0.693147, -2.0 * 3 + 5),  # ln 2
        (0.5, True, -0.5 * 3 + 5 * 0.693147, -0.5 * 3 - 5),  # the penalty pulls back from both sides
        (1.0, True, -3.0, -3.0),  # and has no gradient at the old policy
    ],
)
def test_kl_cov_penalizes_the_change_of_the_selected_tokens(ratio, is_selected, loss, gradient):
    tokens = replace(pass_tokens([1], behaviour=[0.0], advantages=[3.0]), selected_N=torch.tensor([is_selected]))
    logprobs_N = doubles([ratio]).log().requires_grad_()
    terms = policy_loss(logprobs_N, doubles([0.0]), tokens=tokens, config=KlCov(coefficient=5.0))
    terms.loss_N.sum().backward()
    assert terms.loss_N.item() == pytest.approx(loss, rel=1e-6)
    assert logprobs_N.grad.item() == pytest.approx(gradient, rel=1e-6)


# ---- the whole minibatch


def list_pairs(logprobs: np.ndarray, advantages: np.ndarray) -> list[tuple[float, float]]:
    return list(zip(logprobs.tolist(), advantages.tolist(), strict=True))


def collect(samples, loss: PolicyLoss, *, ranks: int, budget: int, seed: int = 3, max_staleness: int | None = None):
    """Return the selected tokens of each minibatch, as pairs of behavior log-prob and advantage, and the number of
    tokens that may be selected."""
    plans = plan_steps(samples.sequences(None), minibatches=3, ranks=ranks, microbatch_tokens=budget, seed=1)
    config = UpdateConfig(loss=loss, max_staleness=max_staleness)
    selected = select_tokens(samples, plans, config=config, seed=seed)
    by_rank = [build_batches(samples, plans, config=config, rank=rank, selected=selected) for rank in range(ranks)]
    steps = [[batch for batches in by_rank for batch in batches[step]] for step in range(len(plans))]
    pairs = [
        sorted(pair for b in batches for pair in list_pairs(b.behavior_N[b.selected_N], b.advantages_N[b.selected_N]))
        for batches in steps
    ]
    return pairs, [sum(int((batch.weights_N != 0).sum()) for batch in batches) for batches in steps]


@pytest.mark.parametrize("loss", SELECTING, ids=KINDS)
def test_the_selection_depends_neither_on_ranks_nor_on_micro_batches(loss, tmp_path):
    store = str(tmp_path)
    samples = open_samples(open_store(store), [write_samples(store, prompts=9)])
    one, counts = collect(samples, loss, ranks=1, budget=9999)
    assert [len(pairs) for pairs in one] == [int(0.2 * count) for count in counts]
    for ranks, budget in ((1, 40), (2, 60), (3, 9999)):
        assert collect(samples, loss, ranks=ranks, budget=budget)[0] == one
    other, _ = collect(samples, loss, ranks=1, budget=9999, seed=4)
    assert (other == one) == (loss.kind == "kl_cov")  # only clip_cov is random


@pytest.mark.parametrize("loss", SELECTING, ids=KINDS)
def test_too_stale_tokens_are_not_selected_and_do_not_count(loss, tmp_path):
    store = str(tmp_path)
    samples = open_samples(open_store(store), [write_samples(store, prompts=9, stalest=3)])
    some, counts = collect(samples, loss, ranks=1, budget=9999, max_staleness=1)
    assert [len(pairs) for pairs in some] == [int(0.2 * count) for count in counts]
    fresh, advantages = (
        np.concatenate([np.array(row, np.float32) for row in samples.table[name].to_pylist()])
        for name in ("logprobs", "advantages")
    )
    ages = np.concatenate(samples.table["staleness"].to_pylist())
    recent = {*list_pairs(fresh[ages <= 1], advantages[ages <= 1])}
    assert {pair for pairs in some for pair in pairs} <= recent


def test_other_losses_select_nothing(tmp_path):
    store = str(tmp_path)
    samples = open_samples(open_store(store), [write_samples(store)])
    plans = plan_steps(samples.sequences(None), minibatches=2, ranks=1, microbatch_tokens=99, seed=1)
    assert select_tokens(samples, plans, config=UpdateConfig(), seed=0) is None
    assert all(b.selected_N is None for [b, *_] in build_batches(samples, plans, config=UpdateConfig(), rank=0))
