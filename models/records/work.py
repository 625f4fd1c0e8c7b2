"""Work records: one for each kind of request to a worker. They refer to stored data and never contain data."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.shards import ShardRef
from rheostat.models.config.algorithms import CriticConfig
from rheostat.models.config.data import DataConfig
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.environments import EnvironmentConfig
from rheostat.models.config.episodes import DialogueEnvironment
from rheostat.models.config.images import PixelLimits
from rheostat.models.config.judges import JudgeReward, ServedReward, TrainedRewardModel
from rheostat.models.config.policy import PolicyConfig
from rheostat.models.config.preferences import PreferencesConfig
from rheostat.models.config.process_models import TrainedProcessModel
from rheostat.models.config.rollout import DynamicSampling, PartialRollout
from rheostat.models.config.teachers import TEACHER_KEY, TeacherDirectory
from rheostat.models.config.texts import RULES_BEFORE, TextRules
from rheostat.models.config.training import DpoConfig, SupervisedWarmup, WarmupConfig
from rheostat.models.records.versions import ModelVersion


@dataclass(frozen=True, slots=True)
class PolicyWork:
    """Request to create the initial policy: either build it and train its tokenizer, or import an existing model."""

    policy: PolicyConfig
    data: DataConfig
    seed: int


@dataclass(frozen=True, slots=True)
class CriticWork:
    """Request to create the initial critic from the initial policy, or from the configured directory."""

    policy: ModelVersion
    critic: CriticConfig


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Request to render and tokenize the prompts of a split (`train` or `heldout`). The result is one prompt shard, and
    media shards with the images."""

    data: DataConfig
    split: str
    policy: ModelVersion
    seed: int
    max_new_tokens: int
    """Maximum number of tokens of a completion. A prompt that leaves less room in the policy's context is invalid."""
    environment: EnvironmentConfig | None = None
    """Environment whose tools are described in the prompts, or None if there is no environment."""


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """Request to generate `group_size` completions for each of the prompts in `rows`. The result is one rollout
    shard."""

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
    """Shard with groups of completions that an earlier iteration interrupted at its token limit. They are continued
    with their original seeds."""
    partial: PartialRollout | None = None
    """Settings of partial rollout, in which completions may be interrupted and continued in the next iteration. If set,
    the first result shard contains the finished groups, and the second the interrupted groups."""
    user: ModelVersion | None = None
    """Model that plays the user in dialogues, or None if the run contains no such model."""
    records_experts: bool = False
    """Whether the rollout shard stores, for each token, the experts that the routers of a mixture-of-experts policy
    chose."""
    denoising: DenoisingConfig | None = None
    """Settings of image generation for text-to-image policies, which is deterministic at temperature 0. None for a
    language policy."""


@dataclass(frozen=True, slots=True)
class VerdictShard:
    """Reference to a shard with the verdicts of a judge or reward model on a rollout shard, and the name of the reward
    term."""

    term: str
    verdicts: ShardRef


@dataclass(frozen=True, slots=True)
class JudgeWork:
    """Request to let the judge or reward model of a reward term rate every completion of one rollout shard. The result
    is one verdict shard."""

    iteration: int
    rollouts: ShardRef
    model: ModelVersion | None
    """Judge or reward model, or None if it is behind an endpoint."""
    seed: int
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""
    prompts: ShardRef | None = None
    """Prompt shard, from which the chat messages of prompts are read. None if the judge does not receive them."""


@dataclass(frozen=True, slots=True)
class ScoringWork:
    """Request to compute the rewards of every completion of one rollout shard. The result is one score shard with the
    same row order."""

    iteration: int
    rollouts: ShardRef
    verdicts: tuple[VerdictShard, ...] = ()
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""
    metric: str = ""
    """Name of the reward term whose raw scores decide whether a group is informative (has unequal rewards). Empty if
    this decision is not needed."""
    tokenizer: BundleRef | None = None
    """Bundle of a policy from which the run's tokenizer is loaded, or None if no reward scores steps or tokens."""
    max_missing: int | None = None
    """Maximum number of missing scores with which the credit stage can still continue, or None if the number is
    unknown."""


@dataclass(frozen=True, slots=True)
class ScoredShard:
    """Rollout shard together with its score shard. Row i of both belongs to the same completion."""

    rollouts: ShardRef
    scores: ShardRef
    rows: tuple[int, ...] | None = None
    """Rows of the prompts whose completions are used, or None to use all."""


