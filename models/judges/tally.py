"""From a shard of verdicts to one reward per completion, or one per step of it. Torch-free."""

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from infra.errors import Damaged
from models.judges.ballots import CANARY
from models.judges.critiques import flag_weights
from models.judges.verdicts import FLAGGED, Judgement, count_votes
from models.rewards.config import StepsVerdict
from models.steps import StepValues, segment

Place = tuple[int, int]
"""Prompt row and sample."""


def tally(
    verdicts: pa.Table, rollouts: pa.Table, *, vote: Literal["mean", "median", "majority"], term: str
) -> list[Judgement]:
    """Return the reward of each completion from the last attempts of its votes; without a valid one, why not.

    The two tables must be about the same completions. Raises Damaged otherwise.
    """
    return [_count(votes, vote) for votes in _cast(verdicts, rollouts, term)]


def tally_steps(verdicts: pa.Table, rollouts: pa.Table, *, verdict: StepsVerdict, term: str) -> list[StepValues]:
    """Return the value of each step by the usable critiques of a completion; without any, no step is flagged.

    Raises Damaged as `tally` does.
    """
    texts = rollouts["completion"].to_pylist()
    return [
        step_values(text, [judgement.steps for judgement in votes], verdict)
        for text, votes in zip(texts, _cast(verdicts, rollouts, term), strict=True)
    ]


def step_values(completion: str, critiques: Sequence[Sequence[int] | None], verdict: StepsVerdict) -> StepValues:
    """Have critiques vote on the steps of a completion; those that are none could not be read."""
    steps = segment(completion, verdict.steps)
    usable = [critique for critique in critiques if critique is not None]
    weights = flag_weights(usable, verdict, num_steps=len(steps))
    return StepValues(tuple(map(len, steps)), tuple(FLAGGED * weight if weight else 0.0 for weight in weights))


def _cast(verdicts: pa.Table, rollouts: pa.Table, term: str) -> list[list[Judgement]]:
    """Collect the votes on each completion, in the rollouts' order."""
    places = list(zip(rollouts["prompt_row"].to_pylist(), rollouts["sample"].to_pylist(), strict=True))
    cast = _last_attempts(verdicts)
    if set(cast) != set(places):
        unpaired = min(set(cast) ^ set(places))
        raise Damaged(
            f"verdicts of {term}: expected those of {len(places)} completions, found {len(cast)}; "
            f"prompt row {unpaired[0]}, sample {unpaired[1]} is on one side only"
        )
    return [cast[place] for place in places]


def _last_attempts(verdicts: pa.Table) -> dict[Place, list[Judgement]]:
    """Collect each vote's last judgement by completion; rows are ordered by vote and attempt, canaries are left out."""
    columns = ("prompt_row", "sample", "vote", "value", "error", "steps")
    rows = zip(*(verdicts[name].to_pylist() for name in columns), strict=True)
    last = {
        (row, sample, vote): Judgement(value, error, None if steps is None else tuple(steps))
        for row, sample, vote, value, error, steps in rows
        if row != CANARY
    }
    cast: dict[Place, list[Judgement]] = {}
    for (row, sample, _), judgement in last.items():
        cast.setdefault((row, sample), []).append(judgement)
    return cast


def _count(votes: Sequence[Judgement], vote: Literal["mean", "median", "majority"]) -> Judgement:
    value = count_votes([judgement.value for judgement in votes], vote)
    return Judgement(value, votes[-1].error if value is None else None)
