"""Configuration of model-based rewards: generative judges and discriminative reward models. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from infra.config import Fraction, Positive, Settings, Since
from infra.renamed import RenamedFrom
from infra.store.inputs import ModelLocation
from infra.variants import Variant
from models.config.endpoints import Endpoint
from models.config.engines import EngineConfig, EngineSettings, SamplingConfig, TransformersEngine
from models.config.policy import ScratchPolicy, VisionScratchPolicy
from models.config.reward_terms import Granularity, RewardTerm, StepAggregation
from models.config.texts import AppendedTokens, ContinuingModel
from models.config.training import WarmupConfig
from models.config.verdicts import ChoiceVerdict, LogprobVerdict, RubricVerdict, StepsVerdict, VerdictConfig


# ---- models behind rewards
class ServedModel(Variant):
    """Fields common to all models that compute rewards. `implementation` names a
    `models.modeling.initial.ServedModelWriter`."""

    implementation = "models.modeling.initial:refuse_to_write"
    inspection: ClassVar[str]
    """`pkg.mod:function` that checks the model before the run starts, a
    `models.inspection.other_models.ServedModelCheck`. Not defined for models that the run does not build or copy."""
    training: ClassVar[str | None] = None
    """`pkg.mod:function` that returns the work unit for training the model, a
    `models.records.training_orders.TrainingOrder`, or None if the run does not train the model."""

    @property
    def begins_as_policy(self) -> bool:
        """Whether the model starts as a copy of the policy after the policy's supervised training."""
        return False


class JudgeModel(ContinuingModel, ServedModel):
    """Fields common to all judge models."""

    uses_chat_template: ClassVar[bool] = True
    """Whether the judge's prompt is formatted as a chat if the model has a chat template."""


class DirectoryJudge(AppendedTokens, JudgeModel):
    """A causal language model directory in Hugging Face format; the run stores a copy of it."""

    implementation = "models.modeling.initial:write_judge"
    inspection = "models.inspection.other_models:check_directory_judge"

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, or a model on the Hugging Face Hub (docs/hub.md)."""
    engine: EngineConfig = TransformersEngine()
    """Engine that runs the judge."""


class PolicyShape(Settings):
    """A copy of the policy itself, as trained before the first iteration."""

    kind: Literal["policy"] = "policy"


class TrainedJudge(JudgeModel):
    """A small judge, trained before the first iteration on correct and wrong completions of the data's problems."""

    implementation = "models.modeling.initial:write_trained_judge"
    inspection = "models.inspection.other_models:check_trained_judge"
    training = "models.records.training_orders:order_judge_warmup"
    uses_chat_template = False  # it learns from the bare question

    kind: Literal["trained"] = "trained"
    shape: Annotated[ScratchPolicy | VisionScratchPolicy | PolicyShape, Field(discriminator="kind")] = ScratchPolicy()
    """Model with which the training starts: a decoder with random weights, `scratch_vision` for a judge that is shown
    images, or `policy` for a copy of the policy after its warm-up and preference training."""
    warmup: WarmupConfig = WarmupConfig()
    """Settings for the supervised training of the judge."""
    engine: EngineConfig = TransformersEngine()
    """Engine that runs the judge."""

    @property
    def begins_as_policy(self) -> bool:
        """Whether the judge starts as a copy of the policy."""
        return isinstance(self.shape, PolicyShape)


class EndpointJudge(Endpoint, JudgeModel):
    """A judge model behind an OpenAI-compatible endpoint."""

    kind: Literal["endpoint"] = "endpoint"
    guided: Literal["none", "vllm"] = "none"
    """Method of restricting the endpoint's output to the possible answers: "none", or "vllm" for vLLM's structured
    outputs."""


JudgeModelConfig = Annotated[DirectoryJudge | TrainedJudge | EndpointJudge, Field(discriminator="kind")]


class Canaries(Settings):
    """Known-bad answers mixed in with the completions, to detect a judge that accepts everything."""

    answers: Annotated[tuple[str, ...], Field(min_length=1)] = ("I do not know.", "The answer is correct.")
    """Bad answers to insert. For verdicts of kind `steps`, each answer needs a step that is plainly wrong."""
    per_shard: Positive = 2
    """Number of canaries judged with each shard. Each costs as much as a completion."""
    pass_reward: Annotated[float, RenamedFrom("passing")] = 0.5
    """Minimum reward with which a canary passes, that is, is wrongly accepted by the judge. For verdicts of kind
    `steps`, a canary passes if no step is flagged."""
    max_passing: Fraction = 0.2
    """Maximum share of an iteration's canaries that may pass. If it is exceeded, the iteration fails."""


