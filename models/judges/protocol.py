"""What every judge is: questions in, answers out. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Question:
    """What a judge is asked once."""

    text: str
    seed: int
    """Of everything that is drawn for the answer, where whoever answers takes seeds."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: a text, or how likely each choice is, or why there is neither."""

    text: str | None
    probabilities: dict[str, float] | None
    """By the verdict's choices (`yes` and `no` of a logprob verdict), from 0 to 1, not necessarily summing to 1."""
    tokens: int
    """Written by the judge, as far as is known."""
    error: str | None
    """Why there is no answer, in one line; such an answer is invalid."""


class Judge(Protocol):
    """Answers about completions."""

    @property
    def progress(self) -> int:
        """A count that moves while questions are answered; another thread may read it."""

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Return one answer per question, in order. What one question does is its own error, never another's."""
