"""When a judge cannot be trusted any more: pure functions over the metrics of an iteration. Torch-free."""

from collections.abc import Mapping, Sequence

from infra.errors import Quarantined
from models.rewards.config import JudgeReward, ScoringConfig, StepsVerdict


def check_judges(
    scoring: ScoringConfig, verdicts: Mapping[str, Sequence[Mapping[str, float]]], *, iteration: int
) -> None:
    """Raise Quarantined if too many of a judge's answers cannot be used, or too many known-bad answers pass.

    `verdicts` has by term the metrics of each shard of verdicts of the iteration, as the workers returned them.
    """
    for term, reward in scoring.served.items():
        if isinstance(reward, JudgeReward):
            _check_judge(term, reward, _sums(verdicts.get(term, ())), iteration)


def _check_judge(term: str, reward: JudgeReward, sums: Mapping[str, float], iteration: int) -> None:
    invalid, answers = sums["invalid"], sums["answers"]
    if isinstance(reward.verdict, StepsVerdict):
        _check_critiques(term, reward, sums, iteration)
    elif invalid > reward.max_invalid * answers:
        raise Quarantined(
            f"iteration {iteration}: {invalid:.0f} of {answers:.0f} answers of judge {term} have no valid verdict "
            f"after {reward.retries} retries, expected at most {reward.max_invalid:.1%} (max_invalid)"
        )
    passed, canaries = sums["canaries_passed"], sums["canaries"]
    if reward.canaries is not None and passed > reward.canaries.max_passing * canaries:
        raise Quarantined(
            f"iteration {iteration}: judge {term} let {passed:.0f} of {canaries:.0f} known-bad answers pass, "
            f"expected at most {reward.canaries.max_passing:.1%} (canaries.max_passing)"
        )


def _check_critiques(term: str, reward: JudgeReward, sums: Mapping[str, float], iteration: int) -> None:
    """Count completions, not answers: the votes that can be read make up for one that cannot."""
    unusable, completions = sums["unusable"], sums["completions"]
    if unusable > reward.max_invalid * completions:
        raise Quarantined(
            f"iteration {iteration}: {unusable:.0f} of {completions:.0f} completions have no critique of judge {term} "
            f"that can be read, after {reward.retries} retries, expected at most {reward.max_invalid:.1%} (max_invalid)"
        )


def _sums(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = ("answers", "invalid", "canaries", "canaries_passed", "completions", "unusable")
    return {name: sum(shard.get(name, 0.0) for shard in metrics) for name in names}
