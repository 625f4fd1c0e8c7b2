"""Configuration of model-based rewards: generative judges and discriminative reward models. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from rheostat.infra.config import Fraction, Positive, Settings, Since
from rheostat.infra.renamed import RenamedFrom
from rheostat.infra.store.inputs import ModelLocation
from rheostat.infra.variants import OneOf
from rheostat.models.config.clip_rewards import ClipSettings
from rheostat.models.config.endpoints import Endpoint
from rheostat.models.config.engines import EngineConfig, EngineSettings, SamplingConfig, TransformersEngine
from rheostat.models.config.policy import PolicySource, ScratchPolicy, TargetPolicy
from rheostat.models.config.process_models import ProcessModelReward
from rheostat.models.config.reward_terms import Granularity, ProbabilityAggregation, RewardTerm, StepAggregation
from rheostat.models.config.served_models import HostedModelReward, ServedModel
from rheostat.models.config.texts import AppendedTokens, ContinuingModel
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.config.verdicts import ChoiceVerdict, LogprobVerdict, RubricVerdict, StepsVerdict, VerdictConfig


# ---- models behind rewards
class JudgeModel(ContinuingModel, ServedModel):
    """Fields common to all judge models (language models that rate completions)."""

    uses_chat_template: ClassVar[bool] = True
    """Whether the judge's prompt is formatted as a chat, if the model has a chat template. If false, it is always plain
    text."""


class DirectoryJudge(AppendedTokens, JudgeModel):
    """Judge loaded from a causal language model directory in Hugging Face format. The run stores a copy of the
    directory."""

    implementation = "rheostat.models.modeling.initial:write_judge"
    inspection = "rheostat.models.inspection.other_models:check_directory_judge"

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, or a model on the Hugging Face Hub (docs/hub.md)."""
    engine: EngineConfig = TransformersEngine()
    """Inference engine that runs the judge."""


class PolicyShape(Settings):
    """Start of a judge's training from a copy of the policy, as trained before the first iteration."""

    kind: Literal["policy"] = "policy"


class TrainedJudge(JudgeModel):
    """Small judge that the run trains before the first iteration, on correct and wrong completions of the data's
    problems."""

    implementation = "rheostat.models.modeling.initial:write_trained_judge"
    inspection = "rheostat.models.inspection.other_models:check_trained_judge"
    training = "rheostat.models.records.training_orders:order_judge_warmup"
    uses_chat_template = False  # it learns from the bare question

    kind: Literal["trained"] = "trained"
    shape: Annotated[PolicySource | PolicyShape, OneOf((ScratchPolicy, PolicyShape, TargetPolicy))] = ScratchPolicy()
    """Model with which the judge's training starts: a decoder with random weights (`scratch`), a copy of the policy
    after its warm-up and preference training (`policy`), or a model that your code writes (`target`), such as a
    vision-language model for a judge that is shown images."""
    warmup: SupervisedWarmup = SupervisedWarmup()
    """Settings for the supervised training of the judge."""
    engine: EngineConfig = TransformersEngine()
    """Inference engine that runs the judge."""

    @field_validator("shape", mode="after")
    @classmethod
    def _require_text(cls, shape: PolicySource | PolicyShape) -> PolicySource | PolicyShape:
        if isinstance(shape, PolicySource) and shape.generates_images:
            raise ValueError(
                f"a judge outputs text, but policies of kind {shape.label!r} generate images. Use another shape, such "
                "as 'scratch'"
            )
        return shape

    @property
    def begins_as_policy(self) -> bool:
        """Whether the judge's training starts from a copy of the policy."""
        return isinstance(self.shape, PolicyShape)


class EndpointJudge(Endpoint, JudgeModel):
    """Judge model behind an OpenAI-compatible endpoint."""

    kind: Literal["endpoint"] = "endpoint"
    guided: Literal["none", "vllm"] = "none"
    """Method that restricts the endpoint's output to the possible answers of the verdict: "vllm" uses the structured
    outputs of vLLM, "none" does not restrict it."""


JudgeModelConfig = Annotated[DirectoryJudge | TrainedJudge | EndpointJudge, Field(discriminator="kind")]


class Canaries(Settings):
    """Known-bad answers (canaries) that the judge rates together with the completions, to detect a judge that accepts
    everything."""

    answers: Annotated[tuple[str, ...], Field(min_length=1)] = ("I do not know.", "The answer is correct.")
    """Known-bad answers that are sent to the judge. For verdicts of kind `steps`, each needs a step that is plainly
    wrong."""
    per_shard: Positive = 2
    """Number of known-bad answers that are judged with each shard of completions. Each costs as much as a
    completion."""
    pass_reward: Annotated[float, RenamedFrom("passing")] = 0.5
    """Reward from which a known-bad answer counts as wrongly accepted. For verdicts of kind `steps`, it counts as
    wrongly accepted if the judge flags no step."""
    max_passing: Fraction = 0.2
    """Maximum share of an iteration's known-bad answers that may be wrongly accepted. If it is exceeded, the iteration
    fails."""


