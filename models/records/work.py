"""One record per kind of work that a stage asks of a worker."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, cast

from infra.plugins import find_target
from infra.store.bundles import BundleRef
from infra.store.shards import ShardRef
from models.config.algorithms import CriticConfig
from models.config.data import DataConfig, PixelLimits, PreferencesConfig
from models.config.denoising import DenoisingConfig
from models.config.engines import SamplingConfig
from models.config.environments import DialogueEnvironment, EnvironmentConfig
from models.config.judges import JudgeReward, ModelReward, ServedReward, TrainedJudge, TrainedRewardModel
from models.config.policy import PolicyConfig
from models.config.rollout import DynamicSampling, PartialRollout
from models.config.teachers import TeacherDirectory
from models.config.training import DpoConfig, WarmupConfig
from models.records.versions import ModelVersion


@dataclass(frozen=True, slots=True)
class PolicyWork:
    """Make the policy that everything starts from: build it and train its tokenizer, or import it."""

    policy: PolicyConfig
    data: DataConfig
    seed: int


@dataclass(frozen=True, slots=True)
class CriticWork:
    """Make the first critic: from the initial policy, or from the directory that is configured."""

    policy: ModelVersion
    critic: CriticConfig


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Render and tokenize a data set's split (`train` or `heldout`) into a prompts shard and media shards."""

    data: DataConfig
    split: str
    policy: ModelVersion
    seed: int
    max_new_tokens: int
    """Room that completions need; a prompt that leaves less in the policy's context is bad input."""
    environment: EnvironmentConfig | None = None
    """Whose tools prompts show."""


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """Generate `group_size` completions for each of the named prompts: one shard."""

    iteration: int
    policy: ModelVersion
    prompts: ShardRef
    rows: tuple[int, ...]
    group_size: int
    sampling: SamplingConfig
    seed: int
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""
    continued: ShardRef | None = None
    """Groups that an earlier iteration cut; they go on where they were, with the seeds that they have."""
    partial: PartialRollout | None = None
    """Cut completions at its budget: finished groups come back as the first shard, the others as a second."""
    user: ModelVersion | None = None
    """The model that plays the user in dialogues, where the run holds one."""
    notes_experts: bool = False
    """Whether the shard says what the policy's routers chose."""
    denoising: DenoisingConfig | None = None
    """How pictures are drawn: from end to end without noise where the sampling's temperature is 0. Of a policy that
    writes none."""


@dataclass(frozen=True, slots=True)
class VerdictShard:
    """Answers of one served reward about one rollout shard."""

    term: str
    verdicts: ShardRef


@dataclass(frozen=True, slots=True)
class JudgeWork:
    """Have a served reward judge every completion of one rollout shard: one shard of verdicts."""

    iteration: int
    rollouts: ShardRef
    model: ModelVersion | None
    """The model; none behind an endpoint."""
    seed: int
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""


@dataclass(frozen=True, slots=True)
class ScoringWork:
    """Score every completion of one rollout shard: one shard of the same order."""

    iteration: int
    rollouts: ShardRef
    verdicts: tuple[VerdictShard, ...] = ()
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""
    metric: str = ""
    """Raw term by which a group counts as informative; empty where nobody asks."""
    tokenizer: BundleRef | None = None
    """Bundle of a policy with the run's tokenizer; none where no term values steps or tokens."""
    bearable: int | None = None
    """Missing scores beyond which credit is sure to refuse the iteration; none where that cannot be known."""


@dataclass(frozen=True, slots=True)
class ScoredShard:
    """Rollouts and their scores, paired in order."""

    rollouts: ShardRef
    scores: ShardRef
    rows: tuple[int, ...] | None = None
    """Prompt rows that count; none means all."""


