"""Configuration of advantages: from rewards to what each token is worth. Torch-free."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from infra.config import Fraction, Positive, Settings, Since
from infra.store.inputs import LocalPath
from infra.variants import OneOf, Target, Variant
from models.config.objectives import AdaptiveKl
from models.config.teachers import Distillation

if TYPE_CHECKING:
    from models.config.job import Job


# ---- what rewards are shaped by
class Overlong(Settings):
    """Penalty that grows linearly over the last tokens before `max_new_tokens` (DAPO, arXiv 2503.14476, eq. 13)."""

    buffer: Positive
    """Tokens over which it grows."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """What is taken from the reward at the limit."""


class RewardKl(Settings):
    """Penalty on the divergence from the initial policy, taken from the reward of each token."""

    kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the divergence per token."""
    coefficient: Annotated[float, Field(gt=0)] = 1e-2
    """Factor; the first one where it adapts."""
    adaptive: AdaptiveKl | None = None
    """What changes the coefficient from iteration to iteration; none keeps it."""


# ---- algorithms
class CriticConfig(Settings):
    """The value model: a sequence classifier with one output that is read at every token, trained beside the policy."""

    path: LocalPath | None = None
    """Directory in Hugging Face format to start from, such as a reward model; none takes the initial policy, with a
    head of zeros."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-6
    """Peak learning rate of its own AdamW; the rest is the update's."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """Values may move so far from those before the update (PPO's clipped value loss)."""
    warmup_iterations: Annotated[int, Field(ge=0)] = 0
    """Iterations in which only the critic learns."""


class Algorithm(Variant):
    """What all algorithms share. `implementation` is a `models.algorithms.experience.AdvantageFunction`."""

    informative: ClassVar[str] = "models.algorithms.ragged:rewards_differ"
    """`pkg.mod:function` that finds the groups worth training, an `InformativeFunction`; by default, those in which the
    total rewards differ."""
    compares_groups: ClassVar[bool] = False
    """Whether it compares the completions of a group, of which there must be two then."""
    equal_rewards_teach: ClassVar[bool] = False
    """Whether groups of equal rewards teach it as well as others: they are trained, and never sampled anew."""
    credits_steps: ClassVar[bool] = False
    """Whether what process terms say of steps is credit of its own, beside the completion's reward."""

    overlong: Overlong | None = None
    """Penalty on completions near the limit; none has no such penalty."""
    mask_truncated: bool = False
    """Leave completions that reached the limit out of the loss (overlong filtering, DAPO); baselines still see them."""
    distillation: Distillation | None = None
    """Add a teacher's opinion of every token; none asks no teacher."""

    @property
    def reward_kl(self) -> RewardKl | None:
        """The penalty in the reward; the initial policy is asked about every token then."""
        return None

    @property
    def value_model(self) -> CriticConfig | None:
        """The critic that is trained beside the policy and asked about every token."""
        return None

    @property
    def keeps_uninformative(self) -> bool:
        """Whether groups of equal rewards are trained too: their tokens may be worth something by other means."""
        return self.equal_rewards_teach or self.distillation is not None

    def functions(self) -> dict[str, tuple[str, ...]]:
        """Class variables that name functions, and the parameters that each is called with."""
        return {"implementation": ("experience", "algorithm"), "informative": ("scored", "algorithm")}

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Yield one line per combination that cannot work; the first is what the user is told."""
        if self.compares_groups and job.rollout.group_size < 2:
            yield (
                f"rollout.group_size {job.rollout.group_size}: {self.known_as} compares the completions of a group, "
                "use at least 2; ppo, reinforce_pp and distillation need no group"
            )
        if self.equal_rewards_teach and job.rollout.dynamic is not None:
            yield (
                f"rollout.dynamic with algorithm.kind {self.known_as!r}: groups of equal rewards teach it too, so "
                "leaving them out would bias it"
            )
        if self.reward_kl is not None and job.update.kl_penalty is not None:
            yield "algorithm.kl and update.kl: the divergence would be penalised twice, keep one of them"
        longest = job.rollout.sampling.max_new_tokens
        if self.overlong is not None and self.overlong.buffer >= longest:
            yield f"algorithm.overlong.buffer {self.overlong.buffer}: expected less than max_new_tokens {longest}"
        if self.distillation is not None:
            yield from self.distillation.teacher.reasons_against(job)
        critic = self.value_model
        if critic is not None and 0 < job.iterations <= critic.warmup_iterations:
            yield (
                f"algorithm.critic.warmup_iterations {critic.warmup_iterations}: the policy would never learn in "
                f"{job.iterations} iterations"
            )
        if job.iterations and self.distillation is None and not any(reward.weight for reward in job.scoring.rewards):
            yield "scoring.rewards: every weight is 0, so there is nothing to learn from"


def _against_both(job: "Job", *, keep_uninformative: bool) -> Iterator[str]:
    if keep_uninformative and job.rollout.dynamic is not None:
        yield (
            "algorithm.keep_uninformative with rollout.dynamic: dynamic sampling leaves uninformative groups out; "
            "to fill up with them, set rollout.dynamic.on_shortfall='fill'"
        )


class GroupRelative(Algorithm):
    """What algorithms share whose baseline is the group."""

    implementation = "models.algorithms.group_relative:group_relative"
    informative = "models.algorithms.group_relative:informative"
    compares_groups = True
    relative: ClassVar[str]
    """`pkg.mod:function`, from rewards to advantages among the group: a `models.algorithms.group_relative.Relative`."""

    keep_uninformative: bool = False
    """Train on groups of equal rewards too; they only matter with a KL penalty, and dilute the loss."""
    combine: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    """Several reward terms: make advantages of their weighted sum, or of each term and add those up by weight."""
    kl: RewardKl | None = None
    """Penalty in the reward of the whole completion; none has no such penalty."""
    advantage_clip: Annotated[Annotated[float, Field(gt=0)] | None, Since("0.1.0", before=None)] = None
    """Advantages that rewards make are so large at most, on either side; none leaves them as they are."""

    @property
    def reward_kl(self) -> RewardKl | None:
        """The penalty in the reward."""
        return self.kl

    @property
    def keeps_uninformative(self) -> bool:
        """Whether groups of equal rewards are trained too."""
        return self.keep_uninformative or super().keeps_uninformative

    @property
    def compares_by(self) -> str:
        """The `relative` that its settings choose."""
        return self.relative

    def functions(self) -> dict[str, tuple[str, ...]]:
        """What all have, and the baseline."""
        return {**super().functions(), "relative": ("rewards_N", "group_N", "num_groups")}

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Yield what does not go together; terms that are normalised one by one leave no room for penalties."""
        yield from super().reasons_against(job)
        yield from _against_both(job, keep_uninformative=self.keep_uninformative)
        if self.combine == "normalise_then_sum":
            if self.kl is not None:
                yield "algorithm.kl with combine 'normalise_then_sum': the penalty is no term of its own, use update.kl"
            if self.overlong is not None:
                yield "algorithm.overlong with combine 'normalise_then_sum': the penalty is no term of its own"


