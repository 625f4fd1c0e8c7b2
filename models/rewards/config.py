"""Configuration of rewards: rules, judges, reward models. Torch-free; defaults are the recipe we run."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from infra.config import Settings
from models.config import (
    Endpoint,
    EngineConfig,
    Fraction,
    Positive,
    SamplingConfig,
    ScratchPolicy,
    TransformersEngine,
    WarmupConfig,
)


class RewardTerm(Settings):
    """What all reward terms share."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")] | None = None
    """Column name of this term; by default its kind."""
    weight: float = 1.0
    """Factor of this term in the total."""


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

    kind: Literal["numeric"] = "numeric"
    pattern: str = r"####\s*(-?[\d,]*\.?\d+)"
    """Regular expression whose last match's first group is the answer, in completion and reference alike."""


class MathReward(RewardTerm):
    """1 if math-verify finds completion and reference equal, else 0."""

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
    per: Literal["completion", "step", "token"] = "completion"
    """What gets a number of its own."""
    steps: Segmentation = BlankLines()
    """What a step is."""
    aggregate: Literal["mean", "sum", "min"] = "mean"
    """How the numbers of steps or tokens become one where a number per completion is wanted."""


# ---- generative reward models


class ScoreVerdict(Settings):
    """A number in a range; the reward is its place in the range, 0 to 1."""

    kind: Literal["score"] = "score"
    low: float = 0
    """Worst score."""
    high: float = 10
    """Best score."""
    pattern: str = r"(?i)score(?:\s*[:=])?\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; it must occur exactly once in the judge's answer."""

    @model_validator(mode="after")
    def _is_a_range(self) -> "ScoreVerdict":
        if not self.low < self.high:
            raise ValueError(f"expected low below high, got {self.low:g} and {self.high:g}")
        return self


class ChoiceVerdict(Settings):
    """One of several answers."""

    kind: Literal["choice"] = "choice"
    choices: Annotated[dict[str, float], Field(min_length=2)] = {"yes": 1.0, "no": 0.0}
    """The answers and their rewards."""
    constrained: bool = True
    """Let the engine write nothing but one of the answers; engines that cannot are refused."""


class LogprobVerdict(Settings):
    """How sure the judge is of one answer against another: P(yes) / (P(yes) + P(no)), nothing is sampled."""

    kind: Literal["logprob"] = "logprob"
    yes: str = "yes"
    """The answer that earns 1."""
    no: str = "no"
    """The answer that earns 0."""


class StepsVerdict(Settings):
    """Which steps of the completion are wrong (CAPO, arXiv 2508.02298): a flagged step is worth -1, others 0.

    The completion is shown with each step in `<step_k>` tags; the last `<incorrect_steps>` tag of the answer names the
    wrong ones. An answer that cannot be read is left out of the vote, never taken for "no errors".
    """

    kind: Literal["steps"] = "steps"
    steps: Segmentation = BlankLines()
    """What a step is."""
    prompt: Literal["audit", "published"] = "audit"
    """What is asked where no template is set: to audit every step always, or, as published, to name wrong steps only
    if the solution is wrong."""
    reference: bool = True
    """Show the reference answer to the judge."""
    flags: Literal["intersection", "majority", "union", "average"] = "intersection"
    """Steps that count as wrong: named by all votes, by half of them, by any; or each by its share of the votes."""
    ties: Literal["flag", "pass"] = "flag"
    """What half of the votes do to a step under `majority`."""
    aggregate: Literal["mean", "sum", "min"] = "mean"
    """How the values of steps become one where a number per completion is wanted."""


VerdictConfig = Annotated[ScoreVerdict | ChoiceVerdict | LogprobVerdict | StepsVerdict, Field(discriminator="kind")]


class DirectoryJudge(Settings):
    """Any causal language model directory in Hugging Face format; the run keeps a copy."""

    kind: Literal["directory"] = "directory"
    path: Path
    """Directory with config.json, safetensors and tokenizer."""
    engine: EngineConfig = TransformersEngine()
    """What runs it."""


class TrainedJudge(Settings):
    """A small judge that the warm-up flow trains on the data's problems: right and wrong completions, with verdicts."""

    kind: Literal["trained"] = "trained"
    shape: ScratchPolicy = ScratchPolicy()
    """The decoder."""
    warmup: WarmupConfig = WarmupConfig()
    """Its training."""
    engine: EngineConfig = TransformersEngine()
    """What runs it."""


class EndpointJudge(Endpoint):
    """A model behind an OpenAI-compatible endpoint."""

    kind: Literal["endpoint"] = "endpoint"
    guided: Literal["none", "vllm"] = "none"
    """How a constrained choice is asked for: not at all, or by vLLM's structured outputs."""


JudgeModel = Annotated[DirectoryJudge | TrainedJudge | EndpointJudge, Field(discriminator="kind")]


class Canaries(Settings):
    """Known-bad answers mixed in among the completions, to notice a judge that lets everything pass."""

    answers: Annotated[tuple[str, ...], Field(min_length=1)] = ("I do not know.", "The answer is correct.")
    """The bad answers; where steps are judged, each needs a step that is plainly wrong."""
    per_shard: Positive = 2
    """Canaries judged with each shard; they cost as much as completions."""
    passing: float = 0.5
    """A canary passes from this reward on; where steps are judged, it passes when none is flagged."""
    max_passing: Fraction = 0.2
    """Share of an iteration's canaries that may pass; above it the iteration fails."""


