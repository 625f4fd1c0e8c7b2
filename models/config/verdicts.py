"""Configuration of the verdicts of judges: the form of an answer, and its conversion to a number. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rheostat.infra.config import Settings
from rheostat.models.config.reward_terms import BlankLines, Segmentation, StepAggregation


class ScoreVerdict(Settings):
    """Verdict that is a number in a range. The reward is the position of this number in the range, from 0 to 1."""

    kind: Literal["score"] = "score"
    score_range: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    is_graded: ClassVar[bool] = True

    low: float = 0
    """Worst score, which becomes a reward of 0."""
    high: float = 10
    """Best score, which becomes a reward of 1."""
    pattern: str = r"(?i)score(?:\s*[:=])?\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score. It must match exactly once in the judge's answer; otherwise
    the answer is invalid."""

    @model_validator(mode="after")
    def _require_range(self) -> "ScoreVerdict":
        if not self.low < self.high:
            raise ValueError(
                f"the lowest score, low, is {self.low:g} and the highest score, high, is {self.high:g}, but low must "
                "be less than high. Raise high"
            )
        return self


class ChoiceVerdict(Settings):
    """Verdict that is one of several possible answers."""

    kind: Literal["choice"] = "choice"
    choices: Annotated[dict[str, float], Field(min_length=2)] = {"yes": 1.0, "no": 0.0}
    """Possible answers of the judge, each with the reward that it gives."""
    constrained: bool = True
    """Whether the judge's engine is restricted to generating one of these answers. Engines that cannot be restricted
    are refused."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest reward of the possible answers."""
        return min(self.choices.values()), max(self.choices.values())

    @property
    def is_graded(self) -> bool:
        """Whether the possible answers have more than two different rewards."""
        return len({*self.choices.values()}) > 2


class LogprobVerdict(Settings):
    """Verdict computed from the judge's probabilities of two answers, without sampling: the reward is P(yes) / (P(yes)
    + P(no))."""

    kind: Literal["logprob"] = "logprob"
    yes: str = "yes"
    """Answer whose probability raises the reward towards 1."""
    no: str = "no"
    """Answer whose probability lowers the reward towards 0."""

    score_range: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    is_graded: ClassVar[bool] = True


class StepsVerdict(Settings):
    """Verdict that lists the wrong steps of the completion (CAPO, arXiv 2508.02298). A step flagged as wrong has the
    value -1, other steps have the value 0.

    The judge reads the completion with each step in `<step_k>` tags. The last `<incorrect_steps>` tag of its answer
    lists the wrong steps. An answer that cannot be parsed is excluded from the vote and never counts as "no errors".
    """

    kind: Literal["steps"] = "steps"
    steps: Segmentation = BlankLines()
    """Method that divides the completion into steps."""
    prompt: Literal["audit", "published"] = "audit"
    """Instruction for the judge if no template is set: "audit" asks for every wrong step in any solution, "published"
    (as in the paper) asks for wrong steps only if the solution is wrong."""
    reference: bool = True
    """Whether the judge's prompt contains the reference answer."""
    flags: Literal["intersection", "majority", "union", "average"] = "intersection"
    """Rule by which several votes flag a step as wrong: if all votes list it ("intersection"), if a majority lists it
    ("majority"), or if any vote lists it ("union"). "average" flags no step: the value of a step is minus the share of
    the votes that list it."""
    ties: Literal["flag", "pass"] = "flag"
    """Decision with `flags = "majority"` on a step that exactly half of the votes list as wrong: "flag" it, or let it
    "pass"."""
    aggregate: StepAggregation = "mean"
    """Method that combines the values of the steps into one number, where one number per completion is needed (such as
    metrics and evaluations)."""

    is_graded: ClassVar[bool] = True

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest possible value of a completion: -1 if all steps are wrong, 0 if no step is wrong. None if
        values are summed, because sums have no lower limit."""
        return None if self.aggregate == "sum" else (-1.0, 0.0)


VerdictConfig = Annotated[ScoreVerdict | ChoiceVerdict | LogprobVerdict | StepsVerdict, Field(discriminator="kind")]


class RubricVerdict(Settings):
    """Verdict on each criterion of the problem's rubric (`data.rubric_column`), combined by the weights of the
    criteria.

    The judge answers one question for each criterion. The reward is the sum of weight times value of all criteria,
    divided by the sum of the positive weights, and clipped to 0 to 1. Criteria with negative weights describe mistakes.
    """

    kind: Literal["rubric"] = "rubric"
    score_range: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    is_graded: ClassVar[bool] = True

    criterion: Annotated[ChoiceVerdict | LogprobVerdict | ScoreVerdict, Field(discriminator="kind")] = ChoiceVerdict()
    """Format of the judge's verdict on a single criterion, and its conversion to a value from 0 to 1."""

    @model_validator(mode="after")
    def _require_unit_range(self) -> "RubricVerdict":
        low, high = self.criterion.score_range or (0.0, 1.0)
        if low < 0 or high > 1:
            raise ValueError(
                f"criterion must have values from 0 to 1, but its choices have values from {low:g} to {high:g}. Change "
                "the values"
            )
        return self
