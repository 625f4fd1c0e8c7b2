"""The mask of tokens with low entropy (`update.top_entropy`), by hand and in comparison with TRL."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rheostat.models.config.corrections import NoCorrection
from rheostat.models.config.divergence import KlPenalty
from rheostat.models.config.objectives import EntropyBonus, UpdateConfig
from rheostat.models.objectives.loss_inputs import MetricSums
from rheostat.models.objectives.losses import update_loss
from rheostat.models.training import outliers
from rheostat.models.training.outliers import LowEntropy, find_low_entropy, top_quantile
from rheostat.models.training.ranks import Ranks
from tests.support.losses import LOSSES, NAMES, doubles, evaluate_loss, move_policy, random_tokens

ENTROPIES = [0.5, 0.1, 2.0, 0.0, 1.0]
MASKED_N = torch.tensor([False, True, False, False, True, False, False])


@pytest.mark.parametrize(
    ("fraction", "threshold"),
    [(1.0, 0.0), (0.75, 0.1), (0.5, 0.5), (0.25, 1.0), (0.2, 1.2), (0.1, 1.6)],  # sorted: 0, 0.1, 0.5, 1, 2
)
def test_the_threshold_is_a_quantile_with_linear_interpolation(fraction, threshold):
    assert top_quantile(np.array(ENTROPIES, np.float32), fraction) == pytest.approx(threshold)
    assert top_quantile(np.array(ENTROPIES[::-1], np.float32), fraction) == pytest.approx(threshold)


def find_masks(monkeypatch, entropies, weights, *, fraction: float) -> LowEntropy:
    """Return the masked tokens of the micro-batches of one rank."""
    monkeypatch.setattr(outliers, "broadcast_bytes", lambda data, ranks: data)
    return find_low_entropy(
        [SimpleNamespace(weights_N=np.array(each)) for each in weights],
        [torch.tensor(each) for each in entropies],
        fraction=fraction,
        ranks=Ranks(rank=0, world_size=1, device=torch.device("cpu")),
    )


def test_the_threshold_counts_the_trained_tokens_of_all_micro_batches(monkeypatch):
    # Trained: 0.5, 0.1, 2, 0 and 1. The quantile of 0.5 is the third of them, which is kept.
    entropies, weights = [[0.5, 9.0, 0.1], [2.0, 0.0, 1.0, 0.0]], [[0.2, 0.0, 0.2], [0.2, 0.2, 0.2, 0.0]]
    found = find_masks(monkeypatch, entropies, weights, fraction=0.5)
    assert found.threshold == pytest.approx(0.5)
    assert [mask_N.tolist() for mask_N in found.masks] == [[False, False, True], [False, True, False, False]]
    whole = find_masks(monkeypatch, entropies, weights, fraction=1.0)
    assert not torch.cat(whole.masks).any()


def test_a_minibatch_without_trained_tokens_masks_none(monkeypatch):
    found = find_masks(monkeypatch, [[1.0]], [[0.0]], fraction=0.5)
    assert found.threshold == 0 and not found.masks[0].any()


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")  # TRL takes seconds to import, and warns
@pytest.mark.parametrize("fraction", [1.0, 0.8, 0.5, 0.2, 0.013])
def test_the_kept_tokens_are_those_of_trl(monkeypatch, fraction):
    from trl import GRPOTrainer

    entropies_BT = torch.rand(5, 40, generator=torch.Generator().manual_seed(3))
    entropies_BT[:, ::3] = 0.25  # equal entropies
    is_trained_BT = torch.rand(5, 40, generator=torch.Generator().manual_seed(4)) < 0.7
    accelerator = SimpleNamespace(pad_across_processes=lambda local, **_: local, gather=lambda local: local)
    expected_BT = GRPOTrainer.get_high_entropy_mask(
        SimpleNamespace(accelerator=accelerator), entropies_BT, is_trained_BT, 1 - fraction
    )
    found = find_masks(monkeypatch, entropies_BT.tolist(), is_trained_BT.float().tolist(), fraction=fraction)
    assert torch.equal(torch.stack(found.masks), is_trained_BT & ~expected_BT)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_masked_tokens_have_no_policy_loss_and_the_others_keep_their_weight(loss):
    tokens, config = random_tokens([4, 3], seed=2), UpdateConfig(loss=loss, correction=NoCorrection())
    logprobs_N = move_policy(tokens, seed=2)
    others = replace(tokens, weights_N=tokens.weights_N.masked_fill(MASKED_N, 0))
    expected_value, expected_gradient, _ = evaluate_loss(logprobs_N, others, config)
    value, gradient, sums = evaluate_loss(logprobs_N, replace(tokens, low_entropy_N=MASKED_N), config)
    assert value == pytest.approx(expected_value)
    torch.testing.assert_close(gradient, expected_gradient)
    if loss.gradient_by_token:
        assert not gradient[MASKED_N].any()
    assert sums["low_entropy_fraction"] == 2 and sums["trained_tokens"] == 7
    none, _, _ = evaluate_loss(logprobs_N, replace(tokens, low_entropy_N=torch.zeros_like(MASKED_N)), config)
    assert none == evaluate_loss(logprobs_N, tokens, config)[0]


def test_the_kl_penalty_and_the_entropy_bonus_apply_to_masked_tokens():
    tokens = replace(random_tokens([4, 3], seed=2), low_entropy_N=torch.ones(7, dtype=torch.bool))
    logprobs_N, entropies_N = move_policy(tokens, seed=2), doubles([2.0] * 7).requires_grad_()
    config = UpdateConfig(kl=KlPenalty(kind="k2"), entropy=EntropyBonus(coefficient=0.1))
    update_loss(
        logprobs_N, tokens, config=config, kl_coefficient=0.5, entropies_N=entropies_N, tally=MetricSums()
    ).backward()
    torch.testing.assert_close(entropies_N.grad, -0.1 * tokens.weights_N)
    expected_N = 0.5 * (logprobs_N - tokens.reference_N) * tokens.weights_N  # of (log-ratio)² / 2
    torch.testing.assert_close(logprobs_N.grad, expected_N.detach())
