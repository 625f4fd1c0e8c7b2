"""What credit was made from, in numbers.

Shapes: N completions, G groups.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.algorithms.experience import ScoredGroups
from models.algorithms.groups import Floats, Mask, group_statistics
from models.columns import floats, lengths_of
from models.records import FinishReason


def reward_metrics(scored: ScoredGroups, informative_G: Mask) -> dict[str, float]:
    """Describe rewards and groups; a group is counted with two rewards, and a mean over nothing is left out."""
    groups = group_statistics(scored.total_N, scored.group_N, scored.num_groups)
    missing, completions = int((~scored.is_scored).sum()), len(scored.total_N)
    comparable_G = groups.count_G >= 2
    metrics = {
        "prompts": float(scored.num_groups),
        "completions": float(completions),
        "missing": float(missing),
        "missing_fraction": missing / max(completions, 1),
        "groups": float(comparable_G.sum()),
        "informative_groups": float(informative_G.sum()),
        **_mean("reward_mean", scored.total_N),
        **({"reward_std": float(scored.total_N[scored.is_scored].std())} if scored.is_scored.any() else {}),
        **_mean("group_reward_std_mean", groups.std_G[comparable_G]),
    }
    for term in scored.terms:
        metrics |= _mean(f"term_{term.name}_mean", term.rewards_N)
    return metrics


def length_metrics(rollouts: pa.Table) -> dict[str, float]:
    """Describe all completions, missing ones too."""
    lengths_N = lengths_of(rollouts["completion_tokens"]).astype(np.float64)
    return _mean("length_mean", lengths_N) | _mean("truncated_fraction", truncated(rollouts).astype(np.float64))


def truncated(rollouts: pa.Table) -> Mask:
    """Find completions that the length limit ended."""
    truncated_N: Mask = pc.equal(rollouts["finish_reason"], FinishReason.LENGTH.value).to_numpy()
    return truncated_N


def missing_reasons(scores: pa.Table, unusable: Mapping[str, Mask]) -> Counter[str]:
    """Count why completions are missing, each for the first reason that it has."""
    missing_N = np.isnan(floats(scores["reward"]))
    reasons = Counter(error for error, missing in zip(scores["error"].to_pylist(), missing_N, strict=True) if missing)
    for reason, bad_N in unusable.items():
        reasons += Counter({reason: int((bad_N & ~missing_N).sum())})
        missing_N = missing_N | bad_N
    return reasons


def _mean(name: str, values_N: Floats) -> dict[str, float]:
    """Name the mean of what is not missing; where all is, there is none to name."""
    found_N = values_N[np.isfinite(values_N)]
    return {name: float(found_N.mean())} if len(found_N) else {}
