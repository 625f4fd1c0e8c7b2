"""What a judge is asked about one shard of completions: so many votes each, and the canaries. Torch-free.

Seeds name what they are for, so that votes do not depend on which worker asks, in which order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from models.judges import Question
from models.judges.prompts import question_text
from models.rewards.config import Canaries, JudgeReward
from models.seeds import derive_seed

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
        """Ask for the vote; every attempt has a seed of its own, for the fence and for the answer."""
        it = self.judged
        name = "canary" if it.prompt_row == CANARY else "judge"
        seed = derive_seed(name, *seed_parts, it.origin, it.sample, self.vote, attempt)
        text = question_text(reward, prompt=it.prompt, completion=it.completion, answer=it.answer, seed=seed)
        return Question(text=text, seed=seed)


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
        )
