"""A judge's work on one shard of completions: its questions, the rewards that its votes make, its counters. Torch-free.

There are as many questions per completion as votes, and the canaries. Seeds name what they are for, so that votes do
not depend on which worker asks, in which order. Counters are sums, which add up over shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import pyarrow as pa

from infra.errors import Damaged
from models.config.judges import Canaries, JudgeReward, StepsVerdict
from models.judges.prompts import question_text
from models.judges.verdicts import FLAGGED, Judgement, Question, count_votes, flag_weights
from models.records.seeds import derive_seed
from models.text.steps import StepValues, segment

CANARY: Final = -1
"""Prompt row of a canary in a shard of verdicts."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A completion, or a canary that takes its place."""

    prompt_row: int
    sample: int
    prompt: str
    completion: str
    answer: str
    origin: int
    """Row of the prompt, of a canary too."""
    images: tuple[str, ...] = ()
    """Digests of what the prompt shows."""
    episode: tuple[tuple[str, str], ...] = ()
    """Of an episode, role and text of what the policy wrote and of what was said to it, in order."""

    @property
    def says_nothing(self) -> bool:
        """Whether the completion is empty; a judge is not asked about nothing."""
        return not self.completion.strip()


@dataclass(frozen=True, slots=True)
class Ballot:
    """One vote on one completion."""

    judged: Judged
    vote: int

    def question(self, reward: JudgeReward, *, seed_parts: tuple[int | str, ...], attempt: int) -> Question:
        """Ask for the vote; every attempt has a seed of its own, for the answer and for the fence of a template.

        Default texts have one fence per completion, so that all votes on it ask the same and are read in one go.
        """
        it = self.judged
        name = "canary" if it.prompt_row == CANARY else "judge"
        seed = derive_seed(name, *seed_parts, it.origin, it.sample, self.vote, attempt)
        fence = derive_seed(name, *seed_parts, it.origin, it.sample) if reward.template is None else seed
        text = question_text(
            reward, prompt=it.prompt, completion=it.completion, answer=it.answer, seed=fence, episode=it.episode
        )
        return Question(text=text, seed=seed, images=it.images if reward.images == "prompt" else ())


def episodes_of(rollouts: pa.Table) -> list[tuple[tuple[str, str], ...]]:
    """Read what was written and said in each episode, without the prompt's messages; nothing of other completions."""
    found = []
    for turns, messages in zip(rollouts["turns"].to_pylist(), rollouts["messages"].to_pylist(), strict=True):
        said = [(each["role"], each["content"]) for each in messages or ()]
        wrote = [place for place, (role, _) in enumerate(said) if role == "assistant"][-len(turns or ()) :]
        found.append(tuple(said[wrote[0] :]) if turns and wrote else ())
    return found


def with_canaries(completions: Sequence[Judged], canaries: Canaries | None) -> list[Judged]:
    """Put the canaries first: bad answers to the shard's first prompts, in turn."""
    return [*(_canaries(completions, canaries) if canaries and completions else ()), *completions]


def _canaries(completions: Sequence[Judged], canaries: Canaries) -> Iterator[Judged]:
    prompts = list({judged.prompt_row: judged for judged in reversed(completions)}.values())[::-1]
    for number in range(canaries.per_shard):
        source = prompts[number % len(prompts)]
        yield Judged(
            prompt_row=CANARY,
            sample=number,
            prompt=source.prompt,
            completion=canaries.answers[number % len(canaries.answers)],
            answer=source.answer,
            origin=source.prompt_row,
            images=source.images,
        )


VotePlace = tuple[int, int]
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


def _last_attempts(verdicts: pa.Table) -> dict[VotePlace, list[Judgement]]:
    """Collect each vote's last judgement by completion; rows are ordered by vote and attempt, canaries are left out."""
    columns = ("prompt_row", "sample", "vote", "value", "error", "steps")
    rows = zip(*(verdicts[name].to_pylist() for name in columns), strict=True)
    last = {
        (row, sample, vote): Judgement(value, error, None if steps is None else tuple(steps))
        for row, sample, vote, value, error, steps in rows
        if row != CANARY
    }
    cast: dict[VotePlace, list[Judgement]] = {}
    for (row, sample, _), judgement in last.items():
        cast.setdefault((row, sample), []).append(judgement)
    return cast


def _count(votes: Sequence[Judgement], vote: Literal["mean", "median", "majority"]) -> Judgement:
    value = count_votes([judgement.value for judgement in votes], vote)
    return Judgement(value, votes[-1].error if value is None else None)


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