@dataclass(frozen=True, slots=True)
class ExcerptWork:
    """Request to read a few completions of an iteration, with shortened texts, for display in a report."""

    iteration: int
    shards: tuple[ScoredShard, ...]
    prompts: int
    """Number of prompts to show, in row order."""
    characters: int
    """Maximum number of characters of each text."""
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts and with generated images."""


@dataclass(frozen=True, slots=True)
class EstimateWork:
    """Request to compute the outputs of auxiliary models (reference, critic, teacher) for every token of an iteration's
    rollouts. No output is computed for a model that is None.

    The result is one shard per rollout shard, in the same order. Every rank receives the same record.
    """

    iteration: int
    shards: tuple[ScoredShard, ...]
    policy: ModelVersion
    reference: ModelVersion | None = None
    critic: ModelVersion | None = None
    teacher: ModelVersion | None = None
    """Teacher model that is stored in the run. A teacher behind an endpoint is read from the configuration instead."""
    specialists: tuple[ModelVersion | None, ...] = ()
    """Teacher model of each item of `algorithm.distillation.specialists`, or None if it is behind an endpoint."""
    prompts: ShardRef | None = None
    """Shard with the prompts, from which specialists are selected and the prompts of some teachers are built. None if
    neither is needed."""
    text_rules: TextRules = RULES_BEFORE
    """Rules for converting the prompts of teachers to tokens."""
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""


@dataclass(frozen=True, slots=True)
class CreditWork:
    """Request to compute advantages for an iteration's scored rollouts and turn them into training samples, in the
    order of `shards`."""

    iteration: int
    shards: tuple[ScoredShard, ...]
    target: int | None = None
    """Target number of informative groups (groups with unequal rewards). Further groups become surplus and are not
    trained on. None means that all groups are trained on."""
    dynamic: DynamicSampling | None = None
    policy_version: int = 0
    """Version of the policy that is trained on the samples. Tokens generated by earlier versions are stale."""
    max_new_tokens: int = 0
    """Maximum length of completions in tokens, from which the length penalty is computed."""
    estimates: tuple[ShardRef, ...] = ()
    """Shards with the auxiliary models' outputs, one for each item of `shards`. Empty if the algorithm needs no
    auxiliary model."""
    kl_coefficient: float = 0.0
    """Coefficient of the KL penalty in the reward, in this iteration."""
    solve_rate_term: str = ""
    """Name of the reward term from which the solve rates of the prompts are computed. Empty if they are not needed."""
    sample_term: str = ""
    """Name of the reward term whose scores are stored with the samples. Empty if the update does not need them."""


@dataclass(frozen=True, slots=True)
class ComparisonWork:
    """Request to compare new scores or samples of an iteration with the stored ones. The result contains metrics, and
    no shard is written."""

    stored: tuple[ShardRef, ...]
    new: tuple[ShardRef, ...]


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """Request to run the optimizer steps of one iteration. Every rank receives the same record and reads its own
    rows."""

    iteration: int
    policy: ModelVersion
    reference: ModelVersion
    samples: tuple[ShardRef, ...]
    total_iterations: int
    seed: int
    critic: ModelVersion | None = None
    """Critic before the update, or None if the algorithm has none."""
    learns: bool = True
    """Whether the policy is updated. It is false while the critic warms up, when only the critic is updated."""
    kl_coefficient: float = 0.0
    """Coefficient of the KL penalty in the loss, in this iteration."""
    keeps_state: bool = True
    """Whether the optimizer state of the new version is stored. If not, this update is repeated after a restart."""
    past: tuple["UpdateWork", ...] = ()
    """Earlier updates whose optimizer state was not stored, oldest first. A rank that does not have their result in
    memory repeats these updates."""
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""
    ema_decay: float | None = None
    """Decay of the moving average of the policies, which is the next reference. None if the reference is no moving
    average."""
    exact_behaviour: bool = False
    """Whether the behavior log-probs (those of the engine that generated the tokens) equal the trainer's log-probs, up
    to rounding."""
    is_replayed: bool = False
    """Whether a policy of another run generated the samples, so that its log-probs are those of other weights."""
    was_moved: bool = False
    """Whether the updates in `past` ran with a different layout of ranks, so that repeating them gives similar but not
    identical weights."""
    stages_weights: bool = False
    """Whether the new weights are uploaded to a remote store only by the request `sync`. All workers must then be on
    the machine of the ranks, whose files they read."""

    @property
    def is_last(self) -> bool:
        """Whether this is the last update of the run, after which no rollouts are generated."""
        return self.policy.version + 1 == self.total_iterations


@dataclass(frozen=True, slots=True)
class WarmupWork:
    """Request to train a policy on worked examples or whole chats before the first iteration. Every rank receives the
    same record."""

    policy: ModelVersion
    data: DataConfig
    warmup: WarmupConfig
    seed: int
    max_new_tokens: int = 0
    """Maximum number of tokens of a completion. If `data.on_too_long` is `drop`, prompts that leave less room are
    excluded."""


@dataclass(frozen=True, slots=True)
class RewardModelPreparation:
    """Request to create the model behind a reward: either build it and train its tokenizer, or import an existing
    model."""

    reward: ServedReward
    data: DataConfig
    seed: int


@dataclass(frozen=True, slots=True)
class TeacherWork:
    """Request to import the teacher's model into the run."""

    teacher: TeacherDirectory
    policy: ModelVersion
    """Policy that is trained to match the teacher. Both must have the same vocabulary."""
    longest_tokens: int
    """Maximum number of tokens of prompt and completion together, which must fit into the teacher's context."""
    pixels: PixelLimits
    """Minimum and maximum size of the images that policy and teacher receive, in pixels."""
    where: str = TEACHER_KEY
    """Configuration key of the teacher, for messages."""


