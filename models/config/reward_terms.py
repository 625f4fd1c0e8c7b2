"""Configuration of rewards that are rules, and what every reward term has. Torch-free."""

import re
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from infra.config import Settings, Since
from infra.processes.functions import RunFunction
from infra.store.inputs import Location, Program
from infra.variants import Variant

Valued = Literal["completion", "step", "token", "turn"]

Aggregated = Literal["mean", "sum", "min"]


class RewardTerm(Variant):
    """What all reward terms share."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")] | None = None
    """Column name of this term; by default its kind."""
    weight: float = 1.0
    """Factor of this term in the total."""
    shift: Annotated[float, Since("0.1.0", before=0.0)] = 0.0
    """What is taken from its number before the factor; a soup takes the mean under the start."""
    scale: Annotated[float, Field(gt=0), Since("0.1.0", before=1.0)] = 1.0
    """By what that is divided; a soup divides by the standard deviation under the start."""

    @property
    def valued(self) -> Valued:
        """What it gives a number of its own."""
        return "completion"

    @property
    def values_steps(self) -> bool:
        """Whether it values steps, tokens or turns rather than whole completions."""
        return self.valued != "completion"

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest score of one completion, or None if these settings do not limit it."""
        return None

    @property
    def is_graded(self) -> bool:
        """Whether scores between the lowest and the highest one are known to occur."""
        return False

    @property
    def looks(self) -> bool:
        """Whether it may look at pictures."""
        return False

    @property
    def aggregated(self) -> Aggregated:
        """How the numbers of steps or tokens become one where a number per completion is wanted."""
        raise AssertionError("only what values steps or tokens has several numbers")


# ---- steps
class BlankLines(Settings):
    """A step ends at a blank line, unless it is inside a code or math fence (CAPO, arXiv 2508.02298)."""

    may_hang: ClassVar[bool] = False
    """Whether some texts take it so long that it must be killed."""

    kind: Literal["blank_lines"] = "blank_lines"


class PatternSteps(Settings):
    """A step ends where a pattern ends; what it matches belongs to the step before it."""

    may_hang: ClassVar[bool] = True

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
class RuleReward(RewardTerm, ABC):
    """What all rewards share that are functions, which the scoring workers call in processes of their own."""

    brings_code: ClassVar[bool] = False
    """Whether the function is the user's, and runs where nothing of ours is imported."""

    @property
    @abstractmethod
    def function(self) -> RunFunction:
        """What is called."""

    @property
    def segmentation(self) -> Segmentation | None:
        """What a step is, where it values steps."""
        return None


class BuiltInReward(RuleReward):
    """What all rules share that ship with Rheostat. `implementation` is a `models.rewards.rules.RewardMaker`."""

    checks_references: ClassVar[bool] = False
    """Whether it raises ValueError at a reference that it cannot compare with: known before anything is generated."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """From 0, for a wrong answer, to 1."""
        return 0.0, 1.0

    @property
    def function(self) -> RunFunction:
        """It is made where it is called, of these settings."""
        settings: dict[str, JsonValue] = {"settings": self.model_dump(mode="json")}
        return RunFunction(
            "models.rewards.rules:made_reward", where=f"the {self.known_as} reward", options=settings, made=True
        )


class NumericReward(BuiltInReward):
    """1 if the number in the completion equals the number in the reference, else 0."""

    implementation = "models.rewards.rules:numeric_reward"
    checks_references = True

    kind: Literal["numeric"] = "numeric"
    pattern: str = r"####\s*(-?[\d,]*\.?\d+)"
    """Regular expression whose last match's first group is the answer, in completion and reference alike."""


class MathReward(BuiltInReward):
    """1 if math-verify finds completion and reference equal, else 0.

    What is too large to be evaluated, such as 9^(9^9), equals only what is spelt alike.
    """

    implementation = "models.rewards.mathematics:math_reward"
    checks_references = True

    kind: Literal["math"] = "math"


class RegexReward(BuiltInReward):
    """1 if the pattern is found in the completion, else 0."""

    implementation = "models.rewards.rules:pattern_reward"

    kind: Literal["regex"] = "regex"
    pattern: str
    """Regular expression searched for."""


class SimilarityReward(BuiltInReward):
    """Cosine between the completion and the reference answer, -1 to 1, by a retriever (docs/retrieval.md)."""

    implementation = "models.rewards.similarity:similarity_reward"

    kind: Literal["similarity"] = "similarity"
    retriever: Location
    """Directory of sentence-transformers, of this machine or at s3://bucket/name."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Range of a cosine."""
        return -1.0, 1.0

    @property
    def is_graded(self) -> bool:
        """Whether scores between the lowest and the highest one occur: they do."""
        return True


class PaintingReward(BuiltInReward):
    """1 if the picture is one blob of the asked colour at the asked place, else 0; for `data.kind = "paintings"`."""

    implementation = "models.rewards.painting:painting_reward"
    checks_references = True

    kind: Literal["painting"] = "painting"

    @property
    def looks(self) -> bool:
        """It does."""
        return True


