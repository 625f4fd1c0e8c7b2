"""Optimizer steps of one iteration on one rank: extra log-probs, loss inputs, steps of policy and critic, metrics.

The critic trains on the same micro-batches as the policy, with another loss. Shapes: N completion tokens of one
micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Final, Self

import numpy as np
import torch
from torch import Tensor

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.teachers import Distillation
from rheostat.models.modeling.head import LossGradient
from rheostat.models.modeling.layout import TrainingBatch
from rheostat.models.objectives.loss_inputs import LossInputs, MetricSums
from rheostat.models.objectives.losses import (
    explained_variance,
    fit_sums,
    summarize_behavior,
    tally_behavior,
    tally_mismatch,
    update_loss,
    value_loss,
)
from rheostat.models.objectives.top_k import compute_top_k_divergence
from rheostat.models.training.outliers import LowEntropy, find_low_entropy, find_outliers
from rheostat.models.training.ranks import Ranks, sum_and_max
from rheostat.models.training.routers import RouterTally
from rheostat.models.training.samples import TrainingSamples, stale_shares
from rheostat.models.training.step_plans import StepBatches, first_epoch
from rheostat.models.training.trainer import Forward, Trainer

_STEP_PREFIX: Final = "denoising_step_"
"""Prefix of metric names that refer to one denoising step, such as "denoising_step_3"."""

OnProgress = Callable[[], None]
"""Callback without arguments that is called after every forward pass, so that a stuck process is noticed."""


@dataclass(frozen=True, slots=True)
class ExtraLogprobs:
    """Log-probs of completion tokens under the policy before the update (old) and under the reference. Both are indexed
    by minibatch, then by micro-batch."""

    old: list[list[Tensor | None]]
    reference: list[list[Tensor | None]]
    outliers: list[list[Tensor]] | None = None
    """Whether the correction `second_moment` masks each token, indexed like `old`. None if it masks no tokens."""
    low_entropy: list[LowEntropy] | None = None
    """Tokens that `update.top_entropy` masks, by minibatch. None if it masks no tokens."""
    means: Forward | None = None
    """Function that returns the reference's mean of the next state at each denoising step, or None unless the policy
    generates images. The means are as large as the images' states, so they are computed per micro-batch and not kept.
    """
    distillation: Distillation | None = None
    """Settings of the divergence from a teacher in the loss, whose log-probs are in the samples. None if there is no
    teacher."""


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """Statistics of an iteration's optimizer steps, over all ranks. If a value is not finite, the weights are
    unusable."""

    sums: dict[str, float]
    maxima: dict[str, float]
    grad_norms: tuple[float, ...]
    router: Mapping[str, float] = field(default_factory=dict)
    """Metrics of how evenly tokens are distributed over experts, for all micro-batches. Empty for policies without
    experts."""

    @property
    def is_finite(self) -> bool:
        """Whether all losses, gradients and inputs of the loss were finite."""
        return not self.sums["not_finite"] and all(map(isfinite, (*self.grad_norms, *self.sums.values())))

    @classmethod
    def reduce_over_ranks(cls, tally: MetricSums, grad_norms: Sequence[float], ranks: Ranks) -> Self:
        """Build the statistics of all ranks from the sums and maxima of each rank. Collective: every rank must call
        this with the same metric names."""
        sums, maxima = tally.packed()
        sum_and_max(sums, maxima, ranks)
        named_sums, named_maxima = tally.unpacked(sums, maxima)
        return cls(sums=named_sums, maxima=named_maxima, grad_norms=tuple(grad_norms))


def compute_extra_logprobs(
    trainer: Trainer,
    steps: Sequence[StepBatches],
    *,
    config: UpdateConfig,
    ranks: Ranks,
    reference: Forward | None,
    on_progress: OnProgress,
) -> ExtraLogprobs:
    """Compute the old log-probs of all minibatches except the first, and the reference's log-probs of all minibatches.
    If tokens are masked by a comparison within their minibatch, also compute the old log-probs of the first minibatch,
    and the masks of all minibatches.

    Must be called before the first optimizer step. Collective: every rank must call this.
    """
    old: list[list[Tensor | None]] = []
    reference_logprobs: list[list[Tensor | None]] = []
    low_entropy: list[LowEntropy] = []
    for index, step in enumerate(first_epoch(steps)):
        old.append([None] * len(step.batches))
        reference_logprobs.append([None] * len(step.batches))
        entropies: list[Tensor] = []
        for number, batch in enumerate(step.batches):
            needs_old = step.computes_old and (index > 0 or config.masks_outliers)
            if needs_old or config.masks_low_entropy:
                with torch.no_grad():
                    outputs = trainer.forward(batch.microbatch, with_entropy=config.masks_low_entropy)
                logprobs_N = outputs
                if config.masks_low_entropy:
                    logprobs_N, entropies_N = outputs.unbind(-1)
                    entropies.append(entropies_N)
                if step.computes_old:
                    old[-1][number] = logprobs_N
                on_progress()
            if reference is not None:
                reference_logprobs[-1][number] = reference(batch.microbatch)
                on_progress()
        if config.top_entropy is not None and config.masks_low_entropy:
            low_entropy.append(find_low_entropy(step.batches, entropies, fraction=config.top_entropy, ranks=ranks))
    extras = ExtraLogprobs(
        old=old, reference=reference_logprobs, low_entropy=low_entropy if config.masks_low_entropy else None
    )
    if not config.masks_outliers or not all(step.computes_old for step in steps):
        return extras
    minibatches = zip(first_epoch(steps), old, strict=True)
    outliers = [
        find_outliers(step.batches, [old_N for old_N in each if old_N is not None], config=config, ranks=ranks)
        for step, each in minibatches
    ]
    return replace(extras, outliers=outliers)


def take_steps(
    trainer: Trainer,
    steps: Sequence[StepBatches],
    extras: ExtraLogprobs,
    *,
    config: UpdateConfig,
    kl_coefficient: float,
    ranks: Ranks,
    on_progress: OnProgress,
) -> StepStatistics:
    """Take the policy's optimizer steps, and return their statistics. Stop after the first step whose gradient norm is
    not finite. All ranks stop at the same step. Collective: every rank must call this."""
    tally, routers = MetricSums(), RouterTally(trainer, coefficient=config.router_loss, ranks=ranks)
    norms: list[float] = []
    epoch = len(first_epoch(steps))
    for index, step in enumerate(steps):
        routers.begin_step([batch.microbatch for batch in step.batches], on_progress)
        old, reference = extras.old[step.minibatch], extras.reference[step.minibatch]
        for number, batch in enumerate(step.batches):
            tokens = _on_device(batch, old=old[number], reference=reference[number], device=ranks.device)
            means_ND = None if extras.means is None else extras.means(batch.microbatch)
            if index and old[number] is None:
                tokens = replace(tokens, old_N=tokens.behavior_N)
            if extras.outliers is not None:
                tokens = replace(tokens, outlier_N=extras.outliers[step.minibatch][number])
            if extras.low_entropy is not None:
                low_entropy = extras.low_entropy[step.minibatch]
                tokens = replace(tokens, low_entropy_N=low_entropy.masks[number])
                tally.add({"entropy_threshold": (tokens.weights_N != 0) * low_entropy.threshold})
            logprobs_N, entropies_N, tokens = _run_policy(
                trainer, batch, tokens, extras, config=config, kl_coefficient=kl_coefficient, device=ranks.device
            )
            if means_ND is not None:
                tokens = replace(tokens, kl_N=trainer.divergence(means_ND))
            before_N = logprobs_N.detach() if not index and old[number] is None else old[number]
            if before_N is not None and index < epoch:
                tally_mismatch(before_N, tokens, has_same_weights=not step.is_replayed, tally=tally)
                tally_behavior(before_N, tokens, tally=tally)
            _tally_steps(
                trainer, batch, logprobs_N.detach() - (tokens.behavior_N if before_N is None else before_N), tally
            )
            if step.computes_old:
                old[number] = before_N  # log-probs of the first step, reused in later epochs
            loss = update_loss(
                logprobs_N,
                tokens,
                config=config,
                kl_coefficient=kl_coefficient,
                entropies_N=entropies_N,
                tally=tally,
            )
            loss = loss + routers.loss()
            trainer.backward(loss, last=number + 1 == len(step.batches))
            on_progress()
        norms.append(trainer.step(step.learning_rate))
        if not isfinite(norms[-1]):
            break
    return replace(StepStatistics.reduce_over_ranks(tally, norms, ranks), router=routers.metrics(len(norms)))


def _run_policy(
    trainer: Trainer,
    batch: TrainingBatch,
    tokens: LossInputs,
    extras: ExtraLogprobs,
    *,
    config: UpdateConfig,
    kl_coefficient: float,
    device: torch.device,
) -> tuple[Tensor, Tensor | None, LossInputs]:
    """Run a forward pass. Return the log-probs of the completion tokens, the entropies if the loss has an entropy bonus
    (else None), and the inputs of the loss. With `top_k` of a distillation, the inputs contain the divergence from the
    teacher over its most probable tokens. Collective: every rank must call this."""
    if extras.distillation is None or extras.distillation.top_k is None:
        outputs = trainer.forward(
            batch.microbatch,
            loss_gradient=build_loss_gradient(tokens, config=config, kl_coefficient=kl_coefficient),
            with_entropy=config.entropy is not None,
        )
        logprobs_N, entropies_N = (outputs, None) if config.entropy is None else outputs.unbind(-1)
        return logprobs_N, entropies_N, tokens
    candidates_NK = torch.from_numpy(batch.top_ids_NK).to(device, torch.int64)
    logprobs_NS = trainer.forward(batch.microbatch, candidates_NK=candidates_NK)
    divergence_N = compute_top_k_divergence(
        logprobs_NS[:, 1:],
        torch.from_numpy(batch.top_logprobs_NK).to(device),
        direction=extras.distillation.top_k.direction,
    )
    tokens = replace(tokens, teacher_N=divergence_N, teacher_coefficient=extras.distillation.coefficient)
    return logprobs_NS[:, 0], None, tokens


def build_loss_gradient(tokens: LossInputs, *, config: UpdateConfig, kl_coefficient: float) -> LossGradient | None:
    """Return the function for the gradient of the loss with respect to each token's log-prob. Return None if the loss
    or an importance correction compares log-probs of different tokens, or if the loss has an entropy bonus."""
    compares_sequences = any(correction.compares_sequences for correction in config.corrections)
    if compares_sequences or not config.loss.gradient_by_token or config.entropy is not None:
        return None

    def loss_gradient(logprobs_C: Tensor, places_C: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf_C, some = logprobs_C.detach().requires_grad_(), tokens.at(places_C)
            loss = update_loss(leaf_C, some, config=config, kl_coefficient=kl_coefficient, tally=MetricSums())
        return torch.autograd.grad(loss, leaf_C)[0]

    return loss_gradient


def _tally_steps(trainer: Trainer, batch: TrainingBatch, log_ratio_N: Tensor, tally: MetricSums) -> None:
    """Add the log-ratios of a micro-batch to the sums in `tally`, separately for each denoising step, because they
    depend on the noise level."""
    steps_N = torch.from_numpy(batch.microbatch.targets_N).to(log_ratio_N.device)
    for step in trainer.denoising_steps:
        at_N = steps_N == step
        ratios_N = torch.where(at_N, log_ratio_N, 0.0)
        tally.add(
            {
                f"{_STEP_PREFIX}{step}": at_N,
                f"{_STEP_PREFIX}{step}_sum": ratios_N,
                f"{_STEP_PREFIX}{step}_square": ratios_N.square(),
            }
        )


def compute_step_ratios(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the mean and standard deviation of the log-ratio between new and old policy at each trained denoising
    step, computed from `sums`, the sums of `take_steps`.

    At steps with little noise the mean drifts below 0, so that clipping takes effect on one side only (GRPO-Guard,
    arXiv 2510.22319).
    """
    ratios: dict[str, float] = {}
    for name, count in sums.items():
        if count and name.removeprefix(_STEP_PREFIX).isdigit():
            mean, square = (sums[f"{name}_{part}"] / count for part in ("sum", "square"))
            step = name.removeprefix(_STEP_PREFIX)
            ratios |= {
                f"log_ratio_mean_step_{step}": mean,
                f"log_ratio_std_step_{step}": max(0.0, square - mean**2) ** 0.5,
            }
    return ratios


