"""Supervised fine-tuning (SFT) of a model on encoded examples: worked answers, whole chats, or captioned images.

Shapes: N completion tokens of one micro-batch, C completion tokens of a chunk of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rheostat.infra.errors import BadInput
from rheostat.models.config.texts import TextRules
from rheostat.models.config.training import SupervisedWarmup, TrainedTurns
from rheostat.models.data.examples import Example
from rheostat.models.data.training_chats import TrainingRow
from rheostat.models.engines.requests import generation_settings, stated_ends
from rheostat.models.modeling.batching import Rows, Sequences, fill_microbatches, pack_groups, plan_step
from rheostat.models.modeling.head import LossGradient
from rheostat.models.modeling.layout import MicroBatch, lay_out
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.sequences import example_inputs
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.text.training_rows import encode_rows
from rheostat.models.training.offline import LAST_STEPS, TrainingCallbacks, TrainingResult, report_steps, take_step
from rheostat.models.training.ranks import Ranks, sum_and_max
from rheostat.models.training.trainer import Trainer
from rheostat.models.vision.processor import VisionProcessor, load_processor


@dataclass(frozen=True, slots=True)
class SupervisedData:
    """Encoded examples for supervised fine-tuning. They are the same on every rank."""

    steps: Sequence[Sequence[ModelInput]]
    """Model inputs of each optimizer step."""
    heldout: Sequence[ModelInput] = ()
    """Model inputs on which the loss is measured before and after training."""
    is_packed: bool = False
    """Whether sequences of different lengths are concatenated in one row of a forward pass, without padding."""

    @staticmethod
    def split(inputs: Sequence[ModelInput], warmup: SupervisedWarmup) -> "SupervisedData":
        """Return the data for fine-tuning on `inputs`, which are in the order of training, with `warmup.batch_size` of
        them per optimizer step."""
        size = warmup.batch_size
        return SupervisedData([inputs[step * size : (step + 1) * size] for step in range(warmup.steps)])


class TrainedForward(Protocol):
    """Function that computes the log-prob of each completion token of a micro-batch. `imitation_loss` calls it."""

    def __call__(self, batch: MicroBatch, /, *, loss_gradient: LossGradient | None) -> Tensor:
        """Return the log-prob of each completion token. `loss_gradient` returns the gradient of the loss with respect
        to these log-probs."""
        ...


def encode_examples(examples: Sequence[Example], directory: Path, *, rules: TextRules) -> list[ModelInput]:
    """Encode supervised fine-tuning (warm-up) examples for a policy. `directory` contains the policy's tokenizer, image
    settings and end tokens. Raises BadInput if an example does not fit the policy."""
    processor, ends = load_processor(directory), stated_ends(generation_settings(directory))
    tokenizer = load_tokenizer(directory)
    inputs = example_inputs(examples, tokenizer, source="warm-up example", processor=processor, rules=rules, ends=ends)
    _reject_placeholders(inputs, processor)
    return inputs


def encode_chats(
    chats: Sequence[TrainingRow], directory: Path, *, loss: TrainedTurns, rules: TextRules
) -> list[list[ModelInput]]:
    """Encode chats, or prompts and completions, for supervised fine-tuning of a policy. Returns the model inputs of
    each row. `directory` contains the policy's tokenizer, image settings and end tokens, and `loss` selects the trained
    tokens. Raises BadInput if a row does not fit the policy."""
    return encode_rows(
        chats,
        load_tokenizer(directory),
        loss=loss,
        rules=rules,
        ends=stated_ends(generation_settings(directory)),
        processor=load_processor(directory),
    )


def fine_tune(
    trainer: Trainer,
    data: SupervisedData,
    *,
    warmup: SupervisedWarmup,
    directory: Path,
    microbatch_tokens: int,
    ranks: Ranks,
    callbacks: TrainingCallbacks,
) -> TrainingResult:
    """Fine-tune a policy on encoded examples or chats, in order, for all warm-up steps. `directory` contains the
    policy's image settings. Raises Quarantined if a gradient norm is not finite, and BadInput if the data is packed but
    the model does not support it. Collective: every rank must call this."""
    if data.is_packed and not trainer.shares_prompts:
        raise BadInput(
            "warmup.chats.packing = true is not supported by the policy's architecture, because tokens of different "
            "chats could affect each other. Set packing = false."
        )
    processor = load_processor(directory)
    images = None if processor is None else processor.image_tokens

    def sequences(selected: Sequence[ModelInput]) -> Sequences:
        patches = None if images is None else [images.patches(each.prompt) for each in selected]
        return Sequences.unrelated([len(each) for each in selected], patches)

    return fine_tune_on_inputs(
        trainer,
        data,
        warmup=warmup,
        sequences=sequences,
        microbatch_tokens=microbatch_tokens,
        ranks=ranks,
        callbacks=callbacks,
    )


def fine_tune_on_inputs(
    trainer: Trainer,
    data: SupervisedData,
    *,
    warmup: SupervisedWarmup,
    sequences: Callable[[Sequence[ModelInput]], Sequences],
    microbatch_tokens: int,
    ranks: Ranks,
    callbacks: TrainingCallbacks,
) -> TrainingResult:
    """Fine-tune a policy on encoded examples, in order, for all warm-up steps. `sequences` is a function that returns
    the lengths of inputs, from which micro-batches are planned. Raises Quarantined if a gradient norm is not finite.
    Collective: every rank must call this."""
    divide = fill_microbatches if data.is_packed else pack_groups

    def plan(selected: Sequence[ModelInput]) -> tuple[Rows, ...]:
        rows = tuple(range(len(selected)))
        sizes = sequences(selected)
        ways = plan_step(
            rows, sizes, ranks=ranks.data_parallel_size, microbatch_tokens=microbatch_tokens, divide=divide
        )
        return ways.microbatches[ranks.data_parallel_rank]

    def run(selected: Sequence[ModelInput], *, trains: bool) -> Tensor:
        return _run_step(trainer, selected, plan(selected), data, ranks, callbacks=callbacks, trains=trains)

    start = _measure(run, data, ranks)
    losses = torch.zeros(warmup.steps, dtype=torch.float64, device=ranks.device)
    for step, selected in enumerate(data.steps):
        losses[step] = run(selected, trains=True)
        take_step(trainer, step, warmup, where=f"warm-up step {step}")
        report_steps(losses[: step + 1], warmup.steps, callbacks=callbacks, ranks=ranks)
    sum_and_max(losses, torch.zeros(1, device=ranks.device), ranks)
    end = _measure(run, data, ranks)
    metrics = {
        "loss_first": float(losses[0]),
        "loss_last": float(losses[-LAST_STEPS:].mean()),
        "steps": float(warmup.steps),
        "tokens": float(sum(len(each.trained_positions) for selected in data.steps for each in selected)),
        "samples": float(sum(map(len, data.steps))),
        **({} if start is None or end is None else {"heldout_loss_first": start, "heldout_loss": end}),
    }
    return TrainingResult(metrics=metrics, losses=losses.tolist())


def _measure(run: Callable[..., Tensor], data: SupervisedData, ranks: Ranks) -> float | None:
    """Return the loss on the held-out inputs, or None if there are none. `run` computes a rank's share of the loss.
    Collective: every rank must call this."""
    if not data.heldout:
        return None
    with torch.no_grad():
        loss = run(data.heldout, trains=False).reshape(1)
    sum_and_max(loss, torch.zeros(1, device=ranks.device), ranks)
    return float(loss)


def _reject_placeholders(inputs: Sequence[ModelInput], processor: VisionProcessor | None) -> None:
    """Raise BadInput if the completion of an input contains a token that a vision-language policy never generates, such
    as an image placeholder."""
    banned = () if processor is None else processor.banned
    for row, each in enumerate(inputs if banned else ()):
        placeholders = np.intersect1d(each.completion, banned)
        if len(placeholders):
            raise BadInput(
                f"warm-up example {row}: the completion contains the image placeholder token {placeholders[0]}, which "
                "policies never generate. Remove it from the answer"
            )


def _run_step(
    trainer: Trainer,
    inputs: Sequence[ModelInput],
    microbatches: Sequence[Rows],
    data: SupervisedData,
    ranks: Ranks,
    *,
    callbacks: TrainingCallbacks,
    trains: bool,
) -> Tensor:
    """Run this rank's forward passes of one fine-tuning step, and the backward passes if `trains` is set. Return the
    rank's share of the loss, which is the weighted mean over the completion tokens of all inputs."""
    weight = 1 / sum(len(each.trained_positions) for each in inputs)
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for number, rows in enumerate(microbatches):
        selected = [inputs[row] for row in rows]
        loss = imitation_loss(trainer.forward, selected, weight=weight, is_packed=data.is_packed, device=ranks.device)
        if trains:
            trainer.backward(loss, last=number + 1 == len(microbatches))
        total += loss.detach()
        callbacks.on_progress()
    return total


def imitation_loss(
    forward: TrainedForward, inputs: Sequence[ModelInput], *, weight: float, is_packed: bool, device: torch.device
) -> Tensor:
    """Return the cross-entropy of one micro-batch: the sum over its completion tokens, times `weight`. With
    `is_packed`, all inputs are concatenated in a single row, and each token attends only to its own input."""
    weights_N = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *(each.weights for each in inputs)]))
    weights_N = weights_N.to(device)
    loss_gradient = partial(_select_weights, weights_N * -weight) if torch.is_grad_enabled() else None
    logprobs_N = forward(lay_out(inputs, in_one_row=is_packed), loss_gradient=loss_gradient)
    return -(logprobs_N * weights_N).sum() * weight


def _select_weights(shares_N: Tensor, logprobs_C: Tensor, places_C: Tensor) -> Tensor:
    """Return the gradient of a weighted sum of log-probs with respect to some of them: the weights `shares_N` at the
    indices `places_C`. The log-probs are an argument only because the head passes them to every such function."""
    return shares_N[places_C]
