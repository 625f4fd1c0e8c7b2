"""Training on fixed data: the parts that every such training has, and training on preference pairs.

A preference pair is two completions, one of which is preferred. A model assigns one number to each completion of a
pair: a policy its log-prob, a reward model its reward at the last token. Shapes: N completion tokens of one
micro-batch, P pairs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from random import Random
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rheostat.infra.errors import Quarantined
from rheostat.models.config.judges import TrainedRewardModel
from rheostat.models.config.training import DpoConfig, SupervisedWarmup
from rheostat.models.modeling.batching import Rows, Sequences, plan_step
from rheostat.models.modeling.layout import MicroBatch, lay_out
from rheostat.models.objectives.losses import DpoTerms, PairTerms
from rheostat.models.text.sequences import SequencePair
from rheostat.models.training.ranks import Ranks, sum_and_max
from rheostat.models.training.trainer import Trainer, learning_rate

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


def take_step(
    trainer: Trainer, index: int, schedule: SupervisedWarmup | DpoConfig | TrainedRewardModel, *, where: str
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
    """Source of the baseline scores in the loss: the model's own scores before the first step ("start") or zeros
    ("nothing")."""
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
    learner = _PairTraining(
        trainer, work, microbatch_tokens=microbatch_tokens, ranks=ranks, on_progress=callbacks.on_progress
    )
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


class _PairTraining:
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
        """Take optimizer step `index`. Return this rank's sum of the loss, number of pairs whose chosen completion
        scores higher, and sum of the score margins. `start` contains the baseline scores of each micro-batch."""
        schedule, total = self._work.schedule, torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for number, rows in enumerate(microbatches):
            terms = self._work.loss(self._compute_numbers([self._work.train[row] for row in rows]), start[number])
            self._trainer.backward(terms.loss_P.sum() / schedule.batch_size, last=number + 1 == len(microbatches))
            total += _summarize_terms(terms) / schedule.batch_size
        take_step(self._trainer, index, schedule, where=f"step {index} on preference pairs")
        return total

    @torch.no_grad()
    def measure(self, microbatches: Sequence[Rows], start: Sequence[PairScores]) -> Tensor:
        """Return this rank's sum of the loss, number of pairs whose chosen completion scores higher, and sum of the
        score margins, over the held-out pairs. `start` contains the baseline scores of each micro-batch."""
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