class JudgeReward(RewardTerm):
    """Reward computed from the verdict of a language model that rates completions (judge)."""

    implementation = "rheostat.models.workers.judge:JudgeWorker"
    checks = {
        "settings": "rheostat.models.inspection.rewards:check_judge_settings",
        "policy": "rheostat.models.inspection.rewards:check_judge_policy",
        "models": "rheostat.models.inspection.rewards:check_model",
        "endpoints": "rheostat.models.inspection.rewards:check_judge_endpoint",
    }
    example = '{ kind = "judge", model = { kind = "directory", path = "models/judge" } }'

    kind: Literal["judge"] = "judge"
    model: JudgeModelConfig
    """Judge: the language model that rates the completions."""
    template: str | None = None
    """Prompt for the judge. The default asks for the configured verdict and puts the completion between fences; a judge
    that the run trains gets a shorter prompt. `{prompt}`, `{completion}` and `{answer}` are replaced by the escaped
    texts, and `{fence}` by a delimiter that no completion can guess. For a verdict of kind `steps`, use `{steps}` (the
    completion with each step in tags) instead of `{completion}`. A verdict of kind `rubric` also needs
    `{criterion}`."""
    chat_prompt: Annotated[Literal["messages", "text"], Since("0.2.0", before="text")] = "messages"
    """Text that replaces `{prompt}` if the prompt is a chat. "messages" is the tools and messages of the prompt, each
    escaped and enclosed in tags. "text" is the prompt as rendered by the policy's chat template. No effect on
    plain-text prompts."""
    images: Annotated[Literal["none", "prompt"], Since("0.1.0", before="none")] = "none"
    """Images shown to the judge: none with "none". With "prompt", the images of the prompt, in order and before the
    text, or the generated picture of a text-to-image policy."""
    image_test_question: Annotated[
        str,
        Since("0.1.0", before="What colour is the square in the image? Answer with one word."),
        RenamedFrom("sight_question"),
    ] = "What colour is the square in the image? Answer with one word."
    """Test question for a judge behind an endpoint that is shown images. It is sent twice before the run, once with a
    red and once with a blue square. The run is refused if both answers are equal, because the judge then does not
    receive its images."""
    verdict: Annotated[VerdictConfig | RubricVerdict, Field(discriminator="kind")] = ChoiceVerdict()
    """Format of the judge's verdict in its answer, and the conversion of the verdict to a number."""
    votes: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of answers (votes) that are requested for each completion."""
    vote: Literal["mean", "median", "majority"] = "mean"
    """Method that combines the valid answers (votes) on a completion into one reward."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=512)
    """Sampling settings for the judge's answers."""
    retries: Annotated[int, Field(ge=0, le=8)] = 1
    """Maximum number of times that an answer is requested again because it does not contain exactly one valid verdict.
    If all attempts fail, the vote counts as invalid, not as 0."""
    max_invalid: Fraction = 0.05
    """Maximum share of invalid answers in an iteration. For verdicts of kind `steps`, maximum share of completions
    without any valid answer. If it is exceeded, the iteration fails."""
    canaries: Canaries | None = None
    """Known-bad answers that the judge also has to rate, to detect a judge that accepts everything. If not set, none
    are used."""
    slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of worker slots that one replica of the judge occupies. Each slot has `pools.threads` threads, or the GPUs
    of a worker."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest possible score, or None if it is unlimited. This is the range of the verdict, because the
        combined value of several votes stays inside it."""
        return self.verdict.score_range

    @property
    def is_graded(self) -> bool:
        """Whether the score can have more than two different values. This is the case if the verdict has more than two
        values, or if several votes are combined."""
        return self.verdict.is_graded or self.votes > 1

    @property
    def uses_images(self) -> bool:
        """Whether the judge is shown images."""
        return self.images == "prompt"

    @property
    def endpoint(self) -> EndpointJudge | None:
        """Endpoint of the judge, or None if the judge runs in worker slots."""
        return self.model if isinstance(self.model, EndpointJudge) else None

    @property
    def is_trained(self) -> bool:
        """Whether the run trains the judge."""
        return self.model.training is not None

    @property
    def engine(self) -> EngineSettings | None:
        """Inference engine of the judge, or None if the judge is behind an endpoint."""
        return None if isinstance(self.model, EndpointJudge) else self.model.engine

    @property
    def answer_verdict(self) -> VerdictConfig:
        """Verdict that one answer of the judge contains. For a rubric, this is the verdict on a single criterion."""
        return self.verdict.criterion if isinstance(self.verdict, RubricVerdict) else self.verdict

    @property
    def uses_rubric(self) -> bool:
        """Whether the judge rates each criterion of the problem's rubric separately."""
        return isinstance(self.verdict, RubricVerdict)

    @property
    def steps_verdict(self) -> StepsVerdict | None:
        """Settings of the verdict if it lists the wrong steps of a completion (kind `steps`), else None."""
        return self.verdict if isinstance(self.verdict, StepsVerdict) else None

    @property
    def granularity(self) -> Granularity:
        """Unit that this reward scores: "step" for a verdict of kind `steps`, else "completion"."""
        return "completion" if self.steps_verdict is None else "step"

    @property
    def aggregation(self) -> StepAggregation | ProbabilityAggregation:
        """Method that combines the values of steps into one number per completion."""
        return super().aggregation if self.steps_verdict is None else self.steps_verdict.aggregate

    @property
    def generates_text(self) -> bool:
        """Whether the judge generates an answer token by token. If not, only the probabilities of the possible answers
        are computed."""
        verdict = self.answer_verdict
        chooses = isinstance(verdict, LogprobVerdict) or (isinstance(verdict, ChoiceVerdict) and verdict.constrained)
        return not chooses


