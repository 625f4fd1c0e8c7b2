"""Training on fixed data: supervised fine-tuning on worked examples, and training on preference pairs.

A preference pair is two completions, one of which is preferred. A model assigns one number to each completion of a
pair: a policy its log-prob, a reward model its reward at the last token. Shapes: N completion tokens of one
micro-batch, P pairs.
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
from models.config.texts import TextRules
from models.config.training import DpoConfig, WarmupConfig
from models.data.examples import Example
from models.engines.requests import generation_settings, stated_ends
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
"""Number of last training steps over which final metrics and reported losses are averaged."""

CURVE_POINTS = 50


@dataclass(frozen=True, slots=True)
class TrainingCallbacks:
    """Callbacks through which training on fixed data (fine-tuning or preference training) reports its progress."""

    on_progress: Callable[[], None]
    """Called after every forward pass."""
    on_steps: Callable[[int, int, float], None] = lambda taken, steps, loss: None
    """Called periodically with the number of steps done, the total number of steps, and the mean loss of the last
    `LAST_STEPS` steps."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Losses and final metrics of training on fixed data (fine-tuning or preference training)."""

    metrics: dict[str, float]
    losses: list[float]
    """Training loss of each optimizer step."""

    def curve(self) -> list[float]:
        """Return at most `CURVE_POINTS` losses for a plot, each a mean over equally many consecutive steps."""
        size = -(-len(self.losses) // CURVE_POINTS)
        parts = [self.losses[start : start + size] for start in range(0, len(self.losses), size)]
        return [sum(part) / len(part) for part in parts]


def encode_examples(examples: Sequence[Example], directory: Path, *, rules: TextRules) -> list[ModelInput]:
    """Encode supervised fine-tuning (warm-up) examples for a policy. `directory` contains the policy's tokenizer, image
    settings and end tokens. Raises BadInput if an example does not fit the policy."""
    processor, ends = load_processor(directory), stated_ends(generation_settings(directory))
    tokenizer = load_tokenizer(directory)
    inputs = example_inputs(examples, tokenizer, source="warm-up example", processor=processor, rules=rules, ends=ends)
    _reject_placeholders(inputs, processor)
    return inputs


def fine_tune(
    trainer: Trainer,
    inputs: Sequence[ModelInput],
    *,
    warmup: WarmupConfig,
    directory: Path,
    microbatch_tokens: int,
    ranks: Ranks,
    callbacks: TrainingCallbacks,
) -> TrainingResult:
    """Fine-tune a policy on encoded examples from `encode_examples`, in order, for all warm-up steps. `directory`
    contains the policy's image settings. Raises Quarantined if a gradient norm is not finite. Collective: every rank
    must call this."""
    processor = load_processor(directory)
    images = None if processor is None else processor.image_tokens

    def sequences(selected: Sequence[ModelInput]) -> Sequences:
        patches = None if images is None else [images.patches(each.prompt) for each in selected]
        return Sequences.unrelated([len(each) for each in selected], patches)

    return fine_tune_on_inputs(
        trainer,
        inputs,
        warmup=warmup,
        sequences=sequences,
        microbatch_tokens=microbatch_tokens,
        ranks=ranks,
        callbacks=callbacks,
    )


def fine_tune_on_inputs(
    trainer: Trainer,
    inputs: Sequence[ModelInput],
    *,
    warmup: WarmupConfig,
    sequences: Callable[[Sequence[ModelInput]], Sequences],
    microbatch_tokens: int,
    ranks: Ranks,
    callbacks: TrainingCallbacks,
) -> TrainingResult:
    """Fine-tune a policy on encoded examples, in order, for all warm-up steps. `sequences` is a function that returns
    the lengths of inputs, from which micro-batches are planned. Raises Quarantined if a gradient norm is not finite.
    Collective: every rank must call this."""
    losses = torch.zeros(warmup.steps, dtype=torch.float64, device=ranks.device)
    for step in range(warmup.steps):
        selected = inputs[step * warmup.batch_size : (step + 1) * warmup.batch_size]
        plan = plan_step(
            tuple(range(len(selected))),
            sequences(selected),
            ranks=ranks.data_parallel_size,
            microbatch_tokens=microbatch_tokens,
        )
        losses[step] = _imitate_step(
            trainer, selected, plan.microbatches[ranks.data_parallel_rank], ranks, on_progress=callbacks.on_progress
        )
        _take_step(trainer, step, warmup, where=f"warm-up step {step}")
        report_steps(losses[: step + 1], warmup.steps, callbacks=callbacks, ranks=ranks)
    sum_and_max(losses, torch.zeros(1, device=ranks.device), ranks)
    metrics = {
        "loss_first": float(losses[0]),
        "loss_last": float(losses[-LAST_STEPS:].mean()),
        "steps": float(warmup.steps),
        "tokens": float(sum(len(each.trained_positions) for each in inputs)),
        "samples": float(len(inputs)),
    }
    return TrainingResult(metrics=metrics, losses=losses.tolist())


def report_steps(
    losses: Tensor, steps: int, *, callbacks: TrainingCallbacks, ranks: Ranks, done: int | None = None
) -> None:
    """Call `callbacks.on_steps` each time another 2% of the steps are done.

    `losses` contains the losses of the steps so far, of which the last `LAST_STEPS` are averaged. `done` is the number
    of steps done, by default the number of losses.

    Collective: the ranks sum their contributions to the latest losses, so all ranks must call this at the same steps.
    """
    done = len(losses) if done is None else done
    if done % -(-steps // CURVE_POINTS) == 0:
        recent = losses[-LAST_STEPS:].mean().reshape(1)
        sum_and_max(recent, torch.zeros(1, device=ranks.device), ranks)
        callbacks.on_steps(done, steps, float(recent))


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


def _take_step(
    trainer: Trainer, index: int, schedule: WarmupConfig | DpoConfig | TrainedRewardModel, *, where: str
) -> None:
    """Take optimizer step `index`. The learning rate warms up over the first 5% of the steps of `schedule` and decays
    by a cosine to a tenth. Raises Quarantined, with `where` as the name of the step, if the gradient norm is not
    finite."""
    rate = learning_rate(
        index,
        schedule.steps,
        peak=schedule.learning_rate,
        warmup_steps=round(schedule.steps * 0.05),
        schedule="cosine",
        floor=0.1,
    )
    if not isfinite(norm := trainer.step(rate)):
        raise Quarantined(f"{where}: the gradient norm is {norm}, which is not finite. Lower learning_rate")


def _shares_at(shares_N: torch.Tensor, logprobs_C: torch.Tensor, places_C: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a weighted sum of log-probs with respect to some of them: the weights `shares_N` at the
    indices `places_C`. The log-probs are an argument only because the head passes them to every such function."""
    return shares_N[places_C]


def _imitate_step(
    trainer: Trainer,
    inputs: Sequence[ModelInput],
    microbatches: Sequence[Rows],
    ranks: Ranks,
    *,
    on_progress: Callable[[], None],
) -> torch.Tensor:
    """Run this rank's forward and backward passes of one fine-tuning step, and return the rank's share of the loss. The
    loss is the sum of the weighted negative log-probs, divided by the number of completion tokens of the step."""
    weight = 1 / sum(len(each.trained_positions) for each in inputs)
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for number, rows in enumerate(microbatches):
        selected = [inputs[row] for row in rows]
        weights_N = torch.from_numpy(np.concatenate([each.weights for each in selected])).to(ranks.device)
        loss_gradient = partial(_shares_at, weights_N * -weight)
        loss = -(trainer.forward(lay_out(selected), loss_gradient=loss_gradient) * weights_N).sum() * weight
        trainer.backward(loss, last=number + 1 == len(microbatches))
        total += loss.detach()
        on_progress()
    return total


def lay_out_pairs(pairs: Sequence[SequencePair]) -> MicroBatch:
    """Build one micro-batch from preference pairs: the chosen completions of all pairs first, then the rejected
    completions in the same order."""
    return lay_out([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)])


class PairScores(NamedTuple):
    """Scores of the chosen and the rejected completion of each pair: summed log-probs of a policy, or rewards of a
    reward model."""

    chosen_P: Tensor
    rejected_P: Tensor


PairLoss = Callable[[PairScores, PairScores], PairTerms | DpoTerms]
"""Function that computes the loss of preference pairs from the scores of the trained model and the baseline scores, in
this order."""


@dataclass(frozen=True, slots=True)
class PreferenceTraining:
    """Preference pairs and settings of a preference training. They are the same on every rank."""

    train: Sequence[SequencePair]
    heldout: Sequence[SequencePair]
    schedule: DpoConfig | TrainedRewardModel
    """Number of steps, pairs per step, and the peak learning rate."""
    loss: PairLoss
    baseline: Literal["start", "nothing"]
    """Baseline scores of the loss: the model's own scores before the first step ("start") or zeros ("nothing")."""
    seed: int


def train_on_preferences(
    trainer: Trainer,
    work: PreferenceTraining,
    *,
    microbatch_tokens: int,
    ranks: Ranks,
    callbacks: TrainingCallbacks,
) -> TrainingResult:
    """Train a policy or a reward model on preference pairs for all steps, then measure the loss and accuracy on the
    held-out pairs. Raises Quarantined if a gradient norm is not finite. Collective: every rank must call this."""
    learner = _Pairs(trainer, work, microbatch_tokens=microbatch_tokens, ranks=ranks, on_progress=callbacks.on_progress)
    steps = [learner.microbatches(rows, work.train) for rows in _sample_batches(work)]
    heldout = learner.microbatches(tuple(range(len(work.heldout))), work.heldout)
    start = [learner.start(microbatches, work.train) for microbatches in steps]
    heldout_start = learner.start(heldout, work.heldout)
    tallies: list[Tensor] = []
    for index, microbatches in enumerate(steps):
        tallies.append(learner.step(index, microbatches, start[index]))
        recent = torch.stack(tallies[-LAST_STEPS:])[:, 0]
        report_steps(recent, len(steps), done=index + 1, callbacks=callbacks, ranks=ranks)
    sums_S3 = torch.stack([*tallies, learner.measure(heldout, heldout_start)])
    sum_and_max(sums_S3, torch.zeros(1, device=ranks.device), ranks)
    return _build_metrics(sums_S3.cpu(), work)


def _sample_batches(work: PreferenceTraining) -> Iterator[Rows]:
    """Yield the row numbers of the pairs for each training step. Every epoch contains all training pairs in a new
    random order."""
    rng, size, rows = Random(f"{work.seed}/pairs"), work.schedule.batch_size, list[int]()
    for _ in range(work.schedule.steps):
        while len(rows) < size:
            rows += rng.sample(range(len(work.train)), k=len(work.train))
        yield tuple(rows[:size])
        rows = rows[size:]


class _Pairs:
    """Preference training on one rank: planning of micro-batches, optimizer steps and evaluation."""

    def __init__(
        self,
        trainer: Trainer,
        work: PreferenceTraining,
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

    def microbatches(self, rows: Rows, pairs: Sequence[SequencePair]) -> tuple[Rows, ...]:
        """Split the pairs at `rows` over the ranks, and return the rows of each of this rank's micro-batches. Both
        completions of a pair are always in the same micro-batch."""
        places = tuple(range(len(rows)))  # by position, because a pair may occur twice in a step
        sizes = Sequences.unrelated([pairs[row].size for row in rows])
        plan = plan_step(places, sizes, ranks=self._ranks.data_parallel_size, microbatch_tokens=self._microbatch_tokens)
        return tuple(tuple(rows[place] for place in part) for part in plan.microbatches[self._ranks.data_parallel_rank])

    @torch.no_grad()
    def start(self, microbatches: Sequence[Rows], pairs: Sequence[SequencePair]) -> list[PairScores]:
        """Return the baseline scores of the pairs in each micro-batch: zeros, or the model's own scores before
        training. Must be called before the first step."""
        if self._work.baseline == "start":
            return [self._compute_numbers([pairs[row] for row in rows]) for rows in microbatches]
        zeros = [torch.zeros(len(rows), device=self._ranks.device) for rows in microbatches]
        return [PairScores(zeros_P, zeros_P) for zeros_P in zeros]

    def step(self, index: int, microbatches: Sequence[Rows], start: Sequence[PairScores]) -> Tensor:
        """Take optimizer step `index` and return this rank's sums of loss, correctly ordered pairs and margin. `start`
        contains the baseline scores of each micro-batch."""
        schedule, total = self._work.schedule, torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for number, rows in enumerate(microbatches):
            terms = self._work.loss(self._compute_numbers([self._work.train[row] for row in rows]), start[number])
            self._trainer.backward(terms.loss_P.sum() / schedule.batch_size, last=number + 1 == len(microbatches))
            total += _summarize_terms(terms) / schedule.batch_size
        _take_step(self._trainer, index, schedule, where=f"step {index} on preference pairs")
        return total

    @torch.no_grad()
    def measure(self, microbatches: Sequence[Rows], start: Sequence[PairScores]) -> Tensor:
        """Return this rank's sums of loss, correctly ordered pairs and margin over the held-out pairs.

        `start` contains the baseline scores of each micro-batch.
        """
        heldout = self._work.heldout
        total = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for rows, start_numbers in zip(microbatches, start, strict=True):
            total += _summarize_terms(
                self._work.loss(self._compute_numbers([heldout[row] for row in rows]), start_numbers)
            ) / len(heldout)
        return total

    def _compute_numbers(self, pairs: Sequence[SequencePair]) -> PairScores:
        """Run one forward pass and return the score of each completion, which is the sum of the model's outputs over
        the completion's tokens."""
        batch = lay_out_pairs(pairs)
        logprobs_N = self._trainer.forward(batch)
        rows_N = torch.from_numpy(batch.rows_N).to(logprobs_N.device)
        sums = torch.zeros(2 * len(pairs), device=logprobs_N.device).index_add(0, rows_N, logprobs_N)
        self._on_progress()
        return PairScores(sums[: len(pairs)], sums[len(pairs) :])


def _summarize_terms(terms: PairTerms | DpoTerms) -> Tensor:
    parts = (terms.loss_P.detach(), terms.right_P, terms.margins_P)
    return torch.stack([part.double().sum() for part in parts])


def _build_metrics(sums_S3: Tensor, work: PreferenceTraining) -> TrainingResult:
    """Build the training result from sums over all ranks. `sums_S3` has the columns loss, correctly ordered pairs and
    margin, one row per step, and a last row for the held-out pairs."""
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
    return TrainingResult(metrics=metrics, losses=losses)