@dataclass(frozen=True, slots=True)
class JudgeWarmupWork:
    """Request to train a judge on correct and wrong completions of the problems. Every rank receives the same
    record."""

    method: ClassVar[str] = "warm_judge"
    """Name of the update worker's method that handles this request."""
    judge: ModelVersion
    """Version of the judge from which the training starts."""
    reward: JudgeReward
    data: DataConfig
    warmup: SupervisedWarmup
    seed: int

    @property
    def course(self) -> str:
        """Number of training steps and of examples per step, as text for messages."""
        return f"{self.warmup.steps} steps of {self.warmup.batch_size} examples"


@dataclass(frozen=True, slots=True)
class UserPreparation:
    """Request to create the model of the simulated user: either build it and train its tokenizer, or import an existing
    model."""

    environment: DialogueEnvironment
    data: DataConfig
    seed: int


@dataclass(frozen=True, slots=True)
class UserWarmupWork:
    """Request to train the simulated user on worked episodes (example dialogues in the data). Every rank receives the
    same record."""

    user: ModelVersion
    """Version of the simulated user from which the training starts."""
    environment: DialogueEnvironment
    data: DataConfig
    warmup: SupervisedWarmup
    seed: int


@dataclass(frozen=True, slots=True)
class PreferenceWork:
    """Request to train a policy directly on preference pairs (DPO and other losses). Every rank receives the same
    record."""

    policy: ModelVersion
    """Policy from which the training starts. It is also the reference of losses that have one."""
    data: DataConfig
    preferences: PreferencesConfig
    dpo: DpoConfig
    seed: int


@dataclass(frozen=True, slots=True)
class RewardModelWork:
    """Request to train a reward model on preference pairs: a policy with a new head of one output. Every rank receives
    the same record."""

    method: ClassVar[str] = "train_reward_model"
    """Name of the update worker's method that handles this request."""
    policy: ModelVersion
    """Policy from whose weights, except the output layer, the reward model is initialized."""
    data: DataConfig
    preferences: PreferencesConfig
    training: TrainedRewardModel
    template: str | None
    """Template of the reward model's input, which must be the same as for scoring. None means the default template."""
    seed: int
    chat_prompt: Literal["messages", "text"] = "text"

    @property
    def course(self) -> str:
        """Number of training steps and of pairs per step, as text for messages."""
        return f"{self.training.steps} steps of {self.training.batch_size} pairs"


@dataclass(frozen=True, slots=True)
class ProcessModelWork:
    """Request to train a process reward model on step labels: a policy with a new head of two outputs. Every rank
    receives the same record."""

    method: ClassVar[str] = "train_process_model"
    """Name of the update worker's method that handles this request."""
    policy: ModelVersion
    """Policy from whose weights, except the output layer, the process reward model is initialized."""
    training: TrainedProcessModel
    separator: str
    """Text that the model reads after each step, which must be the same as for scoring."""
    seed: int

    @property
    def course(self) -> str:
        """Number of training steps and of solutions per step, as text for messages."""
        return f"{self.training.steps} steps of {self.training.batch_size} solutions"


@dataclass(frozen=True, slots=True)
class ExportWork:
    """Request to write a policy to a directory for use outside of Rheostat."""

    base: Path
    """Directory of the policy's weights, without its adapter."""
    adapter: Path | None
    """Directory of the LoRA adapter to merge into the weights, or None if the policy has no adapter."""
    target: Path
    """Empty directory to which the policy is written."""
    dtype: Literal["float32", "bfloat16"] | None
    """Precision of the written weights. If None, weights with a merged adapter are written in float32, and other
    weights in the precision of their files."""
