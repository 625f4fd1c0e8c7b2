"""Training on fixed data: the parts that every such training has, and training on preference pairs.

A preference pair is two completions, one of which is preferred. A model assigns one number to each completion of a
pair: a policy its log-prob, a reward model its reward at the last token. Shapes: N completion tokens of one
micro-batch, P pairs, S steps, Q reported quantities.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from random import Random
from typing import TypeVar

import torch
from torch import Tensor

from rheostat.infra.errors import Quarantined
from rheostat.models.config.judges import TrainedRewardModel
from rheostat.models.config.process_models import TrainedProcessModel
from rheostat.models.config.training import DpoConfig, SupervisedWarmup
from rheostat.models.modeling.batching import Rows, Sequences, plan_step
from rheostat.models.modeling.layout import lay_out
from rheostat.models.objectives.preferences import PairScores, PairStatistics, PairTerms
from rheostat.models.text.sequences import SequencePair
from rheostat.models.training.ranks import Ranks, sum_and_max
from rheostat.models.training.trainer import Trainer, learning_rate

LAST_STEPS = 20
"""Number of last training steps over which final metrics and reported losses are averaged."""

CURVE_POINTS = 50

Row = TypeVar("Row")
Schedule = SupervisedWarmup | DpoConfig | TrainedRewardModel | TrainedProcessModel
"""Settings of a training on fixed data, with its number of steps and its peak learning rate."""


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


def take_step(trainer: Trainer, index: int, schedule: Schedule, *, where: str) -> None:
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


PairLoss = Callable[[PairScores, PairScores | None, PairStatistics], PairTerms]
"""Function that computes the loss of preference pairs from the scores of the trained model, the baseline scores and the
statistics of the optimizer step, in this order."""


@dataclass(frozen=True, slots=True)
class PreferenceTraining:
    """Preference pairs and settings of a preference training. They are the same on every rank."""

    train: Sequence[SequencePair]
    heldout: Sequence[SequencePair]
    schedule: DpoConfig | TrainedRewardModel
    """Number of steps, pairs per step, and the peak learning rate."""
    loss: PairLoss
    seed: int
    has_baseline: bool = False
    """Whether the loss receives baseline scores, which are the model's own scores before the first step."""
    mismatch: Callable[[Sequence[SequencePair]], Sequence[SequencePair]] | None = None
    """Function that combines prompts with completions of other prompts. If set, the loss receives a reference point,
    estimated on these sequences. Requires `has_baseline`."""
    extra_metrics: tuple[str, ...] = ()
    """Names of the quantities in `PairTerms.extra_P` that are reported."""


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
    schedule = work.schedule
    sampled = sample_batches(work.train, steps=schedule.steps, batch_size=schedule.batch_size, seed=work.seed)
    batches = [learner.prepare(pairs) for pairs in sampled]
    heldout = learner.prepare(work.heldout)
    tallies: list[Tensor] = []
    for index, batch in enumerate(batches):
        tallies.append(learner.step(index, batch))
        recent = torch.stack(tallies[-LAST_STEPS:])[:, 0]
        report_steps(recent, len(batches), done=index + 1, callbacks=callbacks, ranks=ranks)
    sums_SQ = torch.stack([*tallies, learner.measure(heldout)])
    sum_and_max(sums_SQ, torch.zeros(1, device=ranks.device), ranks)
    return _build_metrics(sums_SQ.cpu(), work)


def sample_batches(train: Sequence[Row], *, steps: int, batch_size: int, seed: int) -> Iterator[list[Row]]:
    """Yield the pairs, or other rows, of each training step. Every epoch contains all training rows in a new random
    order."""
    rng, rows = Random(f"{seed}/pairs"), list[int]()
    for _ in range(steps):
        while len(rows) < batch_size:
            rows += rng.sample(range(len(train)), k=len(train))
        yield [train[row] for row in rows[:batch_size]]
        rows = rows[batch_size:]