@dataclass(frozen=True, slots=True)
class ExcerptWork:
    """Shorten a few completions for a report: the first of each of some prompts."""

    iteration: int
    shards: tuple[ScoredShard, ...]
    prompts: int
    """Prompts shown, in order."""
    characters: int
    """Longest text shown."""
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts, and with the pictures that completions are."""


@dataclass(frozen=True, slots=True)
class EstimateWork:
    """Ask models about every token of an iteration's rollouts: one shard per rollout shard, in the same order.

    Every rank gets the same record; a model that is none is not asked.
    """

    iteration: int
    shards: tuple[ScoredShard, ...]
    policy: ModelVersion
    reference: ModelVersion | None = None
    critic: ModelVersion | None = None
    teacher: ModelVersion | None = None
    """A teacher whose model the run holds; one behind an endpoint is known from the configuration."""
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""


@dataclass(frozen=True, slots=True)
class CreditWork:
    """Turn an iteration's scored rollouts, in order, into training samples."""

    iteration: int
    shards: tuple[ScoredShard, ...]
    target: int | None = None
    """Informative groups wanted: the first so many in order are trained, the others are surplus. None takes all."""
    dynamic: DynamicSampling | None = None
    policy_version: int = 0
    """Version that learns from the samples; tokens of earlier ones are stale."""
    max_new_tokens: int = 0
    """Length limit of completions, for penalties near it."""
    estimates: tuple[ShardRef, ...] = ()
    """What models say of the tokens, one shard per pair; none where the algorithm needs none."""
    kl_coefficient: float = 0.0
    """Of the penalty in the reward."""


@dataclass(frozen=True, slots=True)
class ComparisonWork:
    """Compare new scores or samples of an iteration with the stored ones; no shard is written."""

    stored: tuple[ShardRef, ...]
    new: tuple[ShardRef, ...]


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """Take the optimizer steps of one iteration; every rank gets the same record and reads its own rows."""

    iteration: int
    policy: ModelVersion
    reference: ModelVersion
    samples: tuple[ShardRef, ...]
    total_iterations: int
    seed: int
    critic: ModelVersion | None = None
    """The value model before the update; none where the algorithm has none."""
    learns: bool = True
    """Whether the policy takes steps; while its critic warms up it does not."""
    kl_coefficient: float = 0.0
    """Of the penalty in the loss."""
    keeps_state: bool = True
    """Whether the new version is to have its optimizer's state in the store."""
    past: tuple["UpdateWork", ...] = ()
    """Updates since the newest state in the store, oldest first: taken again where the ranks do not stand here."""
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""
    exact_behaviour: bool = False
    """Whether the behaviour's log-probs are what the trainer itself would compute, up to rounding."""
    was_moved: bool = False
    """Whether the past was learnt on other ranks: what these learn again is near it, not the same."""

    @property
    def is_last(self) -> bool:
        """Whether no rollouts are generated after it."""
        return self.policy.version + 1 == self.total_iterations


@dataclass(frozen=True, slots=True)
class WarmupWork:
    """Train a policy on worked examples before the first iteration; every rank gets the same record."""

    policy: ModelVersion
    data: DataConfig
    warmup: WarmupConfig
    seed: int
    max_new_tokens: int = 0
    """Room that completions need, where `data.too_long` is `drop`."""


@dataclass(frozen=True, slots=True)
class RewardModelPreparation:
    """Make the model behind a served reward: build it and train its tokenizer, or import it."""

    reward: ServedReward
    data: DataConfig
    seed: int


@dataclass(frozen=True, slots=True)
class TeacherWork:
    """Copy the model that teaches into the run."""

    teacher: TeacherDirectory
    policy: ModelVersion
    """Whose tokens it must know."""
    longest_tokens: int
    """Prompt and completion that it must have room for, together."""
    pixels: PixelLimits
    """How large images are for the policy, and so for it."""


@dataclass(frozen=True, slots=True)
class JudgeWarmupWork:
    """Train a judge on the data's problems with right and wrong completions; every rank gets the same record."""

    method: ClassVar[str] = "warm_judge"
    """Of the update worker."""
    judge: ModelVersion
    """As it was built."""
    reward: JudgeReward
    data: DataConfig
    warmup: WarmupConfig
    seed: int

    @property
    def course(self) -> str:
        """What its training consists of."""
        return f"{self.warmup.steps} steps of {self.warmup.batch_size} examples"


