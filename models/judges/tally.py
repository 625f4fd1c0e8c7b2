"""From a shard of verdicts to one reward per completion. Torch-free."""

from collections.abc import Sequence
from typing import Literal

import pyarrow as pa

from infra.errors import Damaged
from models.judges.ballots import CANARY
from models.judges.verdicts import Judgement, count_votes

Place = tuple[int, int]
"""Prompt row and sample."""


def tally(
    verdicts: pa.Table, rollouts: pa.Table, *, vote: Literal["mean", "median", "majority"], term: str
) -> list[Judgement]:
    """Return the reward of each completion from the last attempts of its votes; without a valid one, why not.

    The two tables must be about the same completions. Raises Damaged otherwise.
    """
    places = list(zip(rollouts["prompt_row"].to_pylist(), rollouts["sample"].to_pylist(), strict=True))
    cast = _last_attempts(verdicts)
    if set(cast) != set(places):
        unpaired = min(set(cast) ^ set(places))
        raise Damaged(
            f"verdicts of {term}: expected those of {len(places)} completions, found {len(cast)}; "
            f"prompt row {unpaired[0]}, sample {unpaired[1]} is on one side only"
        )
    return [_count(cast[place], vote) for place in places]


def _last_attempts(verdicts: pa.Table) -> dict[Place, list[Judgement]]:
    """Collect each vote's last judgement by completion; rows are ordered by vote and attempt, canaries are left out."""
    columns = ("prompt_row", "sample", "vote", "value", "error")
    rows = zip(*(verdicts[name].to_pylist() for name in columns), strict=True)
    last = {(row, sample, vote): Judgement(value, error) for row, sample, vote, value, error in rows if row != CANARY}
    cast: dict[Place, list[Judgement]] = {}
    for (row, sample, _), judgement in last.items():
        cast.setdefault((row, sample), []).append(judgement)
    return cast


def _count(votes: Sequence[Judgement], vote: Literal["mean", "median", "majority"]) -> Judgement:
    value = count_votes([judgement.value for judgement in votes], vote)
    return Judgement(value, votes[-1].error if value is None else None)
