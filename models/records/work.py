"""Work records: one for each kind of request to a worker. They refer to stored data and never contain data."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from infra.store.bundles import BundleRef
from infra.store.shards import ShardRef
from models.config.algorithms import CriticConfig
from models.config.data import DataConfig
from models.config.denoising import DenoisingConfig
from models.config.engines import SamplingConfig
from models.config.environments import DialogueEnvironment, EnvironmentConfig
from models.config.images import PixelLimits
from models.config.judges import JudgeReward, ServedReward, TrainedRewardModel
from models.config.policy import PolicyConfig
from models.config.preferences import PreferencesConfig
from models.config.rollout import DynamicSampling, PartialRollout
from models.config.teachers import TeacherDirectory
from models.config.training import DpoConfig, PolicyWarmup, WarmupConfig
from models.records.versions import ModelVersion


@dataclass(frozen=True, slots=True)
class PolicyWork:
    """Request to create the initial policy: build it and train its tokenizer, or import it."""

    policy: PolicyConfig
    data: DataConfig
    seed: int


@dataclass(frozen=True, slots=True)
class CriticWork:
    """Request to create the initial critic, from the initial policy or from the configured directory."""

    policy: ModelVersion
    critic: CriticConfig


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Request to render and tokenize a split (`train` or `heldout`) into one prompt shard and media shards."""

    data: DataConfig
    split: str
    policy: ModelVersion
    seed: int
    max_new_tokens: int
    """Maximum tokens of a completion. A prompt that leaves less room in the policy's context is invalid input."""
    environment: EnvironmentConfig | None = None
    """Environment whose tools are described in the prompts, or None."""


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """Request to generate `group_size` completions for each of the given prompt rows, and write one rollout shard."""

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
    """Shard of groups that an earlier iteration cut. They continue from where they ended, with their original seeds."""
    partial: PartialRollout | None = None
    """Settings of partial rollout. If set, finished groups are the first result shard, cut groups the second."""
    user: ModelVersion | None = None
    """Model that plays the user in dialogues, or None if the run stores no such model."""
    records_experts: bool = False
    """Whether the shard stores, for each token, the experts that a mixture-of-experts policy chose."""
    denoising: DenoisingConfig | None = None
    """Settings of image generation, which is deterministic at temperature 0, or None for a language policy."""


@dataclass(frozen=True, slots=True)
class VerdictShard:
    """Shard with one reward model's or judge's verdicts on a rollout shard, and the name of its reward term."""

    term: str
    verdicts: ShardRef


@dataclass(frozen=True, slots=True)
class JudgeWork:
    """Request to judge every completion of one rollout shard with a reward's model, and write one verdict shard."""

    iteration: int
    rollouts: ShardRef
    model: ModelVersion | None
    """Model that judges, or None if it is behind an endpoint."""
    seed: int
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""
    prompts: ShardRef | None = None
    """Shard of the prompts, or None if the model does not receive the chat messages of prompts."""


@dataclass(frozen=True, slots=True)
class ScoringWork:
    """Request to score every completion of one rollout shard, and write one score shard with the same row order."""

    iteration: int
    rollouts: ShardRef
    verdicts: tuple[VerdictShard, ...] = ()
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""
    metric: str = ""
    """Reward term whose raw scores decide whether a group is informative, or an empty string if that is not needed."""
    tokenizer: BundleRef | None = None
    """Bundle of a policy with the run's tokenizer, or None if no reward scores steps or tokens."""
    max_missing: int | None = None
    """Maximum number of missing scores that the credit stage may still accept, or None if unknown."""


@dataclass(frozen=True, slots=True)
class ScoredShard:
    """Rollout shard with its score shard; row i of one belongs to row i of the other."""

    rollouts: ShardRef
    scores: ShardRef
    rows: tuple[int, ...] | None = None
    """Prompt rows to use, or None to use all."""


@dataclass(frozen=True, slots=True)
class ExcerptWork:
    """Request to read a few completions of an iteration, with shortened texts, for a report."""

    iteration: int
    shards: tuple[ScoredShard, ...]
    prompts: int
    """Number of prompts shown, in row order."""
    characters: int
    """Maximum length of a text in characters."""
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts and with generated pictures."""


@dataclass(frozen=True, slots=True)
class EstimateWork:
    """Request to compute auxiliary scores (log-probs, values) of every token of an iteration's rollouts.

    The result is one shard per rollout shard, in the same order. Every rank receives the same record. A model that is
    None computes nothing.
    """

    iteration: int
    shards: tuple[ScoredShard, ...]
    policy: ModelVersion
    reference: ModelVersion | None = None
    critic: ModelVersion | None = None
    teacher: ModelVersion | None = None
    """Teacher whose model the run stores. A teacher behind an endpoint is read from the configuration."""
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""


@dataclass(frozen=True, slots=True)
class CreditWork:
    """Request to turn an iteration's scored rollouts into training samples, in the order of `shards`."""

    iteration: int
    shards: tuple[ScoredShard, ...]
    target: int | None = None
    """Target number of informative groups. Groups beyond it are surplus groups, not trained on. None trains on all."""
    dynamic: DynamicSampling | None = None
    policy_version: int = 0
    """Policy version that is trained on the samples. Tokens of earlier versions are stale."""
    max_new_tokens: int = 0
    """Maximum length of completions in tokens, from which length penalties are computed."""
    estimates: tuple[ShardRef, ...] = ()
    """Shards of auxiliary models' outputs, one for each item of `shards`. Empty if the algorithm needs none."""
    kl_coefficient: float = 0.0
    """Coefficient of the KL penalty in the reward."""