@dataclass(frozen=True, slots=True)
class UserPreparation:
    """Make the model that plays the user: build it and train its tokenizer, or import it."""

    environment: DialogueEnvironment
    data: DataConfig
    seed: int


@dataclass(frozen=True, slots=True)
class UserWarmupWork:
    """Train the model that plays the user on worked episodes; every rank gets the same record."""

    user: ModelVersion
    """As it was built."""
    environment: DialogueEnvironment
    data: DataConfig
    warmup: WarmupConfig
    seed: int


@dataclass(frozen=True, slots=True)
class PreferenceWork:
    """Train a policy directly on preferences (DPO); every rank gets the same record."""

    policy: ModelVersion
    """Where it starts, and what it is compared with."""
    data: DataConfig
    preferences: PreferencesConfig
    dpo: DpoConfig
    seed: int


@dataclass(frozen=True, slots=True)
class RewardModelWork:
    """Give a policy a head of one output and train it on preferences; every rank gets the same record."""

    method: ClassVar[str] = "train_reward_model"
    """Of the update worker."""
    policy: ModelVersion
    """Whose trunk it starts from."""
    data: DataConfig
    preferences: PreferencesConfig
    training: TrainedRewardModel
    template: str | None
    """What it reads, as when it scores."""
    seed: int

    @property
    def course(self) -> str:
        """What its training consists of."""
        return f"{self.training.steps} steps of {self.training.batch_size} pairs"


class TrainingOrder(Protocol):
    """Says how an update worker trains the model behind a reward."""

    def __call__(
        self,
        base: ModelVersion,
        reward: Any,  # noqa: ANN401 -- its own settings, as the model's
        model: Any,  # noqa: ANN401
        /,
        *,
        data: DataConfig,
        preferences: PreferencesConfig | None,
        seed: int,
    ) -> JudgeWarmupWork | RewardModelWork:
        """`base` is where it starts."""
        ...


def order_training(
    base: ModelVersion, reward: ServedReward, *, data: DataConfig, preferences: PreferencesConfig | None, seed: int
) -> JudgeWarmupWork | RewardModelWork | None:
    """Say how the model behind a reward is trained; none where the run does not train it."""
    model = reward.model
    if model.training is None:
        return None
    order = cast(TrainingOrder, find_target(model.training, where=f"model {model.known_as!r}"))
    return order(base, reward, model, data=data, preferences=preferences, seed=seed)


def order_judge_warmup(
    base: ModelVersion,
    reward: JudgeReward,
    model: TrainedJudge,
    *,
    data: DataConfig,
    preferences: PreferencesConfig | None,
    seed: int,
) -> JudgeWarmupWork:
    """Train a judge as its own settings say."""
    return JudgeWarmupWork(judge=base, reward=reward, data=data, warmup=model.warmup, seed=seed)


def order_reward_model_training(
    base: ModelVersion,
    reward: ModelReward,
    model: TrainedRewardModel,
    *,
    data: DataConfig,
    preferences: PreferencesConfig | None,
    seed: int,
) -> RewardModelWork:
    """Train a reward model on the run's preferences."""
    assert preferences is not None, "a configuration with a trained reward model has preferences"
    return RewardModelWork(
        policy=base, data=data, preferences=preferences, training=model, template=reward.template, seed=seed
    )


@dataclass(frozen=True, slots=True)
class ExportWork:
    """Write a policy as one directory for others."""

    base: Path
    """Directory of the weights."""
    adapter: Path | None
    """Directory of what is added to them."""
    target: Path
    """An empty directory."""
    dtype: Literal["float32", "bfloat16"] | None
    """Precision of the written weights; none is float32 where something is added, and that of the files otherwise."""
