"""Every policy loss on real DeepSpeed ranks: the number of ranks and the micro-batch size do not change the update."""

from itertools import combinations

import numpy as np
import pytest

from rheostat.models.config.corrections import MaskedImportance, NoCorrection, SecondMoment, TruncatedImportance
from rheostat.models.config.divergence import KlPenalty, NoKl
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.objectives import EntropyBonus, UpdateConfig
from rheostat.models.config.policy_losses import ClipCov, ConstantMean, Dppo, KlCov, PpoClip, SequenceMean, TokenMean
from tests.support.losses import LOSSES, NAMES
from tests.support.processes import preload
from tests.support.update_workers import (
    Job,
    change,
    distance,
    gradients,
    load_trained,
    run_on_ranks,
    start_worker,
    update_work,
)

preload(__name__)

BASE = UpdateConfig(
    learning_rate=1e-3,
    minibatches=1,
    max_grad_norm=1e9,
    kl=KlPenalty(kind="k2"),
    # Against the behaviour's log-probs, so that tokens are clipped in the very first step.
    correction=NoCorrection(),
    stale_correction=MaskedImportance(low=0.9, high=1.1),
    max_staleness=2,
)
CLIP_COV = ClipCov(clip_low=0.05, clip_high=0.06, fraction=0.3, covariance_low=-9.0, covariance_high=9.0)
KL_COV = KlCov(fraction=0.3)
AGGREGATIONS = (
    TokenMean(),
    SequenceMean(),
    ConstantMean(length=30),
    SequenceMean(),
    TokenMean(),
    SequenceMean(),
    SequenceMean(),
    TokenMean(),
    TokenMean(),
)
CONFIGS = {
    name: change(BASE, loss=change(loss, clip_low=0.05, clip_high=0.06, aggregation=aggregation))
    for name, loss, aggregation in zip(NAMES, LOSSES, AGGREGATIONS, strict=True)
}
CONFIGS["dppo"] = change(BASE, loss=Dppo(threshold=1e-4))  # the random policy has small probabilities
BONUS = change(BASE, loss=PpoClip(clip_low=0.05, clip_high=0.06), entropy=EntropyBonus(coefficient=0.1))
CONFIGS |= {"entropy": BONUS} | {loss.kind: change(BASE, loss=loss) for loss in (CLIP_COV, KL_COV)}
SAMPLES = {"stalest": 3, "seed": 4, "group": 3}


@pytest.mark.system
def test_every_loss_gives_the_same_update_on_two_ranks_with_many_micro_batches_as_on_one_rank(uri, policy):
    work = update_work(uri, policy, **SAMPLES)
    jobs = {name: Job(change(config, microbatch_tokens=90), [work]) for name, config in CONFIGS.items()}
    many = {name: outcome for name, [outcome] in run_on_ranks(uri, jobs).items()}
    for name, found in many.items():
        alone = start_worker(uri, change(CONFIGS[name], microbatch_tokens=9999)).update(work)
        assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6), name
        np.testing.assert_allclose(gradients(uri, found), gradients(uri, alone), atol=1e-6, err_msg=name)
        assert all(alone.metrics[f"importance_{kind}"] > 0 for kind in ("masked", "weight_mean"))
        assert alone.metrics["too_stale_fraction"] == pytest.approx(0.25, abs=0.1)
        clipped = found.metrics["clip_fraction_low"] + found.metrics["clip_fraction_high"]
        assert clipped > 0.05 or name in ("policy_gradient", "sapo", "kl_cov", "vespo")
        assert found.metrics.get("selected_fraction", 0.3) == pytest.approx(0.3, abs=0.01)
    steps = {name: gradients(uri, found) for name, found in many.items() if name != "ppo_clip_dual"}  # as ppo_clip here
    assert not any(np.allclose(steps[one], steps[other]) for one, other in combinations(steps, 2))


@pytest.mark.system
def test_an_entropy_bonus_gives_the_same_update_with_sliced_sequences_sharded_weights_and_adapters(uri, policy):
    work = update_work(uri, policy, **SAMPLES)
    ways = {"slices": {"sequence_parallel": 2}, "sharded": {"zero_stage": 3}, "adapters": {"lora": LoraConfig(rank=4)}}
    jobs = {name: Job(change(BONUS, microbatch_tokens=90, **way), [work]) for name, way in ways.items()}
    for name, [found] in run_on_ranks(uri, jobs).items():
        alone = start_worker(uri, change(BONUS, lora=ways[name].get("lora"))).update(work)
        assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6), name
        assert alone.metrics["full_entropy"] > 5 and alone.metrics["entropy_coefficient"] == 0.1
        if name == "slices":
            np.testing.assert_allclose(gradients(uri, found), gradients(uri, alone), atol=1e-6)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("correction", [TruncatedImportance(cap=1.05), MaskedImportance(low=0.8, high=1.1)])
