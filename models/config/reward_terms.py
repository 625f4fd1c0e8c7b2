"""Configuration of rule-based rewards, and the fields that all reward terms have. Torch-free."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from rheostat.infra.config import Settings, Since
from rheostat.infra.demos import FORMER_REWARD_KINDS
from rheostat.infra.plugins import present_target
from rheostat.infra.processes.functions import RunFunction
from rheostat.infra.store.inputs import ModelLocation, Program
from rheostat.infra.variants import ImportString, Variant

Granularity = Literal["completion", "step", "token", "turn"]

StepAggregation = Literal["mean", "sum", "min"]

ProbabilityAggregation = Literal["min", "product", "mean", "last"]


class RewardTerm(Variant):
    """Fields common to all reward terms. The total reward of a completion is the weighted sum of its terms."""

    example: ClassVar[str]
    """Example of a TOML table that configures this kind of reward, printed by `rheostat rewards`."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")] | None = None
    """Name of this reward term in columns and metrics. The default is its `kind`."""
    weight: float = 1.0
    """Factor of this term in the total reward. A term of weight 0 is only measured."""
    shift: Annotated[float, Since("0.1.0", before=0.0)] = 0.0
    """Number that is subtracted from the score before it is divided by `scale`. `rheostat soup` sets it to the mean
    score of the initial policy."""
    scale: Annotated[float, Field(gt=0), Since("0.1.0", before=1.0)] = 1.0
    """Number by which the score, minus `shift`, is divided. `rheostat soup` sets it to the standard deviation of the
    initial policy's scores."""

    @property
    def term(self) -> str:
        """Name of this reward term in columns and metrics."""
        return self.name or self.label

    @property
    def granularity(self) -> Granularity:
        """Unit that this reward scores: "completion", "step", "token" or "turn"."""
        return "completion"

    @property
    def scores_parts(self) -> bool:
        """Whether this reward scores steps, tokens or turns separately instead of whole completions."""
        return self.granularity != "completion"

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest possible score of a completion, or None if the score is not limited by these settings."""
        return None

    @property
    def is_graded(self) -> bool:
        """Whether the score can have more than two different values, unlike a score that is only 0 or 1."""
        return False

    @property
    def uses_images(self) -> bool:
        """Whether this reward may read images: those of the prompt, or generated pictures."""
        return False

    @property
    def model_steps(self) -> "Segmentation | None":
        """Method that divides completions into the steps that a process reward model scores, or None if no such model
        computes this reward."""
        return None

    @property
    def aggregation(self) -> StepAggregation | ProbabilityAggregation:
        """Method that combines step, token or turn scores into one number per completion. Raises AssertionError for
        rewards that score whole completions."""
        raise AssertionError(
            "a list of scores was read from a reward that has one score per completion. Only rewards of steps, tokens "
            "or turns have several"
        )


# ---- steps
class BlankLines(Settings):
    """Division of a completion into steps at blank lines, except inside code and math fences (CAPO, arXiv
    2508.02298)."""

    may_hang: ClassVar[bool] = False
    """Whether dividing a text into steps can take so long that the process must be killed. Only regular expressions
    can."""

    kind: Literal["blank_lines"] = "blank_lines"


class PatternSteps(Settings):
    """Division of a completion into steps at matches of a regular expression. The matched text belongs to the step
    before it."""

    may_hang: ClassVar[bool] = True

    kind: Literal["pattern"] = "pattern"
    pattern: str
    """Regular expression that matches the text between two steps."""

    @field_validator("pattern")
    @classmethod
    def _require_pattern(cls, pattern: str) -> str:
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        if compiled.fullmatch(""):
            raise ValueError(
                f"the pattern {pattern!r} matches an empty text, so every character would be a step of its own. Use a "
                "pattern that matches at least one character"
            )
        return pattern


Segmentation = Annotated[BlankLines | PatternSteps, Field(discriminator="kind")]


# ---- rules
class RuleReward(RewardTerm, ABC):
    """Fields common to all rewards that are computed by a function. Scoring workers call these functions in separate
    processes."""

    brings_code: ClassVar[bool] = False
    """Whether the function is user code. If so, it runs in a process that imports nothing of Rheostat."""

    @property
    @abstractmethod
    def function(self) -> RunFunction:
        """Description of the function to call, with its options."""

    @property
    def segmentation(self) -> Segmentation | None:
        """Method that divides completions into steps, or None if this reward does not score steps."""
        return None


class BuiltInReward(RuleReward):
    """Fields common to all reward functions that ship with Rheostat. `implementation` names a
    `rheostat.models.rewards.rules.RewardMaker`."""

    checks_references: ClassVar[bool] = False
    """Whether the function raises ValueError for a reference answer with which it cannot compare a completion. If so,
    all reference answers are checked before anything is generated."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest score: 0 for a wrong answer and 1 for a correct one."""
        return 0.0, 1.0

    @property
    def function(self) -> RunFunction:
        """Description of this reward's function. The process that calls it builds it from these settings."""
        settings: dict[str, JsonValue] = {"settings": self.model_dump(mode="json")}
        return RunFunction(
            "rheostat.models.rewards.rules:load_reward", where=f"the {self.label} reward", options=settings, made=True
        )


