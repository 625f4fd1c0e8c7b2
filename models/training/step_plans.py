"""Planning of the optimizer steps of one iteration on one rank: minibatches, micro-batches and learning rates.

Steps are planned from the lengths of all samples, and each rank reads only its own rows. The critic trains on the same
micro-batches as the policy.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random

import numpy as np

from rheostat.models.config.objectives import PositiveNll, UpdateConfig
from rheostat.models.modeling.batching import Rows, StepPlan, plan_steps
from rheostat.models.modeling.layout import TrainingBatch, TrainingSample, lay_out_samples
from rheostat.models.objectives.importance import needs_old
from rheostat.models.objectives.losses import token_weights
from rheostat.models.records.columns import Mask
from rheostat.models.records.seeds import derive_seed
from rheostat.models.records.work import UpdateWork
from rheostat.models.training.ranks import Ranks
from rheostat.models.training.samples import TrainingSamples, find_correct, read_training_rows, weighted_lengths
from rheostat.models.training.selections import select_tokens
from rheostat.models.training.trainer import learning_rate
from rheostat.models.vision.families import ImageTokens


@dataclass(frozen=True, slots=True)
class StepBatches:
    """Micro-batches of one optimizer step on this rank, with the step's learning rate."""

    batches: tuple[TrainingBatch, ...]
    learning_rate: float
    computes_old: bool
    """Whether forward passes before the update compute the old log-probs. If not, the log-probs that the engine
    reported are used as old log-probs."""
    minibatch: int
    """Index of the minibatch within its epoch. Every epoch has the same minibatches."""
    is_replayed: bool = False
    """Whether a policy of another run generated the samples."""


def plan_policy_steps(
    samples: TrainingSamples,
    work: UpdateWork,
    *,
    config: UpdateConfig,
    ranks: Ranks,
    images: ImageTokens | None,
    step_tokens: int | None = None,
) -> list[StepBatches]:
    """Plan the iteration's optimizer steps and build this rank's micro-batches. A step is skipped if none of its tokens
    has a loss weight."""
    planned = plan_steps(
        samples.sequences(images, step_tokens=step_tokens),
        minibatches=config.minibatches,
        ranks=ranks.data_parallel_size,
        microbatch_tokens=config.microbatch_tokens,
        seed=work.seed,
    )
    # If all tokens of a step have weight 0, only momentum would change the weights.
    weighted = weighted_lengths(samples, config.max_staleness)
    plans = [plan for plan in planned if any(weighted[row] for row in plan.rows)]
    selected = select_tokens(samples, plans, config=config, seed=derive_seed("selection", work.seed, work.iteration))
    batches = build_batches(samples, plans, config=config, rank=ranks.data_parallel_rank, selected=selected)
    order = _order_minibatches(len(plans), epochs=config.epochs, seed=work.seed)
    rates = _rates(work, len(order), config=config)
    is_exact = work.exact_behaviour and samples.is_fresh and not work.is_replayed
    computes_old = needs_old(config) and not is_exact
    return [
        StepBatches(batches[step], rate, computes_old, step, work.is_replayed)
        for step, rate in zip(order, rates, strict=True)
    ]


def plan_critic_steps(steps: Sequence[StepBatches], work: UpdateWork, *, config: UpdateConfig) -> list[StepBatches]:
    """Return the steps of the policy update with the critic's learning rates instead. The peak learning rate is in
    `config`, the critic's settings."""
    rates = _rates(work, len(steps), config=config)
    return [replace(step, learning_rate=rate) for step, rate in zip(steps, rates, strict=True)]


def first_epoch(steps: Sequence[StepBatches]) -> Sequence[StepBatches]:
    """Return the steps of the first epoch, one for each minibatch."""
    return steps[: 1 + max((step.minibatch for step in steps), default=-1)]


