"""Divergences over the teacher's most probable tokens: values worked by hand, equality with TRL, and gradients."""

from math import inf, log

import pytest
import torch
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.sdpo.loss_utils import add_tail_bucket, compute_divergence

from rheostat.models.objectives.top_k import MIN_LOGPROB, compute_top_k_divergence

TRL_BETA = {"reverse": 1, "forward": 0}
DIRECTIONS = [*TRL_BETA]


def logits(seed: int = 0, tokens: int = 5, vocab: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random logits of a policy and a teacher."""
    return 2 * torch.randn(2, tokens, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def divergence(policy_NV, teacher_NV, k: int, direction):
    teacher_NK, ids_NK = teacher_NV.log_softmax(-1).topk(k)
    return compute_top_k_divergence(policy_NV.log_softmax(-1).gather(-1, ids_NK), teacher_NK, direction=direction)


def test_the_divergence_counts_all_other_tokens_as_one():
    policy, teacher = torch.tensor([[0.5, 0.25]]), torch.tensor([[0.4, 0.4]])  # the rests are 0.25 and 0.2
    reverse = 0.5 * log(0.5 / 0.4) + 0.25 * log(0.25 / 0.4) + 0.25 * log(0.25 / 0.2)
    forward = 0.4 * log(0.4 / 0.5) + 0.4 * log(0.4 / 0.25) + 0.2 * log(0.2 / 0.25)
    for direction, expected in (("reverse", reverse), ("forward", forward)):
        found = compute_top_k_divergence(policy.log(), teacher.log(), direction=direction)
        assert found.tolist() == pytest.approx([expected], rel=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_over_the_whole_vocabulary_value_and_gradient_are_those_of_trl(direction):
    policy_NV, teacher_NV = logits()
    gradients = []
    ours = lambda leaf: divergence(leaf, teacher_NV, 11, direction).sum() / 5  # noqa: E731
    trl = lambda leaf: GKDTrainer.generalized_jsd_loss(  # noqa: E731
        leaf[None], teacher_NV[None], labels=torch.ones(1, 5, dtype=torch.int64), beta=TRL_BETA[direction]
    )
    values = []
    for loss in (ours, trl):
        leaf = policy_NV.clone().requires_grad_()
        values.append(loss(leaf))
        gradients.append(torch.autograd.grad(values[-1], leaf)[0])
    assert values[0].item() == pytest.approx(values[1].item(), rel=1e-6)
    assert values[0] > 0.1
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("k", [1, 4])
def test_with_fewer_tokens_the_divergence_is_that_of_trl_with_its_tail_bucket(direction, k):
    policy_NV, teacher_NV = logits(seed=1)
    teacher_NK, ids_NK = teacher_NV.log_softmax(-1).topk(k)
    policy_NK = policy_NV.log_softmax(-1).gather(-1, ids_NK)
    expected = compute_divergence(add_tail_bucket(policy_NK), add_tail_bucket(teacher_NK), TRL_BETA[direction])
    torch.testing.assert_close(divergence(policy_NV, teacher_NV, k, direction), expected)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_tokens_never_lower_the_divergence(direction):
    policy_NV, teacher_NV = logits(seed=2)
    values_KN = torch.stack([divergence(policy_NV, teacher_NV, k, direction) for k in range(1, 12)])
    assert (values_KN.diff(dim=0) > -1e-6).all()
    assert (values_KN >= 0).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_distributions_have_no_divergence_and_no_gradient(direction):
    policy_NV, _ = logits(seed=3)
    leaf = policy_NV.clone().requires_grad_()
    value = divergence(leaf, policy_NV, 4, direction).sum()
    [gradient] = torch.autograd.grad(value, leaf)
    assert value.item() == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_token_that_the_policy_cannot_generate_gives_a_finite_divergence_and_gradient(direction):
    policy_NK = torch.tensor([[log(0.6), -inf]], requires_grad=True)
    found = compute_top_k_divergence(policy_NK, torch.tensor([[0.5, 0.3]]).log(), direction=direction)
    [gradient] = torch.autograd.grad(found.sum(), policy_NK)
    assert 0 < found.item() < -MIN_LOGPROB
    assert torch.isfinite(gradient).all()
    assert gradient[0, 1] == 0