class NumericReward(BuiltInReward):
    """Reward of 1 if the number in the completion equals the number in the reference answer, else 0."""

    implementation = "rheostat.models.rewards.rules:numeric_reward"
    checks_references = True
    example = '{ kind = "numeric" }'

    kind: Literal["numeric"] = "numeric"
    pattern: str = r"####\s*(-?[\d,]*\.?\d+)"
    """Regular expression that finds the answer in the completion and in the reference answer: the first group of its
    last match. With the default pattern and version 2, the answer is the number after the last `####`."""
    version: Annotated[Literal[1, 2], Since("0.2.0", before=1)] = 2
    """Version of the comparison. Version 2 reads numbers as people write them, such as `**42**`, `$18`, `50%`, `1/2` or
    `3,5` (docs/rewards.md). Version 1 reads only plain decimals; runs that began before this key existed use it."""


class MathReward(BuiltInReward):
    """Reward of 1 if the final answer of the completion equals that of the reference, else 0 (docs/rewards.md).

    Numbers and words are compared by Rheostat, other mathematics by math-verify. Expressions that are too large to be
    evaluated, such as 9^(9^9), are equal only if they are written identically.
    """

    implementation = "rheostat.models.rewards.mathematics:math_reward"
    checks_references = True
    example = '{ kind = "math" }'

    kind: Literal["math"] = "math"
    version: Annotated[Literal[1, 2], Since("0.2.0", before=1)] = 2
    """Version of the comparison. Version 2 compares the final answers by their kind: numbers, words, or mathematics
    (docs/rewards.md). Version 1 compares whole texts by math-verify; runs that began before this key existed use it."""


class RegexReward(BuiltInReward):
    """Reward of 1 if a regular expression matches somewhere in the completion, else 0."""

    implementation = "rheostat.models.rewards.rules:pattern_reward"
    example = '{ kind = "regex", pattern = "<think>.+</think>" }'

    kind: Literal["regex"] = "regex"
    pattern: str
    """Regular expression that is searched for in the completion."""


class SimilarityReward(BuiltInReward):
    """Cosine similarity, from -1 to 1, between the embeddings of the completion and of the reference answer. A
    retriever computes the embeddings (docs/retrieval.md)."""

    implementation = "rheostat.models.rewards.similarity:similarity_reward"
    example = '{ kind = "similarity", retriever = "models/retriever" }'

    kind: Literal["similarity"] = "similarity"
    retriever: ModelLocation
    """Directory of a sentence-transformers model, on this machine or at s3://bucket/name, or a name on the
    Hub."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest possible cosine similarity: -1 and 1."""
        return -1.0, 1.0

    @property
    def is_graded(self) -> bool:
        """Whether the score can have more than two different values. This is always true for a similarity."""
        return True


