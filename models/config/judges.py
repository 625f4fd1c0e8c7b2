"""Configuration of rewards that models give: generative judges and discriminative reward models. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from infra.config import Fraction, Positive, Settings, Since
from infra.store.inputs import LocalPath
from infra.variants import Variant
from models.config.endpoints import Endpoint
from models.config.engines import EngineConfig, EngineSettings, SamplingConfig, TransformersEngine
from models.config.policy import ScratchPolicy, SeeingScratchPolicy
from models.config.reward_terms import Aggregated, BlankLines, RewardTerm, Segmentation, Valued
from models.config.training import WarmupConfig


# ---- generative reward models
class ScoreVerdict(Settings):
    """A number in a range; the reward is its place in the range, 0 to 1."""

    kind: Literal["score"] = "score"
    score_range: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    is_graded: ClassVar[bool] = True

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

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest reward of an answer."""
        return min(self.choices.values()), max(self.choices.values())

    @property
    def is_graded(self) -> bool:
        """Whether there are more than two rewards."""
        return len({*self.choices.values()}) > 2


class LogprobVerdict(Settings):
    """How sure the judge is of one answer against another: P(yes) / (P(yes) + P(no)), nothing is sampled."""

    kind: Literal["logprob"] = "logprob"
    yes: str = "yes"
    """The answer that earns 1."""
    no: str = "no"
    """The answer that earns 0."""

    score_range: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    is_graded: ClassVar[bool] = True


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
    aggregate: Aggregated = "mean"
    """How the values of steps become one where a number per completion is wanted."""

    is_graded: ClassVar[bool] = True

    @property
    def score_range(self) -> tuple[float, float] | None:
        """From -1, if all steps are wrong, to 0. None for a sum, which has no lowest value."""
        return None if self.aggregate == "sum" else (-1.0, 0.0)


VerdictConfig = Annotated[ScoreVerdict | ChoiceVerdict | LogprobVerdict | StepsVerdict, Field(discriminator="kind")]


# ---- models behind rewards
class ServedModel(Variant):
    """What all models behind rewards share. `implementation` is a `models.modeling.initial.ServedModelWriter`."""

    implementation = "models.modeling.initial:refuse_to_write"
    inspection: ClassVar[str]
    """`pkg.mod:function` that checks it before it is made, a `models.inspection.companions.ServedModelCheck`; only of
    what is made for the reward."""
    training: ClassVar[str | None] = None
    """`pkg.mod:function` that says how the run trains it, a `models.records.work.TrainingOrder`; none does not."""

    @property
    def begins_as_policy(self) -> bool:
        """Whether nobody makes it: it is the policy, as it is after its training on data alone."""
        return False


class JudgeModel(ServedModel):
    """What all judges' models share."""

    chats: ClassVar[bool] = True
    """Whether it is asked in a turn of a chat, where it has a template for that."""


class DirectoryJudge(JudgeModel):
    """Any causal language model directory in Hugging Face format; the run keeps a copy."""

    implementation = "models.modeling.initial:write_judge"
    inspection = "models.inspection.companions:check_directory_judge"

    kind: Literal["directory"] = "directory"
    path: LocalPath
    """Directory with config.json, safetensors and tokenizer."""
    engine: EngineConfig = TransformersEngine()
    """What runs it."""


class PolicyShape(Settings):
    """The policy itself, with all that it has learnt before the first iteration."""

    kind: Literal["policy"] = "policy"


class TrainedJudge(JudgeModel):
    """A small judge that the warm-up flow trains on the data's problems: right and wrong completions, with verdicts."""

    implementation = "models.modeling.initial:write_trained_judge"
    inspection = "models.inspection.companions:check_trained_judge"
    training = "models.records.work:order_judge_warmup"
    chats = False  # it learns from the bare question

    kind: Literal["trained"] = "trained"
    shape: Annotated[ScratchPolicy | SeeingScratchPolicy | PolicyShape, Field(discriminator="kind")] = ScratchPolicy()
    """What its training begins with: a decoder from nothing, of kind `seeing_scratch` with a tower for a judge that is
    shown images, or of kind `policy` what the policy has learnt from its warm-up and preferences."""
    warmup: WarmupConfig = WarmupConfig()
    """Its training."""
    engine: EngineConfig = TransformersEngine()
    """What runs it."""

    @property
    def begins_as_policy(self) -> bool:
        """Whether it is to begin with what the policy can."""
        return isinstance(self.shape, PolicyShape)


class EndpointJudge(Endpoint, JudgeModel):
    """A model behind an OpenAI-compatible endpoint."""

    kind: Literal["endpoint"] = "endpoint"
    guided: Literal["none", "vllm"] = "none"
    """How a constrained choice is asked for: not at all, or by vLLM's structured outputs."""


