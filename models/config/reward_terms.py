"""Configuration of rewards that are rules, and what every reward term has. Torch-free."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, field_validator

from infra.config import Settings

Valued = Literal["completion", "step", "token"]

Aggregated = Literal["mean", "sum", "min"]


class RewardTerm(Settings):
    """What all reward terms share."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")] | None = None
    """Column name of this term; by default its kind."""
    weight: float = 1.0
    """Factor of this term in the total."""

    checks_references: ClassVar[bool] = False
    """Whether it raises ValueError at a reference that it cannot compare with: known before anything is generated."""

    @property
    def valued(self) -> Valued:
        """What it gives a number of its own."""
        return "completion"

    @property
    def values_steps(self) -> bool:
        """Whether it values steps or tokens rather than whole completions."""
        return self.valued != "completion"

    @property
    def aggregated(self) -> Aggregated:
        """How the numbers of steps or tokens become one where a number per completion is wanted."""
        raise AssertionError("only what values steps or tokens has several numbers")


# ---- steps
class BlankLines(Settings):
    """A step ends at a blank line, unless it is inside a code or math fence (CAPO, arXiv 2508.02298)."""

    kind: Literal["blank_lines"] = "blank_lines"


class PatternSteps(Settings):
    """A step ends where a pattern ends; what it matches belongs to the step before it."""

    kind: Literal["pattern"] = "pattern"
    pattern: str
    """Regular expression of what separates steps."""

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        if compiled.fullmatch(""):
            raise ValueError(f"{pattern!r} matches where there is nothing: every character would be a step")
        return pattern


Segmentation = Annotated[BlankLines | PatternSteps, Field(discriminator="kind")]


# ---- rules
class NumericReward(RewardTerm):
    """1 if the number in the completion equals the number in the reference, else 0."""

    checks_references = True

    kind: Literal["numeric"] = "numeric"
    pattern: str = r"####\s*(-?[\d,]*\.?\d+)"
    """Regular expression whose last match's first group is the answer, in completion and reference alike."""


class MathReward(RewardTerm):
    """1 if math-verify finds completion and reference equal, else 0.

    What is too large to be evaluated, such as 9^(9^9), equals only what is spelt alike.
    """

    checks_references = True

    kind: Literal["math"] = "math"


class RegexReward(RewardTerm):
    """1 if the pattern is found in the completion, else 0."""

    kind: Literal["regex"] = "regex"
    pattern: str
    """Regular expression searched for."""


class TargetReward(RewardTerm):
    """Any function `reward(prompt: str, completion: str, answer: str, **options)`.

    It returns a number; with `per = "step"` or `"token"` it is also given `steps: list[str]` or `tokens: list[str]`,
    which concatenated are the completion, and returns as many numbers.
    """

    kind: Literal["target"] = "target"
    target: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """`pkg.mod:function`."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments given to the function."""
    per: Valued = "completion"
    """What gets a number of its own."""
    steps: Segmentation = BlankLines()
    """What a step is."""
    aggregate: Aggregated = "mean"
    """How the numbers of steps or tokens become one where a number per completion is wanted."""

    @property
    def valued(self) -> Valued:
        """What it gives a number of its own."""
        return self.per

    @property
    def aggregated(self) -> Aggregated:
        """How the numbers of steps or tokens become one."""
        return self.aggregate


BuiltInReward = NumericReward | MathReward | RegexReward

RuleReward = BuiltInReward | TargetReward