class JudgeReward(RewardTerm):
    """Reward computed from the verdict of a generative reward model (judge)."""

    implementation = "models.workers.judge:JudgeWorker"
    example = '{ kind = "judge", model = { kind = "directory", path = "models/judge" } }'

    kind: Literal["judge"] = "judge"
    model: JudgeModelConfig
    """Model that judges the completions."""
    template: str | None = None
    """Prompt for the judge. The default asks for the configured verdict and puts the completion between fences; a judge
    that the run trains gets a short prompt. `{prompt}`, `{completion}` and `{answer}` are filled in and escaped.
    `{fence}` is a delimiter that no completion can guess. For a verdict of kind `steps`, use `{steps}` (the completion
    with each step in tags) instead of `{completion}`. A verdict of kind `rubric` needs `{criterion}` as well."""
    chat_prompt: Annotated[Literal["messages", "text"], Since("0.2.0", before="text")] = "messages"
    """Form of `{prompt}` for chats: "messages" is the tools and messages of the prompt, each in tags and escaped.
    "text" is the prompt as rendered by the policy's template. No effect on plain-text prompts."""
    images: Annotated[Literal["none", "prompt"], Since("0.1.0", before="none")] = "none"
    """Images shown to the judge: "none", or with "prompt" the images of the prompt, in order, before the text. For a
    text-to-image policy, "prompt" shows the generated picture."""
    image_test_question: Annotated[
        str,
        Since("0.1.0", before="What colour is the square in the image? Answer with one word."),
        RenamedFrom("sight_question"),
    ] = "What colour is the square in the image? Answer with one word."
    """Test question for a judge behind an endpoint that is shown images. It is sent twice before the run, once with a
    red and once with a blue square. The run is refused if both answers are equal, because the judge then does not
    receive its images."""
    verdict: Annotated[VerdictConfig | RubricVerdict, Field(discriminator="kind")] = ChoiceVerdict()
    """Format of the judge's answer, and its conversion to a number."""
    votes: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of answers (votes) per completion."""
    vote: Literal["mean", "median", "majority"] = "mean"
    """Aggregation of the valid answers of several votes to one reward."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=512)
    """Sampling of the judge's answers."""
    retries: Annotated[int, Field(ge=0, le=8)] = 1
    """Maximum number of times that an answer without exactly one valid verdict is requested again. If all fail, the
    answer counts as invalid, not as 0."""
    max_invalid: Fraction = 0.05
    """Maximum share of an iteration's answers that may be invalid. For verdicts of kind `steps`, maximum share of
    completions without any valid answer. If it is exceeded, the iteration fails."""
    canaries: Canaries | None = None
    """Known-bad answers mixed in with the completions. If not set, there are none."""
    slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of worker slots for one replica of the model, each with `pools.threads` threads or its GPUs."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest possible score. It is the range of the verdict, because averages of votes stay inside
        it."""
        return self.verdict.score_range

    @property
    def is_graded(self) -> bool:
        """Whether the score can have more than two different values: the verdict is graded, or several votes are
        aggregated."""
        return self.verdict.is_graded or self.votes > 1

    @property
    def uses_images(self) -> bool:
        """Whether the judge is shown images."""
        return self.images == "prompt"

    @property
    def endpoint(self) -> EndpointJudge | None:
        """Endpoint of the judge, or None if the judge runs in a worker slot."""
        return self.model if isinstance(self.model, EndpointJudge) else None

    @property
    def is_trained(self) -> bool:
        """Whether the run trains the judge."""
        return self.model.training is not None

    @property
    def engine(self) -> EngineSettings | None:
        """Engine of the judge, or None if the judge is behind an endpoint."""
        return None if isinstance(self.model, EndpointJudge) else self.model.engine

    @property
    def answer_verdict(self) -> VerdictConfig:
        """Verdict on a single question. For a rubric, this is the verdict on one criterion."""
        return self.verdict.criterion if isinstance(self.verdict, RubricVerdict) else self.verdict

    @property
    def uses_rubric(self) -> bool:
        """Whether the judge rates the criteria of a rubric one by one."""
        return isinstance(self.verdict, RubricVerdict)

    @property
    def steps_verdict(self) -> StepsVerdict | None:
        """Verdict settings if the verdict is of kind `steps`, else None."""
        return self.verdict if isinstance(self.verdict, StepsVerdict) else None

    @property
    def granularity(self) -> Granularity:
        """Unit that this reward scores: "step" for a verdict of kind `steps`, else "completion"."""
        return "completion" if self.steps_verdict is None else "step"

    @property
    def aggregation(self) -> StepAggregation:
        """Aggregation of the step values to one number per completion."""
        return super().aggregation if self.steps_verdict is None else self.steps_verdict.aggregate

    @property
    def generates_text(self) -> bool:
        """Whether the judge generates its answer token by token. If not, only the probabilities of given answers are
        compared."""
        verdict = self.answer_verdict
        chooses = isinstance(verdict, LogprobVerdict) or (isinstance(verdict, ChoiceVerdict) and verdict.constrained)
        return not chooses


class DirectoryRewardModel(ServedModel):
    """A reward model directory in Hugging Face format: a sequence classifier with one output. The run stores a copy of
    it."""

    implementation = "models.modeling.initial:write_reward_model"
    inspection = "models.inspection.other_models:check_directory_reward_model"

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, or a model on the Hugging Face Hub (docs/hub.md)."""