@dataclass(frozen=True, slots=True)
class ComparisonWork:
    """Request to compare new scores or samples of an iteration with the stored ones. No shard is written."""

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
    """Whether the policy is updated. While its critic warms up, only the critic is updated."""
    kl_coefficient: float = 0.0
    """Coefficient of the KL penalty in the loss."""
    keeps_state: bool = True
    """Whether the optimizer state of the new version is stored. If not, a restart repeats this update."""
    past: tuple["UpdateWork", ...] = ()
    """Earlier updates whose state was not stored, oldest first. A rank without their result in memory repeats them."""
    media: tuple[ShardRef, ...] = ()
    """Shards with the images of the prompts."""
    exact_behaviour: bool = False
    """Whether the behavior log-probs equal those that the trainer itself would compute, up to rounding."""
    was_moved: bool = False
    """Whether the past updates ran on other ranks, so that repeating them gives similar but not identical weights."""

    @property
    def is_last(self) -> bool:
        """Whether this is the last update, after which no rollouts are generated."""
        return self.policy.version + 1 == self.total_iterations


@dataclass(frozen=True, slots=True)
class WarmupWork:
    """Request to train a policy on worked examples or whole chats before the first iteration. Every rank receives the
    same record."""

    policy: ModelVersion
    data: DataConfig
    warmup: PolicyWarmup
    seed: int
    max_new_tokens: int = 0
    """Maximum tokens of a completion, for which prompts must leave room if `data.on_too_long` is `drop`."""


@dataclass(frozen=True, slots=True)
class RewardModelPreparation:
    """Request to create the model behind a reward: build it and train its tokenizer, or import it."""

    reward: ServedReward
    data: DataConfig
    seed: int


@dataclass(frozen=True, slots=True)
class TeacherWork:
    """Request to copy the teacher's model into the run."""

    teacher: TeacherDirectory
    policy: ModelVersion
    """Policy to distill into. The teacher must have the same tokens."""
    longest_tokens: int
    """Maximum tokens of prompt and completion together, which the teacher's context must hold."""
    pixels: PixelLimits
    """Minimum and maximum size of the images that policy and teacher receive."""


@dataclass(frozen=True, slots=True)
class JudgeWarmupWork:
    """Request to train a judge on correct and wrong completions of the problems. Every rank gets the same record."""

    method: ClassVar[str] = "warm_judge"
    """Name of the update worker's method that handles this request."""
    judge: ModelVersion
    """Version of the judge from which the training starts."""
    reward: JudgeReward
    data: DataConfig
    warmup: WarmupConfig
    seed: int

    @property
    def course(self) -> str:
        """Length of the training in words, for messages."""
        return f"{self.warmup.steps} steps of {self.warmup.batch_size} examples"


@dataclass(frozen=True, slots=True)
class UserPreparation:
    """Request to create the model of the simulated user: build it and train its tokenizer, or import it."""

    environment: DialogueEnvironment
    data: DataConfig
    seed: int


@dataclass(frozen=True, slots=True)
class UserWarmupWork:
    """Request to train the simulated user on worked episodes. Every rank receives the same record."""

    user: ModelVersion
    """Version of the simulated user from which the training starts."""
    environment: DialogueEnvironment
    data: DataConfig
    warmup: WarmupConfig
    seed: int


@dataclass(frozen=True, slots=True)
class PreferenceWork:
    """Request to train a policy directly on preferences (DPO). Every rank receives the same record."""

    policy: ModelVersion
    """Policy from which the training starts, which is also the reference of the DPO loss."""
    data: DataConfig
    preferences: PreferencesConfig
    dpo: DpoConfig
    seed: int


@dataclass(frozen=True, slots=True)
class RewardModelWork:
    """Request to add a one-output head to a policy and train it on preferences. Every rank receives the same record."""

    method: ClassVar[str] = "train_reward_model"
    """Name of the update worker's method that handles this request."""
    policy: ModelVersion
    """Policy whose weights, except the output layer, are the start of the reward model."""
    data: DataConfig
    preferences: PreferencesConfig
    training: TrainedRewardModel
    template: str | None
    """Template of the model's input, the same as for scoring, or None for the default."""
    seed: int
    chat_prompt: Literal["messages", "text"] = "text"

    @property
    def course(self) -> str:
        """Length of the training in words, for messages."""
        return f"{self.training.steps} steps of {self.training.batch_size} pairs"


@dataclass(frozen=True, slots=True)
class ExportWork:
    """Request to write a policy to one directory for use outside of Rheostat."""

    base: Path
    """Directory of the policy's weights."""
    adapter: Path | None
    """Directory of the adapter to add to the weights, or None."""
    target: Path
    """Empty directory to which the policy is written."""
    dtype: Literal["float32", "bfloat16"] | None
    """Precision of the written weights. None writes float32 if an adapter is added, else the precision of the files."""
