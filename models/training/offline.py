"""Learning from given data: worked examples, which are imitated, and pairs of completions, one of which is preferred.

Of a pair a model says one number each: a policy the log-prob of the whole completion, a reward model its reward at the
last token. Shapes: N tokens of one pass, P pairs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infra.errors import BadInput, Quarantined
from models.config.judges import TrainedRewardModel
from models.config.training import DpoConfig, WarmupConfig
from models.data.examples import Example
from models.modeling.batching import Rows, Sequences, plan_step
from models.modeling.layout import MicroBatch, lay_out
from models.objectives.losses import DpoTerms, PairTerms
from models.records.model_input import ModelInput
from models.text.sequences import SequencePair, example_inputs
from models.text.tokenizer import load_tokenizer
from models.training.ranks import Ranks, sum_and_max
from models.training.trainer import Trainer, learning_rate
from models.vision.processor import VisionProcessor, load_processor

LAST_STEPS = 20
"""Steps over which the last figures are averaged."""

CURVE_POINTS = 50


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears how a training goes."""

    on_progress: Callable[[], None]
    """Called at every forward pass."""
    on_steps: Callable[[int, int, float], None] = lambda taken, steps, loss: None
    """Told now and then how many steps of how many were taken, and the mean loss of the last."""


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
    listener: Listener,
) -> Learnt:
    """Take all warm-up steps over the examples, in order; a loss that is not finite is refused.

    `directory` has the tokenizer.
    """
    processor = load_processor(directory)
    inputs = example_inputs(examples, load_tokenizer(directory), source="warm-up example", processor=processor)
    _require_words(inputs, processor)
    images = None if processor is None else processor.image_tokens

    def sequences(chosen: Sequence[ModelInput]) -> Sequences:
        patches = None if images is None else [images.patches(each.prompt) for each in chosen]
        return Sequences.apart([len(each) for each in chosen], patches)

    return imitate_inputs(
        trainer,
        inputs,
        warmup=warmup,
        sequences=sequences,
        microbatch_tokens=microbatch_tokens,
        ranks=ranks,
        listener=listener,
    )


def imitate_inputs(
    trainer: Trainer,
    inputs: Sequence[ModelInput],
    *,
    warmup: WarmupConfig,
    sequences: Callable[[Sequence[ModelInput]], Sequences],
    microbatch_tokens: int,
    ranks: Ranks,
    listener: Listener,
) -> Learnt:
    """Take all warm-up steps over inputs, in order; `sequences` says how large they are to plan a step's passes."""
    losses = torch.zeros(warmup.steps, dtype=torch.float64, device=ranks.device)
    for step in range(warmup.steps):
        chosen = inputs[step * warmup.batch_size : (step + 1) * warmup.batch_size]
        plan = plan_step(
            tuple(range(len(chosen))), sequences(chosen), ranks=ranks.parts, microbatch_tokens=microbatch_tokens
        )
        losses[step] = _imitate_step(trainer, chosen, plan.passes[ranks.part], ranks, on_progress=listener.on_progress)
        _step(trainer, step, warmup, what=f"warm-up step {step}")
        tell_steps(losses[: step + 1], warmup.steps, listener=listener, ranks=ranks)
    sum_and_max(losses, torch.zeros(1, device=ranks.device), ranks)
    metrics = {
        "loss_first": float(losses[0]),
        "loss_last": float(losses[-LAST_STEPS:].mean()),
        "steps": float(warmup.steps),
        "tokens": float(sum(len(each.written) for each in inputs)),
        "samples": float(len(inputs)),
    }
    return Learnt(metrics=metrics, losses=losses.tolist())