@dataclass(frozen=True, slots=True)
class _PairBatch:
    """Pairs of one optimizer step, or the held-out pairs, and their division into this rank's micro-batches."""

    pairs: Sequence[SequencePair]
    """Pairs of all ranks. A pair may occur twice."""
    microbatches: tuple[Rows, ...]
    """Indices of the pairs in each micro-batch of this rank."""
    baseline: Sequence[PairScores | None]
    """Baseline scores of each micro-batch, or None if the loss has no baseline."""
    mismatched: "_PairBatch | None" = None
    """Prompts with completions of other prompts, or None if the loss has no reference point."""


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

    def prepare(self, pairs: Sequence[SequencePair]) -> _PairBatch:
        """Divide pairs into micro-batches and compute their baseline scores. Must be called before the first step.
        Collective: every rank must call this."""
        batch = self._divide(pairs)
        mismatch = self._work.mismatch
        return batch if mismatch is None else replace(batch, mismatched=self._divide(mismatch(pairs)))

    @torch.no_grad()
    def _divide(self, pairs: Sequence[SequencePair]) -> _PairBatch:
        """Split pairs over the ranks and into micro-batches, and compute baseline scores. Both completions of a pair
        are always in the same micro-batch."""
        sizes = Sequences.unrelated([pair.size for pair in pairs])
        plan = plan_step(
            tuple(range(len(pairs))),
            sizes,
            ranks=self._ranks.data_parallel_size,
            microbatch_tokens=self._microbatch_tokens,
        )
        microbatches = plan.microbatches[self._ranks.data_parallel_rank]
        has_baseline = self._work.has_baseline
        return _PairBatch(
            pairs, microbatches, [self._compute_scores(pairs, rows) if has_baseline else None for rows in microbatches]
        )

    def step(self, index: int, batch: _PairBatch) -> Tensor:
        """Take optimizer step `index`. Return this rank's contribution to the mean loss, the share of pairs whose
        chosen completion scores higher, the mean margin, and the means of the loss's extra metrics. Collective: every
        rank must call this."""
        statistics, size = self._compute_statistics(batch), len(batch.pairs)
        total = self._empty_total()
        for number, (rows, baseline) in enumerate(zip(batch.microbatches, batch.baseline, strict=True)):
            terms = self._work.loss(self._compute_scores(batch.pairs, rows), baseline, statistics)
            self._trainer.backward(terms.loss_P.sum() / size, last=number + 1 == len(batch.microbatches))
            total += self._sum_terms(terms) / size
        take_step(self._trainer, index, self._work.schedule, where=f"step {index} on preference pairs")
        return total

    @torch.no_grad()
    def measure(self, batch: _PairBatch) -> Tensor:
        """Return the same quantities as `step` without training. Collective: every rank must call this."""
        statistics, total = self._compute_statistics(batch), self._empty_total()
        for rows, baseline in zip(batch.microbatches, batch.baseline, strict=True):
            terms = self._work.loss(self._compute_scores(batch.pairs, rows), baseline, statistics)
            total += self._sum_terms(terms) / len(batch.pairs)
        return total

    @torch.no_grad()
    def _compute_statistics(self, batch: _PairBatch) -> PairStatistics:
        """Return the quantities of a loss that depend on all pairs of a batch. The reference point is the mean
        log-ratio of all mismatched sequences of all ranks, but at least 0. Collective: every rank must call this."""
        size = len(batch.pairs)
        statistics = PairStatistics(
            sum(len(pair.chosen.trained_positions) for pair in batch.pairs if pair.chosen) / size,
            chosen_share=sum(bool(pair.chosen) for pair in batch.pairs) / size,
            rejected_share=sum(bool(pair.rejected) for pair in batch.pairs) / size,
        )
        mismatched = batch.mismatched
        if mismatched is None:
            return statistics
        total = torch.zeros(1, dtype=torch.float64, device=self._ranks.device)
        for rows, baseline in zip(mismatched.microbatches, mismatched.baseline, strict=True):
            assert baseline is not None, "a reference point needs baseline scores"
            scores = self._compute_scores(mismatched.pairs, rows)
            total += (scores.chosen_P - baseline.chosen_P).double().sum()
            total += (scores.rejected_P - baseline.rejected_P).double().sum()
        sum_and_max(total, torch.zeros(1, device=self._ranks.device), self._ranks)
        count = sum(bool(each) for pair in mismatched.pairs for each in (pair.chosen, pair.rejected))
        return statistics._replace(reference_point=(total[0] / count).clamp(min=0))

    def _compute_scores(self, pairs: Sequence[SequencePair], rows: Rows) -> PairScores:
        """Run one forward pass and return the score of each completion, which is the sum of the model's outputs over
        the completion's tokens. Collective: every rank must call this the same number of times."""
        sequences = [*(pairs[row].chosen for row in rows), *(pairs[row].rejected for row in rows)]
        places = [place for place, each in enumerate(sequences) if each]
        batch = lay_out([sequences[place] for place in places])
        logprobs_N = self._trainer.forward(batch)
        rows_N = torch.tensor(places, dtype=torch.int64)[torch.from_numpy(batch.rows_N)].to(logprobs_N.device)
        sums = torch.zeros(2 * len(rows), device=logprobs_N.device).index_add(0, rows_N, logprobs_N)
        lengths = torch.bincount(rows_N, minlength=2 * len(rows))
        self._on_progress()
        return PairScores(sums[: len(rows)], sums[len(rows) :], lengths[: len(rows)], lengths[len(rows) :])

    def _empty_total(self) -> Tensor:
        size = 3 + len(self._work.extra_metrics)
        return torch.zeros(size, dtype=torch.float64, device=self._ranks.device)

    def _sum_terms(self, terms: PairTerms) -> Tensor:
        """Return the sums over pairs of the reported quantities: loss, correctly ordered pairs, margin and extra
        metrics."""
        extra = [terms.extra_P[name] for name in self._work.extra_metrics]
        return torch.stack(
            [part.double().sum() for part in (terms.loss_P.detach(), terms.right_P, terms.margins_P, *extra)]
        )


def _build_metrics(sums_SQ: Tensor, work: PreferenceTraining) -> TrainingResult:
    """Build the training result from means over all ranks. `sums_SQ` has the columns loss, share of correctly ordered
    pairs, margin and extra metrics, one row per step, and a last row for the held-out pairs."""
    names = ("loss_last", "accuracy", "margin", *work.extra_metrics)
    losses, *_ = sums_SQ[:-1].T.tolist()
    last = sums_SQ[:-1][-LAST_STEPS:].mean(0).tolist()
    heldout_names = [f"heldout_{name}" for name in ("loss", *names[1:])]
    metrics = {
        "loss_first": losses[0],
        **dict(zip(names, last, strict=True)),
        **dict(zip(heldout_names, sums_SQ[-1].tolist(), strict=True)),
        "steps": float(work.schedule.steps),
        "samples": float(work.schedule.steps * work.schedule.batch_size),
        "pairs": float(len(work.train)),
        "heldout_pairs": float(len(work.heldout)),
    }
    return TrainingResult(metrics=metrics, losses=losses)
