"""Which groups an iteration trains on where sampling is dynamic (DAPO, arXiv 2503.14476, section 3.2).

Shapes: N completions, G groups in the order of their prompt rows.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from models.algorithms.grpo import Floats, GroupStatistics, Integers, group_statistics

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an iteration wants of its groups."""

    target: int
    """Informative groups."""
    metric: str
    """Raw reward term by which a group is informative."""
    fill: bool
    """Whether uninformative groups make up for informative ones that are wanting."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What becomes of each group; where none of the masks is true, it was looked at and taught nothing."""

    informative_G: Mask
    trained_G: Mask
    filling_G: Mask
    """Stand in a minibatch without any weight."""
    surplus_G: Mask
    first_G: Integers
    """Index of each group's first completion."""
    shortfall: int

    def metrics(self) -> dict[str, float]:
        """Count groups by what becomes of them."""
        return {
            "issued_groups": float(len(self.first_G)),
            "informative_groups": float(self.informative_G.sum()),
            "trained_groups": float(self.trained_G.sum()),
            "filling_groups": float(self.filling_G.sum()),
            "surplus_groups": float(self.surplus_G.sum()),
            "shortfall_groups": float(self.shortfall),
        }


def select_groups(groups: GroupStatistics, metric: GroupStatistics, wanted: Wanted) -> Selection:
    """Train on the first informative groups in the order of completions, as many as are wanted.

    `groups` are statistics of the total rewards and `metric` of the raw term, over the same completions.
    """
    informative_G = groups.informative_G & metric.informative_G
    first_G = _first(groups)
    trained_G = _earliest(informative_G, first_G, wanted.target)
    shortfall = wanted.target - int(trained_G.sum())
    spare_G = ~informative_G & (groups.count_G > 0)
    return Selection(
        informative_G=informative_G,
        trained_G=trained_G,
        filling_G=_earliest(spare_G, first_G, shortfall if wanted.fill else 0),
        surplus_G=informative_G & ~trained_G,
        first_G=first_G,
        shortfall=shortfall,
    )


def informative_prompts(scores: pa.Table, metric: str) -> list[int]:
    """Return the prompt rows of a score table's informative groups: raw metric and total reward tell better from worse.

    A completion without a total reward cannot be trained and does not count.
    """
    rewards_N, ids_N = _floats(scores["reward"]), scores["prompt_row"].to_numpy()
    raw_N = np.where(np.isfinite(rewards_N), _floats(scores[f"reward_{metric}"]), np.nan)
    groups, raw = group_statistics(rewards_N, ids_N), group_statistics(raw_N, ids_N)
    rows: list[int] = np.unique(ids_N)[groups.informative_G & raw.informative_G].tolist()
    return rows


def _first(groups: GroupStatistics) -> Integers:
    first_G: Integers = np.unique(groups.group_N, return_index=True)[1]
    return first_G


def _earliest(among_G: Mask, first_G: Integers, count: int) -> Mask:
    order = np.argsort(first_G)
    chosen_G = np.zeros_like(among_G)
    chosen_G[order[among_G[order]][:count]] = True
    return chosen_G


def _floats(column: pa.ChunkedArray) -> Floats:
    return np.array(column.to_numpy(), dtype=np.float64)
