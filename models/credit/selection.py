"""Which groups an iteration trains on where sampling is dynamic (DAPO, arXiv 2503.14476, section 3.2).

Shapes: N completions, G groups in the order of their prompt rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from models.algorithms.advantages import groups_that_differ, informative_groups
from models.algorithms.experience import ScoredGroups
from models.algorithms.ragged import group_statistics
from models.config.algorithms import AlgorithmConfig
from models.credit.inputs import TermColumns, not_finite, read_estimates, scored_groups, unusable
from models.credit.turns import WrittenTokens
from models.records.columns import Integers, Mask
from models.records.model_input import completion_lengths


@dataclass(frozen=True, slots=True)
class GroupQuota:
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


def select_groups(scored: ScoredGroups, algorithm: AlgorithmConfig, wanted: GroupQuota) -> Selection:
    """Train on the first informative groups in the order of completions, as many as are wanted."""
    informative_G = informative_by(scored, algorithm, wanted.metric)
    first_G = scored.first_completions
    trained_G = _earliest(informative_G, first_G, wanted.target)
    shortfall = wanted.target - int(trained_G.sum())
    has_rewards_G = np.bincount(scored.group_N[scored.is_scored], minlength=scored.num_groups) > 0
    return Selection(
        informative_G=informative_G,
        trained_G=trained_G,
        filling_G=_earliest(~informative_G & has_rewards_G, first_G, shortfall if wanted.fill else 0),
        surplus_G=informative_G & ~trained_G,
        first_G=first_G,
        shortfall=shortfall,
    )


def informative_by(scored: ScoredGroups, algorithm: AlgorithmConfig, metric: str) -> Mask:
    """Find the groups that all rewards together and the raw metric alone tell better from worse (G)."""
    return informative_groups(scored, algorithm) & groups_that_differ(scored, algorithm, metric)


def informative_prompts(
    rollouts: pa.Table, scores: pa.Table, *, terms: Sequence[TermColumns], algorithm: AlgorithmConfig, metric: str
) -> list[int]:
    """Return the prompt rows of the informative groups of rollouts, by their scores, as credit will find them.

    A completion without a total reward cannot be trained and does not count, nor does what a policy did not write.
    """
    scored = WrittenTokens.of(rollouts).of_groups(scored_groups(scores, completion_lengths(rollouts), terms))
    rows: list[int] = scored.prompts_G[informative_by(scored, algorithm, metric)].tolist()
    return rows


def group_columns(
    rollouts: pa.Table,
    scores: pa.Table,
    estimates: Sequence[pa.Table],
    *,
    terms: Sequence[TermColumns],
    informative: Callable[[ScoredGroups], Mask] | None,
) -> dict[str, pa.Array]:
    """Describe the group of each completion as credit sees it, from the rewards of those that it can train.

    `group_size` counts these, and `group_reward_mean` and `group_reward_std`, the population's, are theirs; null where
    there is none. `group_informative` is what the function says; without one it is null.
    """
    lengths_N = completion_lengths(rollouts)
    unusable_N = not_finite(rollouts["logprobs"], lengths_N) | unusable(read_estimates(estimates, lengths_N), lengths_N)
    scored = scored_groups(scores, lengths_N, terms, unusable_N=unusable_N)
    groups, group_N = group_statistics(scored.total_N, scored.group_N, scored.num_groups), scored.group_N
    is_empty_N = groups.count_G[group_N] == 0
    informative_G = None if informative is None else informative(WrittenTokens.of(rollouts).of_groups(scored))
    return {
        "group_size": pa.array(groups.count_G[group_N], pa.int32()),
        "group_reward_mean": pa.array(groups.mean_G[group_N], pa.float64(), mask=is_empty_N),
        "group_reward_std": pa.array(groups.std_G[group_N], pa.float64(), mask=is_empty_N),
        "group_informative": pa.nulls(len(group_N), pa.bool_())
        if informative_G is None
        else pa.array(informative_G[group_N]),
    }


def _earliest(among_G: Mask, first_G: Integers, count: int) -> Mask:
    order = np.argsort(first_G)
    chosen_G = np.zeros_like(among_G)
    chosen_G[order[among_G[order]][:count]] = True
    return chosen_G
