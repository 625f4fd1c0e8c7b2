"""Every policy loss on real DeepSpeed ranks: how many there are, and how large their passes, changes nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch

from models.config.objectives import (
    ConstantMean,
    KlPenalty,
    MaskedImportance,
    NoCorrection,
    SequenceMean,
    TokenMean,
    TruncatedImportance,
    UpdateConfig,
)
from models.modeling import head
from models.records.versions import ModelVersion, Outcome
from tests.support.losses import LOSSES, NAMES
from tests.support.processes import preload
from tests.support.training import publish_scratch
from tests.support.update_workers import gradients, read, start, together, work

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
AGGREGATIONS = (TokenMean(), SequenceMean(), ConstantMean(length=30), SequenceMean(), TokenMean())
CONFIGS = [
    BASE.model_copy(update={"loss": loss.model_copy(update={"clip_low": 0.05, "clip_high": 0.06, "aggregation": how})})
    for loss, how in zip(LOSSES, AGGREGATIONS, strict=True)
]
SAMPLES = {"stalest": 3, "seed": 4, "group": 3}


def take_each(rank: int, ranks: int, port: int, uri: str, policy: ModelVersion) -> None:
    """Update the same policy by one loss after another, few logits at a time; rank 0 notes the outcomes."""
    found = []
    head.elements_on = lambda device: 7 * 354
    for config in CONFIGS:
        small = config.model_copy(update={"microbatch_tokens": 90})
        found.append(start(uri, small, rank=rank, ranks=ranks, port=port).update(work(uri, policy, **SAMPLES)))
    torch.save(found, Path(uri, f"each-{rank}.pt"))


def test_two_ranks_and_many_passes_learn_by_every_loss_what_one_rank_does_in_one_pass(tmp_path):
    uri = str(tmp_path)
    policy = publish_scratch(f"{uri}/run", tmp_path / "scratch")
    together(take_each, uri, policy)
    many: list[Outcome] = read(uri, "each")
    for name, config, found in zip(NAMES, CONFIGS, many, strict=True):
        alone = start(uri, config.model_copy(update={"microbatch_tokens": 9999})).update(work(uri, policy, **SAMPLES))
        assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6), name
        np.testing.assert_allclose(gradients(uri, found), gradients(uri, alone), atol=1e-6, err_msg=name)
        assert all(alone.metrics[f"importance_{kind}"] > 0 for kind in ("masked", "weight_mean"))
        assert alone.metrics["too_stale_fraction"] == pytest.approx(0.25, abs=0.1)
    steps = [gradients(uri, found) for found in many]
    dual = NAMES.index("ppo_clip_dual")  # no ratio is so large here that it would differ
    assert not any(np.allclose(one, other) for i, one in enumerate(steps) for other in steps[:i] if i != dual)
    assert all(found.metrics["clip_fraction_low"] + found.metrics["clip_fraction_high"] > 0.05 for found in many[:4])


@pytest.mark.parametrize("correction", [TruncatedImportance(cap=1.05), MaskedImportance(low=0.8, high=1.1)])
def test_weights_are_those_of_the_policy_before_the_first_step_however_many_steps_follow(tmp_path, correction):
    uri = str(tmp_path)
    policy = publish_scratch(f"{uri}/run", tmp_path / "scratch")
    corrected = {"correction": correction, "stale_correction": None, "learning_rate": 1e-2}
    for name, config in zip(NAMES, CONFIGS, strict=True):
        one, three = (
            start(uri, config.model_copy(update=corrected | {"minibatches": steps})).update(
                work(uri, policy, **SAMPLES)
            )
            for steps in (1, 3)
        )
        assert three.metrics["kl_old"] > 1e-3 > one.metrics["kl_old"], name
        for quantity in ("weight_mean", "truncated", "masked"):
            key = f"importance_{quantity}"
            assert three.metrics[key] == pytest.approx(one.metrics[key], rel=1e-5), name
        assert one.metrics[f"importance_{correction.kind}"] > 0.1
