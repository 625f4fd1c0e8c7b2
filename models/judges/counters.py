"""What a shard of verdicts is in numbers: sums, which add up over shards. Torch-free."""

from collections.abc import Mapping, Sequence

from models.judges.ballots import CANARY, Judged
from models.judges.tally import step_values
from models.judges.verdicts import Judgement, count_votes
from models.rewards.config import JudgeReward, StepsVerdict

Votes = Mapping[Judged, Sequence[Judgement]]
"""Of everything that a judge was asked about, the last judgement of each vote."""


def count(votes: Votes, reward: JudgeReward) -> dict[str, float]:
    """Count votes and what came of them; `answers` and `invalid` are votes on completions, attempts aside."""
    values = [vote.value for judged, cast in votes.items() if judged.prompt_row != CANARY for vote in cast]
    passed = [_passes(judged, cast, reward) for judged, cast in votes.items() if judged.prompt_row == CANARY]
    return {
        "answers": float(len(values)),
        "invalid": float(values.count(None)),
        "canaries": float(len(passed) - passed.count(None)),
        "canaries_passed": float(passed.count(True)),
        **(_count_steps(votes, reward.verdict) if isinstance(reward.verdict, StepsVerdict) else {}),
    }


def _passes(judged: Judged, cast: Sequence[Judgement], reward: JudgeReward) -> bool | None:
    """Say whether a known-bad answer passed; none where the judge said nothing valid about it."""
    if reward.canaries is None or all(vote.value is None for vote in cast):
        return None
    if isinstance(reward.verdict, StepsVerdict):
        return not any(step_values(judged.completion, [vote.steps for vote in cast], reward.verdict).values)
    value = count_votes([vote.value for vote in cast], reward.vote)
    return value is not None and value >= reward.canaries.passing


def _count_steps(votes: Votes, verdict: StepsVerdict) -> dict[str, float]:
    """Count completions without a usable critique, steps of the others, and those that the votes flag."""
    asked = {judged: cast for judged, cast in votes.items() if judged.prompt_row != CANARY}
    critiques = {judged: [vote.steps for vote in cast] for judged, cast in asked.items()}
    usable = {judged: cast for judged, cast in critiques.items() if any(steps is not None for steps in cast)}
    values = [step_values(judged.completion, cast, verdict).values for judged, cast in usable.items()]
    return {
        "completions": float(len(asked)),
        "unusable": float(len(asked) - len(usable)),
        "steps": float(sum(map(len, values))),
        "flagged_steps": float(sum(value < 0 for row in values for value in row)),
        "dropped_indices": float(sum(vote.dropped for cast in asked.values() for vote in cast)),
    }