def tell_steps(losses: Tensor, steps: int, *, listener: Listener, ranks: Ranks, taken: int | None = None) -> None:
    """Tell of a training at every fiftieth of its steps: then all ranks add up their shares of the last losses."""
    taken = len(losses) if taken is None else taken
    if taken % -(-steps // CURVE_POINTS) == 0:
        recent = losses[-LAST_STEPS:].mean().reshape(1)
        sum_and_max(recent, torch.zeros(1, device=ranks.device), ranks)
        listener.on_steps(taken, steps, float(recent))


def _require_words(inputs: Sequence[ModelInput], processor: VisionProcessor | None) -> None:
    """Refuse completions with tokens that the policy never writes."""
    banned = () if processor is None else processor.banned
    for row, each in enumerate(inputs if banned else ()):
        found = np.intersect1d(each.completion, banned)
        if len(found):
            raise BadInput(f"warm-up example {row}: its completion has token {found[0]}, which stands for no word")


def _step(trainer: Trainer, index: int, schedule: WarmupConfig | DpoConfig | TrainedRewardModel, *, what: str) -> None:
    """Take an optimizer step at the schedule's rate: up over a twentieth of the steps, down to a tenth by a cosine."""
    rate = learning_rate(
        index,
        schedule.steps,
        peak=schedule.learning_rate,
        warmup_steps=round(schedule.steps * 0.05),
        schedule="cosine",
        floor=0.1,
    )
    if not isfinite(norm := trainer.step(rate)):
        raise Quarantined(f"{what}: expected finite gradients, found a norm of {norm}; lower its rate")


def _shares_at(shares_N: torch.Tensor, logprobs_C: torch.Tensor, places_C: torch.Tensor) -> torch.Tensor:
    """How a loss that is a weighted sum of log-probs changes with some of them."""
    return shares_N[places_C]


def _imitate_step(
    trainer: Trainer,
    inputs: Sequence[ModelInput],
    passes: Sequence[Rows],
    ranks: Ranks,
    *,
    on_progress: Callable[[], None],
) -> torch.Tensor:
    """Run this rank's passes of one step and return its share of the loss: the weighted mean over completions."""
    weight = 1 / sum(len(each.written) for each in inputs)
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for number, rows in enumerate(passes):
        chosen = [inputs[row] for row in rows]
        weights_N = torch.from_numpy(np.concatenate([each.weights for each in chosen])).to(ranks.device)
        slopes = partial(_shares_at, weights_N * -weight)
        loss = -(trainer.forward(lay_out(chosen), slopes=slopes) * weights_N).sum() * weight
        trainer.backward(loss, last=number + 1 == len(passes))
        total += loss.detach()
        on_progress()
    return total


def lay_out_pairs(pairs: Sequence[SequencePair]) -> MicroBatch:
    """Lay out one pass: all chosen completions, then all rejected ones."""
    return lay_out([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)])


class PairNumbers(NamedTuple):
    """What a model says of the pairs of one pass."""

    chosen_P: Tensor
    rejected_P: Tensor


PairLoss = Callable[[PairNumbers, PairNumbers], PairTerms | DpoTerms]
"""Takes the numbers of the model, and those that it is compared with."""


@dataclass(frozen=True, slots=True)
class PairLearning:
    """What is learnt; the same on every rank."""

    train: Sequence[SequencePair]
    heldout: Sequence[SequencePair]
    schedule: DpoConfig | TrainedRewardModel
    """Steps, pairs per step, and the peak learning rate."""
    loss: PairLoss
    against: Literal["start", "nothing"]
    """What the model's numbers are compared with: its own before the first step, or zeros."""
    seed: int


def learn_preferences(
    trainer: Trainer,
    work: PairLearning,
    *,
    microbatch_tokens: int,
    ranks: Ranks,
    listener: Listener,
) -> Learnt:
    """Take all steps over the training pairs; then measure the held-out ones. A loss that is not finite is refused."""
    learner = _Pairs(trainer, work, microbatch_tokens=microbatch_tokens, ranks=ranks, on_progress=listener.on_progress)
    steps = [learner.passes(rows, work.train) for rows in _draw(work)]
    heldout = learner.passes(tuple(range(len(work.heldout))), work.heldout)
    start = [learner.start(passes, work.train) for passes in steps]
    heldout_start = learner.start(heldout, work.heldout)
    tallies: list[Tensor] = []
    for index, passes in enumerate(steps):
        tallies.append(learner.step(index, passes, start[index]))
        recent = torch.stack(tallies[-LAST_STEPS:])[:, 0]
        tell_steps(recent, len(steps), taken=index + 1, listener=listener, ranks=ranks)
    sums_S3 = torch.stack([*tallies, learner.measure(heldout, heldout_start)])
    sum_and_max(sums_S3, torch.zeros(1, device=ranks.device), ranks)
    return _summary(sums_S3.cpu(), work)