def test_importance_weights_compare_with_the_policy_before_the_first_step(uri, policy, correction):
    corrected = {"correction": correction, "stale_correction": None, "learning_rate": 1e-2}
    work = update_work(uri, policy, **SAMPLES)
    for name, config in CONFIGS.items():
        one, three = (
            start_worker(uri, change(config, **corrected, minibatches=steps)).update(work).metrics for steps in (1, 3)
        )
        assert three["kl_old"] > 1e-3 > one["kl_old"], name
        for quantity in ("weight_mean", "truncated", "masked"):
            assert three[f"importance_{quantity}"] == pytest.approx(one[f"importance_{quantity}"], rel=1e-5), name
        assert one[f"importance_{correction.kind}"] > 0.1


COMPARING = {
    "completions": {"correction": MaskedImportance(low=0.3, high=2, level="sequence"), "stale_correction": None},
    "stale completions": {
        "correction": NoCorrection(),
        "stale_correction": MaskedImportance(low=0.92, high=1.1, level="geometric"),
    },
    "second moment": {"correction": SecondMoment(max_moment=0.02), "stale_correction": None, "epochs": 2},
    "stale second moment": {
        "correction": SecondMoment(max_moment=0.015),
        "stale_correction": SecondMoment(max_moment=0.01),
    },
    "second moment and selected tokens": {
        "loss": CLIP_COV,
        "correction": SecondMoment(max_moment=0.02),
        "stale_correction": None,
    },
    "tokens of high entropy": {
        "correction": SecondMoment(max_moment=0.02),
        "stale_correction": None,
        "entropy": EntropyBonus(coefficient=0.1),
        "top_entropy": 0.3,
        "epochs": 2,
    },
    "completions and an entropy bonus": {
        "loss": KL_COV,
        "correction": MaskedImportance(low=0.3, high=2, level="sequence"),
        "stale_correction": None,
        "entropy": EntropyBonus(coefficient=0.1),
    },
}
"""Corrections and a mask with which the weight of a token depends on other tokens."""


@pytest.mark.system
def test_corrections_and_masks_that_compare_tokens_do_not_depend_on_ranks_slices_and_micro_batches(uri, policy):
    work = update_work(uri, policy, **SAMPLES)
    configs = {name: change(BASE, minibatches=2, **settings) for name, settings in COMPARING.items()}
    jobs = {name: Job(change(config, microbatch_tokens=90), [work]) for name, config in configs.items()}
    jobs |= {f"{name} in slices": Job(change(job.config, sequence_parallel=2), [work]) for name, job in jobs.items()}
    outcomes = run_on_ranks(uri, jobs)
    for name, config in configs.items():
        alone = start_worker(uri, change(config, microbatch_tokens=9999)).update(work)
        assert 0.05 < alone.metrics["importance_masked"] < 0.95, name
        masked = {"low_entropy_fraction": pytest.approx(0.7, abs=0.01)} if config.masks_low_entropy else {}
        assert {key: value for key, value in alone.metrics.items() if key == "low_entropy_fraction"} == masked, name
        for found in (outcomes[name][0], outcomes[f"{name} in slices"][0]):
            assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6), name
            moved = distance(load_trained(uri, alone.model), load_trained(uri, found.model))
            assert moved < 1e-3 * distance(load_trained(uri, alone.model), load_trained(uri, policy)), name


@pytest.mark.system
def test_a_mask_that_keeps_all_tokens_gives_the_update_without_a_mask(uri, policy):
    work = update_work(uri, policy, **SAMPLES)
    plain, whole, few, tiny = (
        start_worker(uri, change(BASE, kl=NoKl(), top_entropy=share)).update(work) for share in (None, 1.0, 0.5, 1e-9)
    )
    np.testing.assert_array_equal(gradients(uri, whole), gradients(uri, plain))
    assert whole.metrics == plain.metrics
    assert not np.allclose(gradients(uri, few), gradients(uri, plain), atol=1e-4)
    assert 1e-9 < np.abs(gradients(uri, tiny)).max() < np.abs(gradients(uri, few)).max(), "one token is left"
