"""Repetition of updates whose optimizer state was lost, from an older state and the stored training samples."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from rheostat.infra.errors import Damaged
from rheostat.models.records.versions import ModelVersion, StageTimer
from rheostat.models.records.work import UpdateWork
from rheostat.models.training.ranks import Ranks, any_rank
from rheostat.models.training.states import StateWriter
from rheostat.models.training.trainer import Trainer
from rheostat.models.training.versions import ResidentTrainer

NEAR: Final = 0.25
"""Maximum distance between the weights of a committed update and those of its repetition, as a fraction of the distance
that the update moved the weights."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Repeater:
    """Restores a trainer by repeating updates, and checks that each repetition reproduces the committed weights.

    On CPUs, with the layout of ranks of the first time, the bits must be equal. On GPUs, or after the number of ranks
    has changed, sums are rounded differently. Then the weights may differ by `NEAR` times the length of the update, the
    committed weights are kept, and only the optimizer's moments come from the repetition.
    """

    states: StateWriter
    ranks: Ranks

    def restore(
        self,
        resident: ResidentTrainer,
        versions: Sequence[ModelVersion],
        work: UpdateWork,
        *,
        learn: Callable[[UpdateWork, Trainer], object],
        timer: StageTimer,
    ) -> tuple[Trainer, float | None]:
        """Load the first of `versions`, and repeat the updates `work.past` with `learn`, which lead to the other
        versions. Collective: every rank must call this.

        Return the trainer, and the largest distance between repeated and committed weights as a fraction of the
        update's length, or None if all bits are equal. Raises Damaged if a repetition differs too much.
        """
        trainer = resident.load(versions[0])
        timer.end("load")
        exact, worst = self.ranks.repeats_exactly and not work.was_moved, 0.0
        for update, expected in zip(work.past, versions[1:], strict=True):
            logger.info("iteration %d: the update is computed again from its stored samples", update.iteration)
            if exact:
                learn(update, trainer)
                version = resident.describe(versions[0], version=expected.version)
                if update.keeps_state:
                    version = replace(version, state=self.states.begin(self.states.copy(trainer)))
                _check_equal(version, expected, iteration=update.iteration)
            else:
                start = _copy_weights(trainer)
                learn(update, trainer)
                repeated = _copy_weights(trainer)
                trainer = resident.load_keeping_moments(expected)
                worst = max(worst, self._check_near(trainer.weights(), repeated, start=start, expected=expected))
        timer.end("again")
        return trainer, worst if work.past and not exact else None

    def _check_near(
        self,
        committed: Sequence[Tensor],
        repeated: Sequence[Tensor],
        *,
        start: Sequence[Tensor],
        expected: ModelVersion,
    ) -> float:
        off, length = _compute_distance(committed, repeated), _compute_distance(committed, start)
        share = 0.0 if not off else off / length if length else math.inf
        if any_rank(not share <= NEAR, self.ranks):
            raise Damaged(
                f"policy {expected.version}: its update was repeated to restore the optimizer state. The new weights "
                f"differ from the stored ones by {share:.0%} of the update's length, but only {NEAR:.0%} is allowed. "
                "Continue with the GPUs, the libraries and the pools.update_ranks with which the policy was trained"
            )
        return share


def _check_equal(found: ModelVersion, expected: ModelVersion, *, iteration: int) -> None:
    """Raise Damaged if repeating an iteration's update gave the version `found` instead of the committed version
    `expected`."""
    if found != expected:
        raise Damaged(
            f"iteration {iteration}: the update was computed again from its stored samples to restore the optimizer "
            f"state, but the result is {_describe(found)} instead of the stored {_describe(expected)}. The samples, "
            "the code or the libraries have changed. Use the versions with which the iteration was trained"
        )


def _describe(version: ModelVersion) -> str:
    state = "" if version.state is None else f" with state {version.state.digest}"
    return f"weights {version.digest}{state}"


def _copy_weights(trainer: Trainer) -> list[Tensor]:
    return [weight.clone() for weight in trainer.weights()]


def _compute_distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    squares = [float((a.float() - b.float()).square().sum()) for a, b in zip(one, other, strict=True)]
    return math.sqrt(sum(squares))