class Grpo(GroupRelative):
    """Reward minus the group's mean, over its standard deviation (GRPO, arXiv 2402.03300, section 4.1.2)."""

    relative = "models.algorithms.group_relative:grpo"

    kind: Literal["grpo"] = "grpo"
    std: Annotated[Literal["group", "batch"], Since("0.1.0", before="group")] = "group"
    """Whose standard deviation: of the group's rewards, or of all rewards of the iteration, so that a group that
    differs little counts little (Flow-GRPO, arXiv 2505.05470)."""

    @property
    def compares_by(self) -> str:
        """By the group's deviation or the batch's."""
        return self.relative if self.std == "group" else "models.algorithms.group_relative:grpo_over_batch"


class DrGrpo(GroupRelative):
    """Reward minus the group's mean (Dr. GRPO, arXiv 2503.20783, section 3.2); goes with a constant aggregation."""

    relative = "models.algorithms.group_relative:dr_grpo"

    kind: Literal["dr_grpo"] = "dr_grpo"


class Rloo(GroupRelative):
    """Reward minus the mean of the group's others (RLOO, arXiv 2402.14740, eq. 8)."""

    relative = "models.algorithms.group_relative:rloo"

    kind: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(Algorithm):
    """Token rewards with KL, summed to the end, normalised over the whole batch (REINFORCE++, arXiv 2501.03262)."""

    implementation = "models.algorithms.group_relative:reinforce_pp"
    equal_rewards_teach = True

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    kl: RewardKl | None = None
    """Penalty in the reward of each token, as published; none has no such penalty."""
    gamma: Fraction = 1.0
    """Discount per token."""

    @property
    def reward_kl(self) -> RewardKl | None:
        """The penalty in the reward."""
        return self.kl