class TargetReward(RuleReward):
    """User-defined function `reward(prompt: str, completion: str, answer: str, **options)`.

    It returns one number. With `per = "step"` or `"token"` it also receives `steps: list[str]` or `tokens: list[str]`,
    whose concatenation is the completion, and returns one number for each. With `per = "turn"` it receives `turns:
    list[str]`, the policy's output in each turn of an episode, and returns one number for each turn. With a parameter
    `images: list[bytes]` it receives the encoded images of the prompt, or the generated picture. With a parameter
    `messages: list[dict]` it receives prompt and episode as messages `{role, content, name}`.
    """

    brings_code = True
    example = '{ kind = "target", target = "my_rewards:is_polite" }'
    former_kinds: ClassVar[Mapping[str, str]] = FORMER_REWARD_KINDS
    """Former values of `kind`, with the former import string of the function that is now part of a demonstration."""

    kind: Literal["target"] = "target"
    target: ImportString
    """Reward function, as `pkg.mod:function`."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments that are passed to the function in addition to the texts."""
    per: Literal["completion", "step", "token", "turn"] = "completion"
    """Unit that this reward scores. It determines the function's arguments and what it returns."""
    steps: Segmentation = BlankLines()
    """Method that divides a completion into steps. Used only with `per = "step"`."""
    aggregate: StepAggregation = "mean"
    """Method that combines the scores of steps, tokens or turns into one number, where one number per completion is
    needed (such as metrics and evaluations)."""
    checks_references: Annotated[bool, Since("0.2.0", before=False)] = False
    """Whether the function is first called with every reference answer, an empty completion and no images. If it then
    raises an exception, the run does not begin, and the message names the problem."""
    feedback: Annotated[bool, Since("0.2.0", before=False)] = False
    """Whether the function returns a pair of the score and a text about the completion, its feedback, which may be
    empty. A text of more than 4,000 characters is shortened. A teacher of kind "policy" can read the feedback. Only
    with `per = "completion"`."""

    @classmethod
    def read_former_kind(cls, reward: object) -> object:
        """Return the table of a reward. If its `kind` is a former one, the table names the function of the
        demonstration instead."""
        if not isinstance(reward, Mapping) or (kind := reward.get("kind")) not in [*cls.former_kinds]:
            return reward
        named = {**reward, "name": reward.get("name") or kind}
        return named | {"kind": "target", "target": cls.former_kinds[kind], "checks_references": True}

    @model_serializer(mode="wrap")
    def _write_former_kind(self, write: SerializerFunctionWrapHandler) -> dict[str, JsonValue]:
        fields: dict[str, JsonValue] = write(self)
        kind = next((kind for kind, target in self.former_kinds.items() if target == self.target), None)
        if kind is None:
            return fields
        name = None if self.name == kind else self.name
        return {key: fields[key] for key in RewardTerm.model_fields if key in fields} | {"kind": kind, "name": name}

    @property
    def uses_images(self) -> bool:
        """Whether this reward may read images. Always true, because the function's parameters are unknown until it is
        imported."""
        return True

    @property
    def function(self) -> RunFunction:
        """Description of the function that `target` names, with its options."""
        part = {"completion": "", "step": "steps", "token": "tokens", "turn": "turns"}[self.per]
        target = present_target(self.target)
        where = f"reward target {self.target!r}"
        return RunFunction(target, where=where, options=self.options, part=part, has_feedback=self.feedback)

    @property
    def segmentation(self) -> Segmentation | None:
        """Method that divides completions into steps, or None if this reward does not score steps."""
        return self.steps if self.per == "step" else None

    @property
    def granularity(self) -> Granularity:
        """Unit that this reward scores, as configured in `per`."""
        return self.per

    @property
    def aggregation(self) -> StepAggregation:
        """Method that combines step, token or turn scores into one number per completion, as configured."""
        return self.aggregate


# ---- programs
class CodeReward(RewardTerm):
    """Result of running the problem's unit tests on the last code block of the completion, in a sandbox (bubblewrap).

    The reference answer contains the tests: Python code in which each top-level `assert` is one test, or a JSON list of
    `{"input": …, "output": …}`, the text that the program reads on stdin and the text that it must write to stdout.
    """

    checks = {"settings": "rheostat.models.inspection.rewards:check_sandbox"}
    example = '{ kind = "code", value = "share" }'

    kind: Literal["code"] = "code"
    value: Literal["all", "share"] = "all"
    """Score of a completion: "all" is 1 if all tests pass, else 0. "share" is the share of tests that pass."""
    python: Program | None = None
    """Python interpreter (3.9 or newer) that runs the code, with its installed packages. The default is the interpreter
    that runs Rheostat."""
    test_seconds: Annotated[float, Field(gt=0)] = 5
    """Time limit in seconds for the program on one input, or for all asserts together. After a timeout no further tests
    are run."""
    memory_mib: Annotated[int, Field(ge=128)] = 1024
    """Memory limit in MiB for all processes of a program together. It also limits the address space of each process."""
    feedback: Annotated[bool, Since("0.2.0", before=False)] = False
    """Whether the first failed test is run again and stored as a text: the test, its expected output, and the output
    and errors of the program. A teacher of kind "policy" can read this feedback."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest score: 0 if no test passes, 1 if all tests pass."""
        return 0.0, 1.0

    @property
    def is_graded(self) -> bool:
        """Whether the score can have more than two different values. This is the case if it is the share of passed
        tests."""
        return self.value == "share"


# ---- environments
class EnvironmentReward(RewardTerm):
    """Reward that the environment returns in an episode. The score is 0 if the environment returned no reward, and
    missing if the environment failed."""

    example = '{ kind = "environment" }'

    kind: Literal["environment"] = "environment"
    aggregate: Literal["sum", "last"] = "sum"
    """Method that combines the rewards of the turns into one number per completion: their sum, or the last reward."""
    per: Literal["completion", "turn"] = "completion"
    """Unit that this reward scores. With `turn`, the score of a turn is its return to go: the sum of the rewards of
    this turn and of later turns, discounted by `gamma`. Use it with algorithms that assign credit to steps."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount factor per turn in the return to go. Used only with `per = "turn"`."""

    @property
    def granularity(self) -> Granularity:
        """Unit that this reward scores, as configured in `per`."""
        return self.per

    @property
    def aggregation(self) -> StepAggregation:
        """Method that combines turn scores into one number per completion: always "sum"."""
        return "sum"
