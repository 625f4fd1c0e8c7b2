"""Configuration of scoring: the reward terms and their limits. Torch-free."""

from typing import Annotated, Final, Literal, get_args

from pydantic import Field, field_validator, model_validator

from rheostat.infra.config import Fraction, Settings
from rheostat.infra.store.inputs import Program
from rheostat.models.config.clip_rewards import ClipReward
from rheostat.models.config.judges import ModelReward, ServedReward, TrainedJudge, TrainedRewardModel
from rheostat.models.config.policy import PolicySource
from rheostat.models.config.reward_terms import (
    BuiltInReward,
    CodeReward,
    EnvironmentReward,
    MathReward,
    NumericReward,
    RegexReward,
    RewardTerm,
    RuleReward,
    SimilarityReward,
    TargetReward,
)
from rheostat.models.config.text_rewards import TextReward

BuiltInConfig = NumericReward | MathReward | RegexReward | TextReward | SimilarityReward | ClipReward

_AnyReward = BuiltInConfig | TargetReward | CodeReward | EnvironmentReward | ServedReward

RewardConfig = Annotated[_AnyReward, Field(discriminator="kind")]

REWARD_CLASSES: Final[tuple[type[RewardTerm], ...]] = get_args(_AnyReward)
"""Configuration classes of all kinds of rewards."""


class ScoringConfig(Settings):
    """Settings for scoring completions: the reward terms, their time limit and their isolation."""

    checks = {
        "settings": "rheostat.models.inspection.rewards:check_functions",
        "problems": "rheostat.models.inspection.rewards:check_problems",
    }

    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (NumericReward(),)
    """Reward terms. The total reward of a completion is their weighted sum."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 10
    """Time limit in seconds for scoring one completion. If it is exceeded, the score is missing."""
    python: Program | None = None
    """Python interpreter (3.9 or newer) that runs `target` functions, with its installed packages. The default is the
    interpreter that runs Rheostat."""
    sandbox: Literal["none", "bubblewrap"] = "none"
    """Isolation of `target` functions: "bubblewrap" runs each call in a new process of a sandbox, without network
    access and without write access to files."""
    max_missing: Fraction = 0.05
    """Maximum share of scores that may be missing in an iteration. If it is exceeded, the iteration fails."""

    @field_validator("rewards", mode="before")
    @classmethod
    def _read_former_kinds(cls, rewards: object) -> object:
        if not isinstance(rewards, list | tuple):
            return rewards
        return [TargetReward.read_former_kind(reward) for reward in rewards]

    @property
    def terms(self) -> tuple[str, ...]:
        """Column names of all reward terms, in configuration order."""
        return tuple(reward.term for reward in self.rewards)

    @property
    def rules(self) -> tuple[RuleReward, ...]:
        """Rewards that are computed by a function, which scoring workers call."""
        return tuple(reward for reward in self.rewards if isinstance(reward, RuleReward))

    @property
    def built_in_rules(self) -> tuple[BuiltInReward, ...]:
        """Rewards that are computed by a function that ships with Rheostat."""
        return tuple(reward for reward in self.rewards if isinstance(reward, BuiltInReward))

    @property
    def checking_targets(self) -> dict[str, TargetReward]:
        """Users' rewards that check the reference answers before the run begins, keyed by column name."""
        pairs = zip(self.terms, self.rewards, strict=True)
        return {term: reward for term, reward in pairs if isinstance(reward, TargetReward) and reward.checks_references}

    @property
    def process_terms(self) -> tuple[str, ...]:
        """Column names of the rewards that score steps, tokens or turns instead of whole completions, in configuration
        order."""
        return tuple(term for term, reward in zip(self.terms, self.rewards, strict=True) if reward.scores_parts)

    @property
    def rule_terms(self) -> tuple[str, ...]:
        """Column names of the rewards that are computed by a function, in configuration order."""
        pairs = zip(self.terms, self.rewards, strict=True)
        return tuple(term for term, reward in pairs if isinstance(reward, RuleReward))

    @property
    def code_rewards(self) -> dict[str, CodeReward]:
        """Rewards that run unit tests, keyed by column name."""
        pairs = zip(self.terms, self.rewards, strict=True)
        return {term: reward for term, reward in pairs if isinstance(reward, CodeReward)}

    @property
    def environment_rewards(self) -> dict[str, EnvironmentReward]:
        """Rewards that the environment returns, keyed by column name."""
        pairs = zip(self.terms, self.rewards, strict=True)
        return {term: reward for term, reward in pairs if isinstance(reward, EnvironmentReward)}

    @property
    def model_rewards(self) -> dict[str, ServedReward]:
        """Rewards computed by judges and reward models, keyed by column name."""
        pairs = zip(self.terms, self.rewards, strict=True)
        return {term: reward for term, reward in pairs if isinstance(reward, ServedReward)}

    @property
    def hosted_rewards(self) -> dict[str, ServedReward]:
        """Rewards whose model runs in worker slots of the run, keyed by column name. Models behind HTTP endpoints are
        not included."""
        return {term: reward for term, reward in self.model_rewards.items() if reward.endpoint is None}

    @property
    def judge_shapes(self) -> dict[str, PolicySource]:
        """Models from which the training of judges starts, keyed by column name. Judges that start as a copy of the
        policy are not included."""
        models = {term: reward.model for term, reward in self.model_rewards.items()}
        shapes = {term: model.shape for term, model in models.items() if isinstance(model, TrainedJudge)}
        return {term: shape for term, shape in shapes.items() if isinstance(shape, PolicySource)}

    @property
    def trained_reward_models(self) -> dict[str, ModelReward]:
        """Rewards whose model the run trains on preference pairs, keyed by column name."""
        models = {term: reward for term, reward in self.model_rewards.items() if isinstance(reward, ModelReward)}
        return {term: reward for term, reward in models.items() if isinstance(reward.model, TrainedRewardModel)}

    @property
    def has_feedback(self) -> bool:
        """Whether a reward returns a text about each completion in addition to its score."""
        return any(isinstance(reward, TargetReward | CodeReward) and reward.feedback for reward in self.rewards)

    @property
    def outcome_weight(self) -> float:
        """Sum of the weights of the rewards that score whole completions."""
        return sum(reward.weight for reward in self.rewards if not reward.scores_parts)

    @property
    def process_weight(self) -> float:
        """Sum of the absolute weights of the rewards that score steps, tokens or turns."""
        return sum(abs(reward.weight) for reward in self.rewards if reward.scores_parts)

    @model_validator(mode="after")
    def _check_terms(self) -> "ScoringConfig":
        if len(set(self.terms)) < len(self.terms):
            raise ValueError(
                f"each reward in scoring.rewards needs a different name, found {', '.join(self.terms)}. Set `name` in "
                "the tables of rewards with the same name"
            )
        for term, reward in zip(self.terms, self.rewards, strict=True):
            if reward.scores_parts and (reward.shift, reward.scale) != (0, 1):
                raise ValueError(
                    f"reward {term!r} scores steps, tokens or turns, but shift and scale apply only to rewards of "
                    "whole completions. Remove shift and scale"
                )
            if isinstance(reward, TargetReward) and reward.feedback and reward.scores_parts:
                raise ValueError(
                    f"reward {term!r} has per = {reward.per!r}, but only rewards of whole completions have feedback. "
                    "Set per = 'completion', or remove feedback"
                )
        return self
