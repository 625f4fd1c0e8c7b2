"""What a reward finds about a completion: a number, or one for each step or token; or why there is none."""

from dataclasses import dataclass
from typing import Final

from models.text.steps import StepValues

Value = float | StepValues
UNSPELT: Final = "the completion's tokens do not spell its text"
"""The reason that a completion has no values of steps or tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a reward sees."""

    prompt: str
    completion: str
    answer: str
    tokens: tuple[str, ...] | None = None
    """Texts of the completion's tokens; none where nobody asks, or where they do not spell the completion."""
