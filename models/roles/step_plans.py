"""Which optimizer steps an iteration takes on this rank: passes of samples, and the learning rate of each step."""

from collections.abc import Sequence
from dataclasses import replace

from models.batching import plan_steps
from models.objectives.config import UpdateConfig
from models.roles.ranks import Ranks
from models.roles.update_steps import StepPasses, prepare
from models.samples import Samples, weighted_lengths
from models.schedule import learning_rate
from models.work import UpdateWork


def policy_steps(samples: Samples, work: UpdateWork, *, config: UpdateConfig, ranks: Ranks) -> list[StepPasses]:
    """Plan the iteration's steps and lay this rank's passes out; a step without a token in the loss is left out."""
    planned = plan_steps(
        samples.groups,
        samples.lengths,
        minibatches=config.minibatches,
        ranks=ranks.world_size,
        microbatch_tokens=config.microbatch_tokens,
        seed=work.seed,
    )
    # Where tokens without weight are all that a step has, only momentum would move the weights.
    weighted = weighted_lengths(samples, config.max_staleness)
    plans = [plan for plan in planned if any(weighted[row] for row in plan.rows)]
    batches = prepare(samples, plans, config=config, rank=ranks.rank)
    rates = _rates(work, len(plans), config=config)
    return [StepPasses(batches=part, learning_rate=rate) for part, rate in zip(batches, rates, strict=True)]


def critic_steps(steps: Sequence[StepPasses], work: UpdateWork, *, config: UpdateConfig) -> list[StepPasses]:
    """The same passes with learning rates of the critic's own; `config` has its peak."""
    rates = _rates(work, len(steps), config=config)
    return [replace(step, learning_rate=rate) for step, rate in zip(steps, rates, strict=True)]


def _rates(work: UpdateWork, steps: int, *, config: UpdateConfig) -> list[float]:
    first = work.policy.version * config.minibatches
    return [
        learning_rate(
            first + index,
            work.total_iterations * config.minibatches,
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            schedule=config.schedule,
        )
        for index in range(steps)
    ]