class ClipReward(BuiltInReward):
    """How well the last picture fits the prompt, by a CLIP such as PickScore's or HPS', or, by a head, how it looks.

    It is computed by CPU, in the scoring worker; a prompt that is longer than the CLIP's context is cut off.
    """

    implementation = "models.rewards.clip:clip_reward"

    kind: Literal["clip"] = "clip"
    path: Location
    """Directory of a CLIP with its image processor and tokenizer, of this machine or at s3://bucket/name."""
    value: Literal["cosine", "logit"] = "cosine"
    """Cosine of the two embeddings, -1 to 1; or that times the CLIP's own logit scale, over 100."""
    head: Location | None = None
    """Safetensors of linear layers, from the image's embedding, of length 1, to one number that replaces the
    comparison; none compares."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Range of a cosine, or None for other values."""
        return (-1.0, 1.0) if self.value == "cosine" and self.head is None else None

    @property
    def is_graded(self) -> bool:
        """Whether scores between the lowest and the highest one occur: they do."""
        return True

    @property
    def looks(self) -> bool:
        """It does."""
        return True

    @model_validator(mode="after")
    def _is_one_number(self) -> Self:
        if self.head is not None and self.value == "logit":
            raise ValueError("value 'logit' with head: the head's number replaces the comparison, remove one of them")
        return self


class TargetReward(RuleReward):
    """Any function `reward(prompt: str, completion: str, answer: str, **options)`.

    It returns a number; with `per = "step"` or `"token"` it is also given `steps: list[str]` or `tokens: list[str]`,
    which concatenated are the completion, and returns as many numbers; with `per = "turn"` it is given `turns:
    list[str]`, what the policy wrote in each turn of an episode. With a parameter `images: list[bytes]` it is given the
    encoded images of the prompt, or the picture that was drawn; with `messages: list[dict]` prompt and episode as
    `{role, content, name}` each.
    """

    brings_code = True

    kind: Literal["target"] = "target"
    target: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """`pkg.mod:function`."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments given to the function."""
    per: Literal["completion", "step", "token", "turn"] = "completion"
    """What gets a number of its own."""
    steps: Segmentation = BlankLines()
    """What a step is."""
    aggregate: Aggregated = "mean"
    """How the numbers of steps, tokens or turns become one where a number per completion is wanted."""

    @property
    def looks(self) -> bool:
        """With a parameter `images`, which is known when it is imported."""
        return True

    @property
    def function(self) -> RunFunction:
        """The one that is named."""
        part = {"completion": "", "step": "steps", "token": "tokens", "turn": "turns"}[self.per]
        return RunFunction(self.target, where=f"reward target {self.target!r}", options=self.options, part=part)

    @property
    def segmentation(self) -> Segmentation | None:
        """What a step is, where it values steps."""
        return self.steps if self.per == "step" else None

    @property
    def valued(self) -> Valued:
        """What it gives a number of its own."""
        return self.per

    @property
    def aggregated(self) -> Aggregated:
        """How the numbers of steps or tokens become one."""
        return self.aggregate


BuiltInConfig = NumericReward | MathReward | RegexReward | SimilarityReward | PaintingReward | ClipReward

RuleConfig = BuiltInConfig | TargetReward


# ---- programs
class CodeReward(RewardTerm):
    """Unit tests: what of the problem's tests the last code block of a completion passes, in a sandbox (bubblewrap).

    The reference answer holds the tests: Python, in which each `assert` of its own is one, or a JSON list of
    `{"input": …, "output": …}`, what a program reads on stdin and has to write to stdout.
    """

    kind: Literal["code"] = "code"
    value: Literal["all", "share"] = "all"
    """What it is worth: 1 where all tests are passed and else 0, or the share of tests that are."""
    python: Program | None = None
    """Python interpreter (3.9 or newer) that runs the code, with what is installed there; none is ours."""
    test_seconds: Annotated[float, Field(gt=0)] = 5
    """Longest time of an input, or of all asserts together, in seconds; what takes longer is given no more tests."""
    memory_mib: Annotated[int, Field(ge=128)] = 1024
    """Memory of a program, and address space of each of its processes, in MiB."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """From 0, if no test is passed, to 1."""
        return 0.0, 1.0

    @property
    def is_graded(self) -> bool:
        """Whether the score is a share of the tests."""
        return self.value == "share"


# ---- environments
class EnvironmentReward(RewardTerm):
    """What the environment itself gave for an episode; 0 where it gave nothing, missing where it failed."""

    kind: Literal["environment"] = "environment"
    aggregate: Literal["sum", "last"] = "sum"
    """How the rewards of turns become one where a number per completion is wanted."""
    per: Literal["completion", "turn"] = "completion"
    """What gets a number of its own: with `turn` every turn gets its return to go, for algorithms that credit steps."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Factor per turn of what later turns earned, in a return to go."""

    @property
    def valued(self) -> Valued:
        """What gets a number of its own."""
        return self.per

    @property
    def aggregated(self) -> Aggregated:
        """The return of an episode is that of its first turn."""
        return "sum"
