"""The critic's optimizer steps of one iteration on one rank: the policy's passes, another loss.

Shapes: N completion tokens of one pass.
"""

from collections.abc import Sequence
from math import isfinite

import torch

from models.objectives.metrics import MetricSums
from models.objectives.value_loss import explained_variance, fit_sums, value_loss
from models.training.policy_update import Beat, StepPasses, StepsTaken
from models.training.ranks import Ranks
from models.training.trainer import Trainer


def take_value_steps(
    trainer: Trainer, steps: Sequence[StepPasses], *, clip: float, ranks: Ranks, beat: Beat
) -> StepsTaken:
    """Take the steps; stops at the first whose gradients are not finite, which all ranks see alike."""
    tally = MetricSums()
    norms: list[float] = []
    for step in steps:
        for number, batch in enumerate(step.batches):
            assert batch.values_N is not None and batch.returns_N is not None, "a critic learns from values and returns"
            old_N, returns_N, weights_N = (
                torch.from_numpy(array).to(ranks.device) for array in (batch.values_N, batch.returns_N, batch.weights_N)
            )
            terms = value_loss(trainer.forward(batch.reads), old_N=old_N, returns_N=returns_N, clip=clip)
            shares_N = terms.loss_N * weights_N
            trainer.backward(shares_N.sum(), last=number + 1 == len(step.batches))
            tally.add({"loss": shares_N, "clipped": terms.clipped_N, "not_finite": ~torch.isfinite(shares_N)})
            tally.add(fit_sums(old_N, returns_N))
            tally.raise_to({"value_error_max": (returns_N - old_N).abs()})
            beat()
        norms.append(trainer.step(step.learning_rate))
        if not isfinite(norms[-1]):
            break
    return StepsTaken.over_ranks(tally, norms, ranks)


def value_metrics(taken: StepsTaken) -> dict[str, float]:
    """What an iteration says of the critic; explained variance and error are those of its values before."""
    return {
        "value_loss": taken.sums["loss"] / len(taken.grad_norms),
        "value_clip_fraction": taken.sums["clipped"] / taken.sums["fit_tokens"],
        "explained_variance": explained_variance(taken.sums),
        "critic_grad_norm": sum(taken.grad_norms) / len(taken.grad_norms),
        **taken.maxima,
    }
