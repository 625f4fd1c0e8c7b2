"""Selection of the groups that an iteration trains on under dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

Shapes: N completions, G groups in the order of their prompt rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rheostat.models.algorithms.advantages import groups_that_differ, informative_groups
from rheostat.models.algorithms.experience import ScoredGroups
from rheostat.models.algorithms.ragged import group_statistics
from rheostat.models.config.algorithms import AlgorithmConfig
from rheostat.models.credit.inputs import (
    TermColumns,
    has_nonfinite_logprobs,
    has_nonfinite_scores,
    read_auxiliary_scores,
    scored_groups,
)
from rheostat.models.credit.turns import GeneratedTokens
from rheostat.models.records.columns import Integers, Mask
from rheostat.models.records.model_input import completion_lengths


@dataclass(frozen=True, slots=True)
class GroupQuota:
    """Number and kind of groups that dynamic sampling collects for an iteration."""

    target: int
    """Required number of informative groups (groups with unequal rewards)."""
    metric: str
    """Name of the reward term whose raw scores must also differ within an informative group, in addition to the total
    rewards."""
    fill: bool
    """Whether missing groups are replaced by uninformative groups. These complete the minibatches, but have no weight
    in the loss."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Masks over the groups (G) that select the groups to train on, to complete a minibatch with, and to keep for the
    next iteration. A group in none of the masks is uninformative and discarded."""

    informative_G: Mask
    """Groups with unequal rewards, which give a training signal."""
    trained_G: Mask
    """Informative groups on which the iteration trains, with weight in the loss."""
    filling_G: Mask
    """Uninformative groups that only complete a minibatch, without weight in the loss."""
    surplus_G: Mask
    """Informative groups beyond the target number, which are kept for the next iteration."""
    first_G: Integers
    """Index of each group's first completion among all completions."""
    shortfall: int
    """Number of informative groups by which the target is missed, or 0 if the target is reached."""

    def metrics(self) -> dict[str, float]:
        """Return, as metrics, the number of all groups and of the informative, trained, filling (to complete a
        minibatch), surplus and missing groups."""
        return {
            "issued_groups": float(len(self.first_G)),
            "informative_groups": float(self.informative_G.sum()),
            "trained_groups": float(self.trained_G.sum()),
            "filling_groups": float(self.filling_G.sum()),
            "surplus_groups": float(self.surplus_G.sum()),
            "shortfall_groups": float(self.shortfall),
        }


def select_groups(scored: ScoredGroups, algorithm: AlgorithmConfig, quota: GroupQuota) -> Selection:
    """Select the groups that an iteration trains on: the first informative groups in the order of completions, up to
    `quota.target`. Further informative groups become surplus."""
    informative_G = informative_by(scored, algorithm, quota.metric)
    first_G = scored.first_completions
    trained_G = _earliest(informative_G, first_G, quota.target)
    shortfall = quota.target - int(trained_G.sum())
    has_rewards_G = np.bincount(scored.group_N[scored.is_scored], minlength=scored.num_groups) > 0
    return Selection(
        informative_G=informative_G,
        trained_G=trained_G,
        filling_G=_earliest(~informative_G & has_rewards_G, first_G, shortfall if quota.fill else 0),
        surplus_G=informative_G & ~trained_G,
        first_G=first_G,
        shortfall=shortfall,
    )


def informative_by(scored: ScoredGroups, algorithm: AlgorithmConfig, metric: str) -> Mask:
    """Return a mask of the groups with unequal total rewards and unequal raw scores in the reward term named `metric`
    (G)."""
    return informative_groups(scored, algorithm) & groups_that_differ(scored, algorithm, metric)


def informative_prompts(
    rollouts: pa.Table, scores: pa.Table, *, terms: Sequence[TermColumns], algorithm: AlgorithmConfig, metric: str
) -> list[int]:
    """Return the prompt rows of the informative groups of a rollout shard, by the same rule as in the credit stage.

    Completions without a total reward and tokens that the policy did not generate are ignored, because they cannot be
    trained on.
    """
    scored = GeneratedTokens.of(rollouts).select_groups(scored_groups(scores, completion_lengths(rollouts), terms))
    rows: list[int] = scored.prompts_G[informative_by(scored, algorithm, metric)].tolist()
    return rows


def group_columns(
    rollouts: pa.Table,
    scores: pa.Table,
    auxiliary_scores: Sequence[pa.Table],
    *,
    terms: Sequence[TermColumns],
    informative: Callable[[ScoredGroups], Mask] | None,
) -> dict[str, pa.Array]:
    """Return four columns with statistics of each completion's group, computed over the completions that can be trained
    on.

    `group_size` is the number of these completions. `group_reward_mean` and `group_reward_std` (population standard
    deviation) are null if there are none. `group_informative` is the result of the function `informative`, or null if
    `informative` is None.
    """
    lengths_N = completion_lengths(rollouts)
    unusable_N = has_nonfinite_logprobs(rollouts["logprobs"], lengths_N) | has_nonfinite_scores(
        read_auxiliary_scores(auxiliary_scores, lengths_N), lengths_N
    )
    scored = scored_groups(scores, lengths_N, terms, unusable_N=unusable_N)
    groups, group_N = group_statistics(scored.total_N, scored.group_N, scored.num_groups), scored.group_N
    is_empty_N = groups.count_G[group_N] == 0
    informative_G = None if informative is None else informative(GeneratedTokens.of(rollouts).select_groups(scored))
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
