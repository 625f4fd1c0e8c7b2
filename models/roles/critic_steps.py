"""The critic's optimizer steps of one iteration on one rank: the policy's passes, another loss.

Shapes: N completion tokens of one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch

from models.objectives.tally import Tally
from models.objectives.value_loss import explained_variance, fit_sums, value_loss
from models.roles.ranks import Ranks, sum_and_max
from models.roles.trainer import Trainer
from models.roles.update_steps import Beat, StepPasses


@dataclass(frozen=True, slots=True)
class ValueStepsTaken:
    """Statistics over all ranks; where they are not finite the critic is spoilt."""

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norms: tuple[float, ...]

    @property
    def finite(self) -> bool:
        """Whether every loss, value, return and gradient was finite."""
        return not self.sums["not_finite"] and all(map(isfinite, (*self.grad_norms, *self.sums.values())))

    @property
    def metrics(self) -> dict[str, float]:
        """What the iteration says of the critic; explained variance and error are those of its values before."""
        return {
            "value_loss": self.sums["loss"] / len(self.grad_norms),
            "value_clip_fraction": self.sums["clipped"] / self.sums["fit_tokens"],
            "explained_variance": explained_variance(self.sums),
            "critic_grad_norm": sum(self.grad_norms) / len(self.grad_norms),
            **self.maxima,
        }


def take_value_steps(
    trainer: Trainer, steps: Sequence[StepPasses], *, clip: float, ranks: Ranks, beat: Beat
) -> ValueStepsTaken:
    """Take the steps; stops at the first whose gradients are not finite, which all ranks see alike."""
    tally = Tally()
    norms: list[float] = []
    for step in steps:
        for number, batch in enumerate(step.batches):
            assert batch.values_N is not None and batch.returns_N is not None, "a critic learns from values and returns"
            old_N, returns_N, weights_N = (
                torch.from_numpy(array).to(ranks.device) for array in (batch.values_N, batch.returns_N, batch.weights_N)
            )
            terms = value_loss(trainer.forward(batch), old_N=old_N, returns_N=returns_N, clip=clip)
            shares_N = terms.loss_N * weights_N
            trainer.backward(shares_N.sum(), last=number + 1 == len(step.batches))
            tally.add({"loss": shares_N, "clipped": terms.clipped_N, "not_finite": ~torch.isfinite(shares_N)})
            tally.add(fit_sums(old_N, returns_N))
            tally.raise_to({"value_error_max": (returns_N - old_N).abs()})
            beat()
        norms.append(trainer.step(step.learning_rate))
        if not isfinite(norms[-1]):
            break
    sums, maxima = tally.packed()
    sum_and_max(sums, maxima)
    named_sums, named_maxima = tally.unpacked(sums, maxima)
    return ValueStepsTaken(sums=named_sums, maxima=named_maxima, grad_norms=tuple(norms))