def _on_device(
    batch: TrainingBatch, *, old: Tensor | None, reference: Tensor | None, device: torch.device
) -> LossInputs:
    lengths_B = np.bincount(batch.microbatch.rows_N, minlength=len(batch.microbatch.tokens_BT))
    return LossInputs(
        behavior_N=torch.from_numpy(batch.behavior_N).to(device),
        advantages_N=torch.from_numpy(batch.advantages_N).to(device),
        staleness_N=torch.from_numpy(batch.staleness_N).to(device),
        weights_N=torch.from_numpy(batch.weights_N).to(device),
        rows_N=torch.from_numpy(batch.microbatch.rows_N).to(device),
        lengths_B=torch.from_numpy(lengths_B).to(device),
        old_N=old,
        reference_N=reference,
        selected_N=None if batch.selected_N is None else torch.from_numpy(batch.selected_N).to(device),
        positive_weights_N=(
            None if batch.positive_weights_N is None else torch.from_numpy(batch.positive_weights_N).to(device)
        ),
    )


def take_value_steps(
    trainer: Trainer, steps: Sequence[StepBatches], *, clip: float, ranks: Ranks, on_progress: OnProgress
) -> StepStatistics:
    """Take the critic's optimizer steps, and return their statistics. Stop after the first step whose gradient norm is
    not finite. `clip` limits how far a value may move from the value before the update. All ranks stop at the same
    step. Collective: every rank must call this."""
    tally = MetricSums()
    norms: list[float] = []
    for step in steps:
        for number, batch in enumerate(step.batches):
            assert batch.values_N is not None and batch.returns_N is not None, "a critic trains on values and returns"
            old_N, returns_N, weights_N = (
                torch.from_numpy(array).to(ranks.device) for array in (batch.values_N, batch.returns_N, batch.weights_N)
            )
            terms = value_loss(trainer.forward(batch.microbatch), old_N=old_N, returns_N=returns_N, clip=clip)
            shares_N = terms.loss_N * weights_N
            trainer.backward(shares_N.sum(), last=number + 1 == len(step.batches))
            tally.add({"loss": shares_N, "clipped": terms.clipped_N, "not_finite": ~torch.isfinite(shares_N)})
            tally.add(fit_sums(old_N, returns_N))
            tally.raise_to({"value_error_max": (returns_N - old_N).abs()})
            on_progress()
        norms.append(trainer.step(step.learning_rate))
        if not isfinite(norms[-1]):
            break
    return StepStatistics.reduce_over_ranks(tally, norms, ranks)