class ReinforcePlusPlusBaseline(Algorithm):
    """Reward minus the group's mean, normalised over the whole batch (REINFORCE++-baseline, arXiv 2501.03262)."""

    implementation = "models.algorithms.group_relative:reinforce_pp_baseline"
    compares_groups = True

    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    keep_uninformative: bool = False
    """Train on groups of equal rewards too; they only matter with a KL penalty, and dilute the loss."""

    @property
    def keeps_uninformative(self) -> bool:
        """Whether groups of equal rewards are trained too."""
        return self.keep_uninformative or super().keeps_uninformative

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Yield what does not go together."""
        yield from super().reasons_against(job)
        yield from _against_both(job, keep_uninformative=self.keep_uninformative)


class Ppo(Algorithm):
    """Generalised advantage estimation with a critic (PPO, arXiv 1707.06347; GAE, 1506.02438, eq. 16)."""

    implementation = "models.algorithms.ppo:ppo"
    equal_rewards_teach = True

    kind: Literal["ppo"] = "ppo"
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """GAE's λ: 1 is the whole return minus the value, 0 looks one token ahead."""
    whiten: bool = True
    """Normalise advantages over the whole batch."""
    kl: RewardKl | None = None
    """Penalty in the reward of each token; none has no such penalty."""
    critic: CriticConfig = CriticConfig()
    """The value model."""

    @property
    def reward_kl(self) -> RewardKl | None:
        """The penalty in the reward."""
        return self.kl

    @property
    def value_model(self) -> CriticConfig | None:
        """The critic."""
        return self.critic


class Capo(Algorithm):
    """Token rewards from outcomes and flagged steps, normalised over all tokens of the group (CAPO, arXiv 2508.02298).

    Process terms give values to steps; a token's reward is the weighted sum of the completion's scalar terms and of
    the values of its step. Published: an outcome of weight 2, flags of weight 1.
    """

    implementation = "models.algorithms.capo:capo"
    informative = "models.algorithms.capo:informative"
    compares_groups = True
    credits_steps = True

    kind: Literal["capo"] = "capo"
    allow_low_outcome: bool = False
    """Accept an outcome weight that does not exceed the process weight: a flagged token of a right answer then falls
    to the level of a wrong answer."""

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Yield what does not go together; outcomes and flags are needed, and their four classes keep their order."""
        yield from super().reasons_against(job)
        outcome, process = job.scoring.outcome_weight, job.scoring.process_weight
        if not process:
            yield (
                "algorithm.kind 'capo': expected a reward that values steps or tokens: a target with per='step' or "
                "per='token', or a judge with verdict.kind='steps'"
            )
        elif outcome <= 0:
            yield "algorithm.kind 'capo': expected a reward of whole completions with a weight above 0, such as numeric"
        elif outcome <= process and not self.allow_low_outcome:
            yield (
                f"algorithm.kind 'capo': outcomes weigh {outcome:g} and flags {process:g}, so a flagged token of a "
                "right answer falls to the level of a wrong answer; weigh outcomes more, or set "
                "algorithm.allow_low_outcome"
            )


class DistillationOnly(Algorithm):
    """Learn from the teacher alone; rewards are measured and earn nothing."""

    implementation = "models.algorithms.advantages:rewards_earn_nothing"
    equal_rewards_teach = True

    kind: Literal["distillation"] = "distillation"
    distillation: Distillation
    """Whose opinion of every token is all that it is worth."""

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Yield what does not go together."""
        yield from super().reasons_against(job)
        if self.overlong is not None:
            yield (
                "algorithm.overlong with algorithm.kind 'distillation': rewards earn nothing there, so nothing is taken"
            )


class TargetAlgorithm(Target):
    """An algorithm of your own: a subclass of `models.config.algorithms.Algorithm` (see "Extending")."""


AlgorithmConfig = Annotated[
    Algorithm,
    OneOf(
        (Grpo, DrGrpo, Rloo, ReinforcePlusPlus, ReinforcePlusPlusBaseline, Ppo, Capo, DistillationOnly, TargetAlgorithm)
    ),
]