def _order_minibatches(minibatches: int, *, epochs: int, seed: int) -> list[int]:
    """Return the minibatch index of each optimizer step. The first epoch is in order, and further epochs are
    shuffled."""
    rng = Random(seed)
    later = [rng.sample(range(minibatches), minibatches) for _ in range(epochs - 1)]
    return [*range(minibatches), *chain.from_iterable(later)]


def _rates(work: UpdateWork, steps: int, *, config: UpdateConfig) -> list[float]:
    first = work.policy.version * config.steps
    return [
        learning_rate(
            first + index,
            work.total_iterations * config.steps,
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            schedule=config.schedule,
        )
        for index in range(steps)
    ]


def build_batches(
    samples: TrainingSamples,
    plans: Sequence[StepPlan],
    *,
    config: UpdateConfig,
    rank: int,
    selected: Mapping[int, Mask] | None = None,
) -> list[tuple[TrainingBatch, ...]]:
    """Build this rank's micro-batches of every planned step. Only the samples of these micro-batches are read.
    `selected` are the tokens that the loss has selected, by row number (see `select_tokens`)."""
    own_rows = [row for plan in plans for rows in plan.microbatches[rank] for row in rows]
    training_rows = read_training_rows(samples, own_rows)
    return [_lay_out_step(plan, samples, training_rows, config=config, rank=rank, selected=selected) for plan in plans]


def _lay_out_step(
    plan: StepPlan,
    samples: TrainingSamples,
    training_rows: dict[int, TrainingSample],
    *,
    config: UpdateConfig,
    rank: int,
    selected: Mapping[int, Mask] | None,
) -> tuple[TrainingBatch, ...]:
    rows, lengths = plan.rows, Counter[tuple[int, int]]()
    for row in rows:
        lengths[samples.completions[row]] += samples.trained_lengths[row]
    weights_of_completions = dict(
        zip(lengths, token_weights(config.loss.aggregation, [*lengths.values()]), strict=True)
    )
    weights = {row: weights_of_completions[samples.completions[row]] for row in rows}
    positive_weights = None if config.positive_nll is None else _weigh_correct(rows, samples, config.positive_nll)

    def batch(part: Rows) -> TrainingBatch:
        microbatch = lay_out_samples([training_rows[row] for row in part], [weights[row] for row in part])
        if selected is not None:
            parts = [selected[row] for row in part]
            microbatch = replace(microbatch, selected_N=np.concatenate([np.zeros(0, np.bool_), *parts]))
        if positive_weights is not None:
            counts = [len(training_rows[row].logprobs) for row in part]
            weights_N = np.repeat(np.array([positive_weights[row] for row in part], np.float32), counts)
            microbatch = replace(microbatch, positive_weights_N=weights_N)
        return microbatch if config.max_staleness is None else _drop_stale_tokens(microbatch, config.max_staleness)

    return tuple(batch(part) for part in plan.microbatches[rank])


def _weigh_correct(rows: Rows, samples: TrainingSamples, config: PositiveNll) -> dict[int, float]:
    """Return the weight of each token of a sample in the mean over all tokens of the minibatch's correct completions,
    by row number. `rows` are the rows of the minibatch on all ranks. The weight is 0 for completions that are not
    correct."""
    correct_K = find_correct(samples, config.min_reward)
    total = sum(samples.trained_lengths[row] for row in rows if correct_K[row])
    return {row: 1 / total if correct_K[row] and total else 0.0 for row in rows}


def _drop_stale_tokens(batch: TrainingBatch, max_staleness: int) -> TrainingBatch:
    """Set the loss weights of tokens that are more than `max_staleness` policy versions old to 0, without changing the
    denominators of the loss."""
    stale_N, positive_N = batch.staleness_N > max_staleness, batch.positive_weights_N
    return replace(
        batch,
        weights_N=np.where(stale_N, np.float32(0), batch.weights_N),
        positive_weights_N=None if positive_N is None else np.where(stale_N, np.float32(0), positive_N),
    )