class DirectoryRewardModel(ServedModel):
    """Reward model loaded from a directory in Hugging Face format: a sequence classifier with one output. The run
    stores a copy of the directory."""

    implementation = "rheostat.models.modeling.initial:write_reward_model"
    inspection = "rheostat.models.inspection.other_models:check_directory_reward_model"

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, or a model on the Hugging Face Hub (docs/hub.md)."""


class TrainedRewardModel(ServedModel):
    """Reward model that the run trains on its preference pairs (Bradley and Terry, 1952). Training starts from the
    initial policy with a one-output head."""

    training = "rheostat.models.records.training_orders:order_reward_model_training"

    kind: Literal["trained"] = "trained"
    steps: Positive = 600
    """Number of optimizer steps."""
    batch_size: Positive = 32
    """Number of preference pairs per optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate. The rate rises linearly over the first 5% of the steps, then decays to a tenth (cosine). Use
    1e-5 for pretrained policies."""
    centering: Annotated[float, Field(ge=0)] = 0.01
    """Factor of a loss term that keeps rewards close to zero: the squared sum of the two rewards of a pair (arXiv
    2312.09244, section 3)."""

    @property
    def begins_as_policy(self) -> bool:
        """Whether the model starts as a copy of the policy. This is always true."""
        return True


RewardModelConfig = Annotated[DirectoryRewardModel | TrainedRewardModel, Field(discriminator="kind")]


class ModelReward(HostedModelReward):
    """Reward computed by a reward model: a sequence classifier with one output."""

    scorer = "rheostat.models.workers.reward_model:TextScorer"
    example = '{ kind = "model", model = { kind = "directory", path = "models/reward" } }'

    kind: Literal["model"] = "model"
    model: RewardModelConfig
    """Reward model that scores the completions."""
    template: str | None = None
    """Input text of the reward model, with `{prompt}` and `{completion}`. The default is the model's chat template, or,
    if it has none, the prompt followed by the completion."""
    chat_prompt: Annotated[Literal["messages", "text"], Since("0.2.0", before="text")] = "messages"
    """Form in which the reward model's chat template receives the prompt, if the prompt is a chat. "messages" passes
    the messages of the prompt, followed by the completion as a message of the assistant. "text" passes the prompt as
    one user message, as rendered by the policy's chat template. With "messages", control tokens in prompts and
    completions are encoded as ordinary text, also if `template` is set; control tokens of `template` itself stay
    control tokens. With "text", control tokens in prompts stay control tokens, and a completion that contains a special
    token gets no score."""
    batch_tokens: Positive = 16384
    """Maximum number of tokens, including padding, in one forward pass."""

    @property
    def is_trained(self) -> bool:
        """Whether the run trains the reward model."""
        return self.model.training is not None


class ClipModel(ClipSettings, ServedModel):
    """CLIP model that is loaded from a directory. The run stores a copy of the model and of its head."""

    implementation = "rheostat.models.rewards.clip:write_clip_model"
    inspection = "rheostat.models.inspection.other_models:check_clip_model"

    kind: Literal["directory"] = "directory"


class ClipModelReward(HostedModelReward):
    """Score of the last generated picture by a CLIP model in worker slots, with the same settings as the reward `clip`.
    If the slots have GPUs, the model runs on a GPU."""

    scorer = "rheostat.models.rewards.clip:PictureScorer"
    example = '{ kind = "clip_model", model = { path = "models/pickscore", value = "logit" } }'

    kind: Literal["clip_model"] = "clip_model"
    model: ClipModel
    """CLIP model that scores the pictures."""
    batch_pictures: Positive = 64
    """Maximum number of pictures in one forward pass on a GPU. On the CPU, each picture has a separate forward pass,
    because larger batches are rounded differently."""

    chat_prompt: ClassVar[Literal["text"]] = "text"
    """Form in which the model receives chat prompts: always one text."""
    is_trained: ClassVar[bool] = False
    """Whether the run trains the model: always false."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """Lowest and highest score: -1 and 1 for a cosine similarity, None for logits and for a head."""
        return self.model.score_range

    @property
    def uses_images(self) -> bool:
        """Whether this reward reads images: always true."""
        return True


ServedReward = JudgeReward | ModelReward | ProcessModelReward | ClipModelReward
"""Reward term that a model computes: a judge or a reward model. `implementation` names the class of the workers that
run the model."""