class TrainedRewardModel(ServedModel):
    """A reward model that starts as the initial policy with a one-output head and is trained on the run's preference
    pairs (Bradley and Terry, 1952)."""

    training = "models.records.training_orders:order_reward_model_training"

    kind: Literal["trained"] = "trained"
    steps: Positive = 600
    """Number of optimizer steps."""
    batch_size: Positive = 32
    """Pairs per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate. The rate rises linearly over the first 5% of the steps, then decays to a tenth (cosine). Use
    1e-5 for pretrained policies."""
    centering: Annotated[float, Field(ge=0)] = 0.01
    """Factor of a loss term that keeps rewards around zero: the squared sum of the two rewards of a pair (arXiv
    2312.09244, section 3)."""

    @property
    def begins_as_policy(self) -> bool:
        """Whether the model starts as a copy of the policy: always true."""
        return True


RewardModelConfig = Annotated[DirectoryRewardModel | TrainedRewardModel, Field(discriminator="kind")]


class ModelReward(RewardTerm):
    """Score of a discriminative reward model, a sequence classifier with one output."""

    implementation = "models.workers.reward_model:RewardModelWorker"
    example = '{ kind = "model", model = { kind = "directory", path = "models/reward" } }'

    kind: Literal["model"] = "model"
    model: RewardModelConfig
    """Reward model that scores the completions."""
    template: str | None = None
    """Input of the model, with `{prompt}` and `{completion}`. The default is the chat template, or without one the
    prompt followed by the completion."""
    chat_prompt: Annotated[Literal["messages", "text"], Since("0.2.0", before="text")] = "messages"
    """Form in which the reward model's chat template receives the prompt of a chat: "messages" passes the messages of
    the prompt, followed by the completion as the assistant's message. "text" passes the prompt, as rendered by the
    policy's template, as one user message. With "messages", control tokens in prompts and completions are ordinary
    text, also if `template` is set; those that `template` itself contains are control tokens. With "text", control
    tokens in prompts become control tokens, and a completion that contains a special token gets no score."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations."""
    batch_tokens: Positive = 16384
    """Maximum number of tokens, with padding, in one forward pass."""
    slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of worker slots for one replica of the model."""

    is_graded: ClassVar[bool] = True
    votes: ClassVar[int] = 1
    """Number of scores per completion."""
    vote: ClassVar[Literal["mean"]] = "mean"
    """Aggregation of the scores to one reward."""
    engine: ClassVar[None] = None
    """Always None, because reward models run in their worker without an inference engine."""
    uses_rubric: ClassVar[bool] = False
    """Always false, because the model scores whole completions."""
    steps_verdict: ClassVar[None] = None
    """Always None, because the model scores whole completions."""
    generates_text: ClassVar[bool] = False
    """Always false, because the model scores in one forward pass and generates nothing."""
    endpoint: ClassVar[None] = None
    """Always None, because the model is never behind an endpoint."""

    @property
    def is_trained(self) -> bool:
        """Whether the run trains the reward model."""
        return self.model.training is not None


ServedReward = JudgeReward | ModelReward
"""Reward term that a model computes: a judge or a reward model. `implementation` names the class of the workers in
which the model runs."""
