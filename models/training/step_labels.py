"""Training of process reward models on solutions whose steps are labeled as right or wrong.

The loss of an optimizer step is the mean over all labeled steps of its solutions, so the contributions of all
micro-batches and ranks only need to be added. Shapes: N labeled steps of one micro-batch, O optimizer steps, Q reported
quantities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rheostat.models.config.process_models import TrainedProcessModel
from rheostat.models.modeling.batching import Rows, Sequences, plan_step
from rheostat.models.modeling.layout import lay_out
from rheostat.models.records.model_input import ModelInput
from rheostat.models.training.offline import (
    LAST_STEPS,
    TrainingCallbacks,
    TrainingResult,
    report_steps,
    sample_batches,
    take_step,
)
from rheostat.models.training.ranks import Ranks, sum_and_max
from rheostat.models.training.trainer import Trainer

LabeledInput = tuple[ModelInput, tuple[float, ...]]
"""Model input of a solution, whose completion tokens follow the ends of the steps, and the label of each step."""


@dataclass(frozen=True, slots=True)
class StepLabelTraining:
    """Labeled solutions and settings of the training of a process reward model. They are the same on every rank."""

    train: Sequence[LabeledInput]
    heldout: Sequence[LabeledInput]
    schedule: TrainedProcessModel
    """Number of steps, solutions per step, and the peak learning rate."""
    seed: int


def step_label_loss(logits_N: Tensor, labels_N: Tensor) -> Tensor:
    """Return the binary cross-entropy of each step, −y · log p − (1 − y) · log(1 − p), in which p = sigmoid(logit) is
    the predicted probability that the step is right, and y, from 0 to 1, is the label (arXiv 2312.08935, eq. 2; hard
    labels in arXiv 2305.20050, section 2.6). Shape (N,)."""
    return functional.binary_cross_entropy_with_logits(logits_N, labels_N, reduction="none")


def train_on_step_labels(
    trainer: Trainer,
    work: StepLabelTraining,
    *,
    microbatch_tokens: int,
    ranks: Ranks,
    callbacks: TrainingCallbacks,
) -> TrainingResult:
    """Train a process reward model for all steps, then measure its loss and accuracy on the held-out solutions. Raises
    Quarantined if a gradient norm is not finite. Collective: every rank must call this."""
    schedule, tallies = work.schedule, list[Tensor]()
    run = partial(_run, trainer, microbatch_tokens=microbatch_tokens, ranks=ranks, callbacks=callbacks)
    batches = sample_batches(work.train, steps=schedule.steps, batch_size=schedule.batch_size, seed=work.seed)
    for index, rows in enumerate(batches):
        tallies.append(run(rows, trains=True))
        take_step(trainer, index, schedule, where=f"step {index} on step labels")
        recent = torch.stack(tallies[-LAST_STEPS:])[:, 0]
        report_steps(recent, schedule.steps, done=index + 1, callbacks=callbacks, ranks=ranks)
    with torch.no_grad():
        sums_OQ = torch.stack([*tallies, run(work.heldout, trains=False)])
    sum_and_max(sums_OQ, torch.zeros(1, device=ranks.device), ranks)
    return _build_metrics(sums_OQ.cpu(), work)


def _run(
    trainer: Trainer,
    solutions: Sequence[LabeledInput],
    *,
    trains: bool,
    microbatch_tokens: int,
    ranks: Ranks,
    callbacks: TrainingCallbacks,
) -> Tensor:
    """Run this rank's forward passes on some solutions, and the backward passes if `trains` is set. Return the rank's
    contribution to the mean loss and to the share of steps whose label the model predicts. Collective: every rank must
    call this."""
    num_labels = sum(len(labels) for _, labels in solutions)
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    microbatches = _plan(solutions, microbatch_tokens=microbatch_tokens, ranks=ranks)
    for number, rows in enumerate(microbatches):
        logits_N = trainer.forward(lay_out([solutions[row][0] for row in rows]))
        labels_N = torch.tensor([label for row in rows for label in solutions[row][1]], device=logits_N.device)
        loss_N = step_label_loss(logits_N, labels_N)
        if trains:
            trainer.backward(loss_N.sum() / num_labels, last=number + 1 == len(microbatches))
        right_N = (logits_N > 0) == (labels_N > 0.5)
        total += torch.stack([loss_N.detach().double().sum(), right_N.double().sum()]) / num_labels
        callbacks.on_progress()
    return total


def _plan(solutions: Sequence[LabeledInput], *, microbatch_tokens: int, ranks: Ranks) -> tuple[Rows, ...]:
    sizes = Sequences.unrelated([len(model_input) for model_input, _ in solutions])
    rows, ways = tuple(range(len(solutions))), ranks.data_parallel_size
    return plan_step(rows, sizes, ranks=ways, microbatch_tokens=microbatch_tokens).microbatches[
        ranks.data_parallel_rank
    ]


def _build_metrics(sums_OQ: Tensor, work: StepLabelTraining) -> TrainingResult:
    """Build the training result from means over all ranks. `sums_OQ` has the columns loss and accuracy, one row for
    each optimizer step, and a last row for the held-out solutions."""
    losses, _ = sums_OQ[:-1].T.tolist()
    loss, accuracy = sums_OQ[:-1][-LAST_STEPS:].mean(0).tolist()
    heldout_loss, heldout_accuracy = sums_OQ[-1].tolist()
    labels = [label for _, each in work.heldout for label in each]
    metrics = {
        "loss_first": losses[0],
        "loss_last": loss,
        "accuracy": accuracy,
        "heldout_loss": heldout_loss,
        "heldout_accuracy": heldout_accuracy,
        "heldout_right": sum(label > 0.5 for label in labels) / len(labels),
        "steps": float(work.schedule.steps),
        "samples": float(work.schedule.steps * work.schedule.batch_size),
        "solutions": float(len(work.train)),
        "heldout_solutions": float(len(work.heldout)),
        "labels": float(sum(len(each) for _, each in work.train)),
        "heldout_labels": float(len(labels)),
    }
    return TrainingResult(metrics=metrics, losses=losses)
