"""Optimizer steps of a text-to-image policy on finished pictures with new noise, and their metrics.

Shapes: N noised pictures of one micro-batch, D latents of a picture.
"""

from collections.abc import Sequence
from math import isfinite
from typing import cast

import torch
from torch import Tensor

from rheostat.infra.variants import implementation_of
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.objectives.forward_process import ForwardProcessLoss
from rheostat.models.objectives.loss_inputs import MetricSums
from rheostat.models.training.ranks import Ranks
from rheostat.models.training.samples import TrainingSamples, stale_shares
from rheostat.models.training.step_plans import StepBatches, first_epoch
from rheostat.models.training.trainer import Forward, Trainer
from rheostat.models.training.update_steps import OnProgress, StepStatistics


def take_forward_steps(
    trainer: Trainer,
    steps: Sequence[StepBatches],
    *,
    config: UpdateConfig,
    reference: Forward | None,
    kl_coefficient: float,
    ranks: Ranks,
    on_progress: OnProgress,
) -> StepStatistics:
    """Take the policy's optimizer steps, and return their statistics. Stop after the first step whose gradient norm is
    not finite. All ranks stop at the same step. Collective: every rank must call this.

    `reference` returns the errors of the pictures that the reference predicts, or is None if there is no KL penalty.
    """
    loss = cast(ForwardProcessLoss, implementation_of(config.loss))
    old = _predict_old(trainer, steps, on_progress)
    tally, norms = MetricSums(), list[float]()
    for index, step in enumerate(steps):
        for number, batch in enumerate(step.batches):
            advantages_N, weights_N = (
                torch.from_numpy(array).to(ranks.device) for array in (batch.advantages_N, batch.weights_N)
            )
            reference_ND = None if reference is None else reference(batch.microbatch)
            errors_ND = trainer.forward(batch.microbatch)
            if not index:
                old[step.minibatch].append(_copy_to_host(errors_ND))
            old_ND = old[step.minibatch][number].to(ranks.device)
            loss_N = loss(errors_ND, old_ND, advantages_N=advantages_N, config=config.loss)
            trained_N = weights_N != 0
            if reference_ND is not None:
                kl_N = trainer.divergence(reference_ND)
                loss_N = loss_N + kl_coefficient * kl_N
                tally.add({"kl": torch.where(trained_N, kl_N, 0.0)})
            shares_N = loss_N * weights_N
            trainer.backward(shares_N.sum(), last=number + 1 == len(step.batches))
            finite_N = torch.isfinite(shares_N) & torch.isfinite(advantages_N)
            change_N = torch.where(trained_N, trainer.divergence(old_ND).detach(), 0.0)
            tally.add({"loss": shares_N, "trained_tokens": trained_N, "not_finite": ~finite_N})
            tally.add({"velocity_change_mean": change_N})
            tally.raise_to({"velocity_change_max": change_N})
            on_progress()
        norms.append(trainer.step(step.learning_rate))
        if not isfinite(norms[-1]):
            break
    return StepStatistics.reduce_over_ranks(tally, norms, ranks)


def _predict_old(trainer: Trainer, steps: Sequence[StepBatches], on_progress: OnProgress) -> list[list[Tensor]]:
    """Return the errors of the pictures that the policy predicts before the update, in host memory, by minibatch and
    micro-batch. The list of the first minibatch is empty, because its optimizer step computes these errors."""
    old: list[list[Tensor]] = [[]]
    for step in first_epoch(steps)[1:]:
        old.append([])
        for batch in step.batches:
            with torch.no_grad():
                old[-1].append(_copy_to_host(trainer.forward(batch.microbatch)))
            on_progress()
    return old


def _copy_to_host(errors_ND: Tensor) -> Tensor:
    return errors_ND.detach().to("cpu", copy=True)


def forward_metrics(
    statistics: StepStatistics, samples: TrainingSamples, steps: Sequence[StepBatches], *, max_staleness: int | None
) -> dict[str, float]:
    """Return the metrics of the policy's update. Means are over the noised pictures that were trained on."""
    sums = dict(statistics.sums)
    del sums["not_finite"]
    num_trained = max(1.0, sums.pop("trained_tokens"))
    return {
        "loss": sums.pop("loss") / len(steps),
        **{name: total / num_trained for name, total in sums.items()},
        **statistics.maxima,
        **stale_shares(samples, max_staleness),
        "grad_norm_mean": sum(statistics.grad_norms) / len(steps),
        "grad_norm_max": max(statistics.grad_norms),
        "learning_rate": steps[-1].learning_rate,
    }