class JudgeReward(RewardTerm):
    """The verdict of a generative reward model."""

    kind: Literal["judge"] = "judge"
    model: JudgeModel
    """Which model judges."""
    template: str | None = None
    """What it is asked; none asks what the verdict needs. `{prompt}`, `{completion}` and `{answer}` are filled in,
    escaped; `{fence}` is a delimiter that no completion can guess. A verdict of kind `steps` has `{steps}`, the
    completion in tags, in place of `{completion}`."""
    verdict: VerdictConfig = ChoiceVerdict()
    """How its answer becomes a number."""
    votes: Annotated[int, Field(ge=1, le=64)] = 1
    """Answers per completion."""
    vote: Literal["mean", "median", "majority"] = "mean"
    """How valid answers become one reward."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=512)
    """How its answers are drawn."""
    retries: Annotated[int, Field(ge=0, le=8)] = 1
    """How often an answer without one valid verdict is asked for again; then it is invalid, never 0."""
    max_invalid: Fraction = 0.05
    """Share of an iteration's answers that may be invalid, or of its completions that may have no valid answer where
    the verdict is of kind `steps`; above it the iteration fails."""
    canaries: Canaries | None = None
    """Known-bad answers mixed in."""
    slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Worker slots that one replica takes, each with `pools.threads` threads or its GPUs."""

    @property
    def is_endpoint(self) -> bool:
        """Whether the model runs elsewhere."""
        return isinstance(self.model, EndpointJudge)


class DirectoryRewardModel(Settings):
    """Any sequence classifier directory in Hugging Face format with one output; the run keeps a copy."""

    kind: Literal["directory"] = "directory"
    path: Path
    """Directory with config.json, safetensors and tokenizer."""


class TrainedRewardModel(Settings):
    """The initial policy with a head of one output, trained on the run's preferences (Bradley and Terry, 1952)."""

    kind: Literal["trained"] = "trained"
    steps: Positive = 600
    """Optimizer steps."""
    batch_size: Positive = 32
    """Pairs per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate; linear over 5% of the steps, then cosine to a tenth. Pretrained policies take 1e-5."""
    centering: Annotated[float, Field(ge=0)] = 0.01
    """Factor of the squared sum of a pair's rewards, which keeps them around zero (arXiv 2312.09244, section 3)."""


RewardModelConfig = Annotated[DirectoryRewardModel | TrainedRewardModel, Field(discriminator="kind")]


class ModelReward(RewardTerm):
    """The score of a discriminative reward model: a sequence classifier with one output."""

    kind: Literal["model"] = "model"
    model: RewardModelConfig
    """Which model scores."""
    template: str | None = None
    """What it reads, with `{prompt}` and `{completion}`; none takes the chat template, or both one after the other."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations."""
    batch_tokens: Positive = 16384
    """Tokens, padding included, in one forward pass."""
    slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Worker slots that one replica takes."""

    @property
    def is_endpoint(self) -> bool:
        """Whether the model runs elsewhere: never."""
        return False


RuleReward = NumericReward | MathReward | RegexReward | TargetReward
ServedReward = JudgeReward | ModelReward

RewardConfig = Annotated[RuleReward | ServedReward, Field(discriminator="kind")]


def is_process(reward: RewardTerm) -> bool:
    """Whether a reward values steps or tokens rather than whole completions."""
    if isinstance(reward, TargetReward):
        return reward.per != "completion"
    return isinstance(reward, JudgeReward) and isinstance(reward.verdict, StepsVerdict)


class ScoringConfig(Settings):
    """Which rewards are added up, and how long one may take."""

    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (NumericReward(),)
    """Reward terms; the total is their weighted sum."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 10
    """Longest time for one completion, in seconds; then its score is missing."""
    max_missing: Fraction = 0.05
    """Share of missing scores in an iteration above which it fails."""

    @property
    def terms(self) -> tuple[str, ...]:
        """Column names of the reward terms, in order."""
        return tuple(reward.name or reward.kind for reward in self.rewards)

    @property
    def rules(self) -> tuple[RuleReward, ...]:
        """Rewards that are functions, computed by the scoring workers themselves."""
        return tuple(reward for reward in self.rewards if not isinstance(reward, ServedReward))

    @property
    def process_terms(self) -> tuple[str, ...]:
        """Column names of the terms that value steps or tokens, in order."""
        return tuple(term for term, reward in zip(self.terms, self.rewards, strict=True) if is_process(reward))

    @property
    def rule_terms(self) -> tuple[str, ...]:
        """Column names of the rules, in order."""
        return tuple(term for term in self.terms if term not in self.served)

    @property
    def served(self) -> dict[str, ServedReward]:
        """Rewards that models serve, by term."""
        pairs = zip(self.terms, self.rewards, strict=True)
        return {term: reward for term, reward in pairs if isinstance(reward, ServedReward)}

    @property
    def local(self) -> dict[str, ServedReward]:
        """Served rewards whose model runs in worker slots; one behind an endpoint is elsewhere."""
        return {term: reward for term, reward in self.served.items() if not reward.is_endpoint}

    @property
    def trained_reward_models(self) -> dict[str, ModelReward]:
        """Rewards whose model the run trains on its preferences, by term."""
        models = {term: reward for term, reward in self.served.items() if isinstance(reward, ModelReward)}
        return {term: reward for term, reward in models.items() if isinstance(reward.model, TrainedRewardModel)}

    @model_validator(mode="after")
    def _terms_differ(self) -> "ScoringConfig":
        if len(set(self.terms)) < len(self.terms):
            raise ValueError(f"reward terms need different names, found {', '.join(self.terms)}: set `name`")
        return self