def value_metrics(statistics: StepStatistics) -> dict[str, float]:
    """Return the metrics of the critic's update: losses, gradient norms, and the explained variance and error of the
    values that the critic predicted before the update."""
    return {
        "value_loss": statistics.sums["loss"] / len(statistics.grad_norms),
        "value_clip_fraction": statistics.sums["clipped"] / statistics.sums["fit_tokens"],
        "explained_variance": explained_variance(statistics.sums),
        "critic_grad_norm": sum(statistics.grad_norms) / len(statistics.grad_norms),
        **statistics.maxima,
    }


def update_metrics(
    statistics: StepStatistics, samples: TrainingSamples, steps: Sequence[StepBatches], *, max_staleness: int | None
) -> dict[str, float]:
    """Return the metrics of the policy's update, such as losses, ratios, entropy and gradient norms. Means are over the
    tokens that were trained on, without tokens that are more than `max_staleness` versions old. Mismatch metrics are
    over the tokens that have log-probs from both engine and trainer. The two shares of stale tokens are over all tokens
    of the iteration."""
    sums, maxima = dict(statistics.sums), dict(statistics.maxima)
    del sums["not_finite"]
    num_tokens, num_compared = sums.pop("trained_tokens"), sums.pop("mismatch_tokens")
    metrics = {"loss": sums.pop("loss") / len(steps), "mismatch_tokens": num_compared}
    metrics |= compute_step_ratios(sums) | summarize_behavior(
        {name: sums.pop(name) for name in [*sums] if name.startswith("behavior")}
    )
    if "positive_nll" in sums:
        metrics["positive_nll"] = sums.pop("positive_nll") / max(1.0, sums["positive_fraction"])
    for name, total in sums.items():
        if name.startswith(_STEP_PREFIX):
            continue
        metrics[name] = total / max(1.0, num_compared if name.startswith("mismatch") else num_tokens)
    return (
        metrics
        | stale_shares(samples, max_staleness)
        | maxima
        | {**statistics.router}
        | {
            "grad_norm_mean": sum(statistics.grad_norms) / len(steps),
            "grad_norm_max": max(statistics.grad_norms),
            "learning_rate": steps[-1].learning_rate,
        }
    )