JudgeModelConfig = Annotated[DirectoryJudge | TrainedJudge | EndpointJudge, Field(discriminator="kind")]


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

    implementation = "models.workers.judge:JudgeWorker"

    kind: Literal["judge"] = "judge"
    model: JudgeModelConfig
    """Which model judges."""
    template: str | None = None
    """What it is asked; none asks what the verdict needs, with the completion between fences; one that the run
    trains is asked in a few words. `{prompt}`, `{completion}` and `{answer}` are filled in, escaped; `{fence}` is a
    delimiter that no completion can guess. A verdict of kind `steps` has `{steps}`, the completion in tags, in place
    of `{completion}`."""
    images: Annotated[Literal["none", "prompt"], Since("0.1.0", before="none")] = "none"
    """What it is shown beside the question: `prompt` shows it the images of the prompt, in order, before the text; of a
    policy that draws, the picture."""
    sight_question: Annotated[
        str, Since("0.1.0", before="What colour is the square in the image? Answer with one word.")
    ] = "What colour is the square in the image? Answer with one word."
    """What a judge behind an endpoint that is shown images is asked twice before the run: about a red square and a
    blue one. Equal answers are those of a judge that does not get its images, and refuse it."""
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
    def score_range(self) -> tuple[float, float] | None:
        """Range of the verdict, in which every average of votes lies."""
        return self.verdict.score_range

    @property
    def is_graded(self) -> bool:
        """Whether the verdict is graded, or an average of several votes."""
        return self.verdict.is_graded or self.votes > 1

    @property
    def looks(self) -> bool:
        """Where it is shown images."""
        return self.images == "prompt"

    @property
    def endpoint(self) -> EndpointJudge | None:
        """Where the model runs, if elsewhere."""
        return self.model if isinstance(self.model, EndpointJudge) else None

    @property
    def is_trained(self) -> bool:
        """Whether the run trains the model."""
        return self.model.training is not None

    @property
    def engine(self) -> EngineSettings | None:
        """What runs the model here; none where it runs elsewhere."""
        return None if isinstance(self.model, EndpointJudge) else self.model.engine

    @property
    def steps_verdict(self) -> StepsVerdict | None:
        """The verdict, where it is of steps."""
        return self.verdict if isinstance(self.verdict, StepsVerdict) else None

    @property
    def valued(self) -> Valued:
        """What it gives a number of its own."""
        return "completion" if self.steps_verdict is None else "step"

    @property
    def aggregated(self) -> Aggregated:
        """How the values of steps become one."""
        return super().aggregated if self.steps_verdict is None else self.steps_verdict.aggregate

    @property
    def writes(self) -> bool:
        """Whether an answer is written token by token, rather than weighed among given ones."""
        verdict = self.verdict
        chooses = isinstance(verdict, LogprobVerdict) or (isinstance(verdict, ChoiceVerdict) and verdict.constrained)
        return not chooses


class DirectoryRewardModel(ServedModel):
    """Any sequence classifier directory in Hugging Face format with one output; the run keeps a copy."""

    implementation = "models.modeling.initial:write_reward_model"
    inspection = "models.inspection.companions:check_directory_reward_model"

    kind: Literal["directory"] = "directory"
    path: LocalPath
    """Directory with config.json, safetensors and tokenizer."""


class TrainedRewardModel(ServedModel):
    """The initial policy with a head of one output, trained on the run's preferences (Bradley and Terry, 1952)."""

    training = "models.records.work:order_reward_model_training"

    kind: Literal["trained"] = "trained"
    steps: Positive = 600
    """Optimizer steps."""
    batch_size: Positive = 32
    """Pairs per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate; linear over 5% of the steps, then cosine to a tenth. Pretrained policies take 1e-5."""
    centering: Annotated[float, Field(ge=0)] = 0.01
    """Factor of the squared sum of a pair's rewards, which keeps them around zero (arXiv 2312.09244, section 3)."""

    @property
    def begins_as_policy(self) -> bool:
        """It is the policy's trunk."""
        return True


RewardModelConfig = Annotated[DirectoryRewardModel | TrainedRewardModel, Field(discriminator="kind")]


class ModelReward(RewardTerm):
    """The score of a discriminative reward model: a sequence classifier with one output."""

    implementation = "models.workers.reward_model:RewardModelWorker"

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

    is_graded: ClassVar[bool] = True
    votes: ClassVar[int] = 1
    """Answers per completion."""
    vote: ClassVar[Literal["mean"]] = "mean"
    """How they become one reward."""
    engine: ClassVar[None] = None
    """It runs in its worker, without an engine."""
    steps_verdict: ClassVar[None] = None
    """It scores whole completions."""
    writes: ClassVar[bool] = False
    """It scores in one forward pass."""
    endpoint: ClassVar[None] = None
    """The model never runs elsewhere."""

    @property
    def is_trained(self) -> bool:
        """Whether the run trains the model."""
        return self.model.training is not None


ServedReward = JudgeReward | ModelReward
"""`implementation` is the class of the workers that serve it."""
