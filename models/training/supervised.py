"""Supervised warm-up: imitate worked examples by cross-entropy on their completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch

from infra.errors import Quarantined
from models.config.training import WarmupConfig
from models.data.load import Example
from models.modeling.batching import lay_out, plan_step
from models.records.model_input import ModelInput
from models.text.sequences import example_inputs
from models.text.tokenizer import load_tokenizer
from models.training.ranks import Ranks, sum_and_max
from models.training.trainer import Trainer, learning_rate

LAST_STEPS = 20
"""Steps over which the last figures are averaged."""
CURVE_POINTS = 50


@dataclass(frozen=True, slots=True)
class Learnt:
    """How training on given data went."""

    metrics: dict[str, float]
    losses: list[float]
    """Of each step."""

    def curve(self) -> list[float]:
        """The course of the loss in few points: means over equal parts of the steps."""
        size = -(-len(self.losses) // CURVE_POINTS)
        parts = [self.losses[start : start + size] for start in range(0, len(self.losses), size)]
        return [sum(part) / len(part) for part in parts]


def imitate(
    trainer: Trainer,
    examples: Sequence[Example],
    *,
    warmup: WarmupConfig,
    directory: Path,
    microbatch_tokens: int,
    ranks: Ranks,
    on_progress: Callable[[], None],
) -> Learnt:
    """Take all warm-up steps over the examples, in order; a loss that is not finite is refused.

    `directory` has the tokenizer.
    """
    inputs = example_inputs(examples, load_tokenizer(directory), source="warm-up example")
    losses = torch.zeros(warmup.steps, dtype=torch.float64, device=ranks.device)
    for step in range(warmup.steps):
        chosen = inputs[step * warmup.batch_size : (step + 1) * warmup.batch_size]
        losses[step] = _imitate_step(
            trainer, chosen, microbatch_tokens=microbatch_tokens, ranks=ranks, on_progress=on_progress
        )
        rate = learning_rate(
            step,
            warmup.steps,
            peak=warmup.learning_rate,
            warmup_steps=round(warmup.steps * 0.05),
            schedule="cosine",
            floor=0.1,
        )
        if not isfinite(norm := trainer.step(rate)):
            raise Quarantined(f"warm-up step {step}: expected finite gradients, found a norm of {norm}; lower its rate")
    sum_and_max(losses, torch.zeros(1, device=ranks.device))
    metrics = {
        "loss_first": float(losses[0]),
        "loss_last": float(losses[-LAST_STEPS:].mean()),
        "steps": float(warmup.steps),
        "tokens": float(sum(len(each.written) for each in inputs)),
        "samples": float(len(inputs)),
    }
    return Learnt(metrics=metrics, losses=losses.tolist())


def _imitate_step(
    trainer: Trainer,
    inputs: Sequence[ModelInput],
    *,
    microbatch_tokens: int,
    ranks: Ranks,
    on_progress: Callable[[], None],
) -> torch.Tensor:
    """Run this rank's passes of one step and return its share of the loss: the mean over all completion tokens."""
    lengths = [len(each) for each in inputs]
    plan = plan_step(tuple(range(len(inputs))), lengths, ranks=ranks.world_size, microbatch_tokens=microbatch_tokens)
    weight = 1 / sum(len(each.written) for each in inputs)
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    passes = plan.passes[ranks.rank]
    for number, rows in enumerate(passes):
        loss = -trainer.forward(lay_out([inputs[row] for row in rows])).sum() * weight
        trainer.backward(loss, last=number + 1 == len(passes))
        total += loss.detach()
        on_progress()
    return total