def _draw(work: PairLearning) -> Iterator[Rows]:
    """Deal the training pairs to steps: all of them in a new order, again and again."""
    rng, size, rows = Random(f"{work.seed}/pairs"), work.schedule.batch_size, list[int]()
    for _ in range(work.schedule.steps):
        while len(rows) < size:
            rows += rng.sample(range(len(work.train)), k=len(work.train))
        yield tuple(rows[:size])
        rows = rows[size:]


class _Pairs:
    """One rank's part of the work."""

    def __init__(
        self,
        trainer: Trainer,
        work: PairLearning,
        *,
        microbatch_tokens: int,
        ranks: Ranks,
        on_progress: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._work = work
        self._microbatch_tokens = microbatch_tokens
        self._ranks = ranks
        self._on_progress = on_progress

    def passes(self, rows: Rows, pairs: Sequence[SequencePair]) -> tuple[Rows, ...]:
        """This rank's passes over some of the pairs; both completions of a pair are always in the same pass."""
        places = tuple(range(len(rows)))  # a pair that comes twice in a step is there twice
        sizes = Sequences.apart([pairs[row].size for row in rows])
        plan = plan_step(places, sizes, ranks=self._ranks.parts, microbatch_tokens=self._microbatch_tokens)
        return tuple(tuple(rows[place] for place in part) for part in plan.passes[self._ranks.part])

    @torch.no_grad()
    def start(self, passes: Sequence[Rows], pairs: Sequence[SequencePair]) -> list[PairNumbers]:
        """What the model is compared with, by the very passes in which it learns."""
        if self._work.against == "start":
            return [self._numbers([pairs[row] for row in rows]) for rows in passes]
        zeros = [torch.zeros(len(rows), device=self._ranks.device) for rows in passes]
        return [PairNumbers(zeros_P, zeros_P) for zeros_P in zeros]

    def step(self, index: int, passes: Sequence[Rows], start: Sequence[PairNumbers]) -> Tensor:
        """Take one optimizer step and return this rank's share of its loss, right pairs and margin."""
        schedule, total = self._work.schedule, torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for number, rows in enumerate(passes):
            terms = self._work.loss(self._numbers([self._work.train[row] for row in rows]), start[number])
            self._trainer.backward(terms.loss_P.sum() / schedule.batch_size, last=number + 1 == len(passes))
            total += _tally(terms) / schedule.batch_size
        _step(self._trainer, index, schedule, what=f"pairs, step {index}")
        return total

    @torch.no_grad()
    def measure(self, passes: Sequence[Rows], start: Sequence[PairNumbers]) -> Tensor:
        """Return this rank's share of the held-out pairs' loss, right pairs and margin."""
        heldout = self._work.heldout
        total = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for rows, began in zip(passes, start, strict=True):
            total += _tally(self._work.loss(self._numbers([heldout[row] for row in rows]), began)) / len(heldout)
        return total

    def _numbers(self, pairs: Sequence[SequencePair]) -> PairNumbers:
        """One pass: the sum of what the model says of each completion's tokens."""
        batch = lay_out_pairs(pairs)
        found_N = self._trainer.forward(batch)
        rows_N = torch.from_numpy(batch.rows_N).to(found_N.device)
        sums = torch.zeros(2 * len(pairs), device=found_N.device).index_add(0, rows_N, found_N)
        self._on_progress()
        return PairNumbers(sums[: len(pairs)], sums[len(pairs) :])


def _tally(terms: PairTerms | DpoTerms) -> Tensor:
    parts = (terms.loss_P.detach(), terms.right_P, terms.margins_P)
    return torch.stack([part.double().sum() for part in parts])


def _summary(sums_S3: Tensor, work: PairLearning) -> Learnt:
    """Name the sums of all ranks: one row per step, and one of the held-out pairs."""
    losses, *_ = sums_S3[:-1].T.tolist()
    last = sums_S3[:-1][-LAST_STEPS:].mean(0).tolist()
    heldout = sums_S3[-1].tolist()
    metrics = {
        "loss_first": losses[0],
        "loss_last": last[0],
        "accuracy": last[1],
        "margin": last[2],
        "heldout_loss": heldout[0],
        "heldout_accuracy": heldout[1],
        "heldout_margin": heldout[2],
        "steps": float(work.schedule.steps),
        "samples": float(work.schedule.steps * work.schedule.batch_size),
        "pairs": float(len(work.train)),
        "heldout_pairs": float(len(work.heldout)),
    }
    return Learnt(metrics=metrics, losses=losses)
