"""Configuration of the algorithms that compute advantages per token from rewards. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rheostat.infra.config import Fraction, Positive, Settings, Since
from rheostat.infra.store.inputs import ModelLocation
from rheostat.infra.variants import OneOf, Target, Variant
from rheostat.models.config.divergence import AdaptiveKl, ReferenceRule
from rheostat.models.config.job import Job
from rheostat.models.config.teachers import Distillation, TeacherConfig


# ---- what rewards are shaped by
class Overlong(Settings):
    """Length penalty that grows linearly over the last tokens before `max_new_tokens` (DAPO, arXiv 2503.14476, eq.
    13)."""

    buffer: Positive
    """Number of tokens before the length limit over which the penalty grows from 0 to `penalty`."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """Amount subtracted from the reward of a completion whose length reaches the limit."""


class RewardKl(ReferenceRule):
    """Penalty on the KL divergence of the policy from the reference, by default the initial policy. The penalty is
    subtracted from the reward of each token."""

    kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL divergence per token: k1, k2 or k3 (Schulman, "Approximating KL divergence")."""
    coefficient: Annotated[float, Field(gt=0)] = 1e-2
    """Factor by which the divergence is multiplied. With `adaptive`, this is the initial factor."""
    adaptive: AdaptiveKl | None = None
    """Controller that changes the coefficient after each iteration. If not set, the coefficient is constant."""


# ---- algorithms
class CriticConfig(Settings):
    """Value model (critic): a sequence classifier with one output, which predicts a value at every token and is trained
    together with the policy."""

    path: ModelLocation | None = None
    """Directory, or model on the Hugging Face Hub, from which the critic is loaded, such as a reward model. If not set,
    the critic starts as a copy of the initial policy with a zero-initialized output head."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-6
    """Peak learning rate of the critic. The critic's other optimizer settings are those of `update`."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """Maximum change of a predicted value in an update. Larger changes are clipped in the critic's loss (PPO's clipped
    value loss)."""
    warmup_iterations: Annotated[int, Field(ge=0)] = 0
    """Number of iterations at the start of the run in which only the critic is trained and the policy stays
    unchanged."""


class Algorithm(Variant):
    """Fields common to all algorithms that compute advantages. `implementation` is the import path of a
    `rheostat.models.algorithms.experience.AdvantageFunction`."""

    checks = {
        "settings": "rheostat.models.inspection.training:check_algorithm",
        "problems": "rheostat.models.inspection.training:check_specialists",
        "policy": "rheostat.models.inspection.training:check_critic",
        "models": "rheostat.models.inspection.training:check_top_tokens",
    }
    informative: ClassVar[str] = "rheostat.models.algorithms.ragged:rewards_differ"
    """Import path `pkg.mod:function` of an `InformativeFunction`, which selects the groups worth training on
    (informative groups). The default selects groups whose completions have unequal total rewards."""
    compares_groups: ClassVar[bool] = False
    """Whether the algorithm compares the completions of a group (same prompt) with each other. If so,
    `rollout.group_size` must be at least 2."""
    equal_rewards_teach: ClassVar[bool] = False
    """Whether groups with equal rewards are as useful for training as other groups. If so, they are trained on, and
    dynamic sampling cannot be used, because it would replace them."""
    credits_steps: ClassVar[bool] = False
    """Whether the scores of reasoning steps change the advantages of the tokens in these steps, in addition to the
    reward of the whole completion."""

    overlong: Overlong | None = None
    """Penalty on completions whose length comes close to the limit. If not set, there is no such penalty."""
    mask_truncated: bool = False
    """Whether completions that reached the length limit are excluded from the loss (overlong filtering, DAPO). Their
    rewards still count in the mean reward of their group."""
    distillation: Distillation | None = None
    """On-policy distillation, which adds the log-prob difference between a teacher and the policy to the advantage of
    each token. If not set, there is no teacher."""

    @property
    def reward_kl(self) -> RewardKl | None:
        """KL penalty in the reward, or None if there is none. If set, the reference computes the log-prob of every
        token."""
        return None

    @property
    def all_teachers(self) -> dict[str, TeacherConfig]:
        """All teachers by their configuration keys, in the order of `Distillation.teachers`. Empty without
        distillation."""
        return {} if self.distillation is None else self.distillation.teachers

    @property
    def teacher_top_k(self) -> int:
        """Number of the teacher's most probable tokens in the loss of each token, or 0 if the loss contains no
        divergence from a teacher."""
        top_k = None if self.distillation is None else self.distillation.top_k
        return 0 if top_k is None else top_k.tokens

    @property
    def value_model(self) -> CriticConfig | None:
        """Critic that predicts a value for every token and is trained together with the policy, or None if the
        algorithm has none."""
        return None

    @property
    def keeps_uninformative(self) -> bool:
        """Whether groups with equal rewards are trained on too. This is the case if their tokens can have advantages
        other than 0, for example from a critic or a teacher."""
        return self.equal_rewards_teach or self.distillation is not None

    def functions(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the class variables that contain an import path, each with the names of the arguments
        that the imported function receives."""
        return {"implementation": ("experience", "algorithm"), "informative": ("scored", "algorithm")}

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which this algorithm cannot be combined. Only the first
        message is shown to the user."""
        if self.compares_groups and job.rollout.group_size < 2:
            yield (
                f"rollout.group_size is {job.rollout.group_size}, but algorithm.kind = {self.label!r} compares the "
                "completions of a group. Set it to at least 2, or use ppo, reinforce_pp or distillation"
            )
        if self.equal_rewards_teach and job.rollout.dynamic is not None:
            yield (
                f"rollout.dynamic cannot be combined with algorithm.kind = {self.label!r}. This algorithm also trains "
                "on groups with equal rewards, and dynamic sampling, which removes these groups, would bias it. "
                "Remove rollout.dynamic"
            )
        if self.reward_kl is not None and job.update.kl_penalty is not None:
            yield "algorithm.kl and update.kl are both set and would penalize the divergence twice. Remove one of them"
        longest = job.rollout.sampling.max_new_tokens
        if self.overlong is not None and self.overlong.buffer >= longest:
            yield (
                f"algorithm.overlong.buffer is {self.overlong.buffer}, but it must be less than "
                f"rollout.sampling.max_new_tokens, which is {longest}. Lower the buffer"
            )
        if self.distillation is not None:
            yield from self.distillation.find_conflicts(job)
        critic = self.value_model
        if critic is not None and 0 < job.iterations <= critic.warmup_iterations:
            yield (
                f"algorithm.critic.warmup_iterations is {critic.warmup_iterations}, so the policy would not be trained "
                f"in any iteration, because iterations is {job.iterations}. Lower it, or raise iterations"
            )
        if job.iterations and self.distillation is None and not any(reward.weight for reward in job.scoring.rewards):
            yield (
                "scoring.rewards: the weight of every reward is 0, so there is nothing to train on. Set the weight of "
                "at least one reward"
            )


def _find_dynamic_conflicts(job: Job, *, keep_uninformative: bool) -> Iterator[str]:
    if keep_uninformative and job.rollout.dynamic is not None:
        yield (
            "algorithm.keep_uninformative cannot be combined with rollout.dynamic, because dynamic sampling trains "
            "only on informative groups (groups with different rewards). Remove algorithm.keep_uninformative. To fill "
            "up an iteration with uninformative groups, set rollout.dynamic.on_shortfall = 'fill'"
        )


class GroupRelative(Algorithm):
    """Fields common to algorithms that compare the reward of a completion with the other rewards of its group."""

    implementation = "rheostat.models.algorithms.group_relative:group_relative"
    informative = "rheostat.models.algorithms.group_relative:informative"
    compares_groups = True
    relative: ClassVar[str]
    """Import path `pkg.mod:function` of a `rheostat.models.algorithms.group_relative.Relative`, which computes the
    advantages of completions from the rewards of their groups."""

    keep_uninformative: bool = False
    """Whether groups with equal rewards are trained on too. Equal rewards give advantages of 0, so these groups
    contribute only through a KL penalty and lower the weight of the other groups in the mean loss."""
    combine: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    """Order of combining several reward terms: "sum_then_normalise" computes advantages from the weighted sum of the
    terms, "normalise_then_sum" computes the advantages of each term and then adds them by weight."""
    kl: RewardKl | None = None
    """KL penalty, summed over the tokens of a completion and subtracted from its reward. If not set, there is no such
    penalty."""
    advantage_clip: Annotated[Annotated[float, Field(gt=0)] | None, Since("0.1.0", before=None)] = None
    """Maximum absolute value of an advantage that is computed from rewards. If not set, advantages are not clipped."""

    @property
    def reward_kl(self) -> RewardKl | None:
        """KL penalty in the reward, or None if there is none."""
        return self.kl

    @property
    def keeps_uninformative(self) -> bool:
        """Whether groups with equal rewards are trained on too, because `keep_uninformative` or a teacher is set."""
        return self.keep_uninformative or super().keeps_uninformative

    @property
    def compares_by(self) -> str:
        """Import path `pkg.mod:function` of the function that computes the advantages of completions within their
        groups."""
        return self.relative

    def functions(self) -> dict[str, tuple[str, ...]]:
        """Return the class variables that contain an import path, including `relative`, each with the names of the
        arguments that the imported function receives."""
        return {**super().functions(), "relative": ("rewards_N", "group_N", "num_groups")}

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which this algorithm cannot be combined. Reward terms that
        are normalized separately do not support penalties in the reward."""
        yield from super().find_conflicts(job)
        yield from _find_dynamic_conflicts(job, keep_uninformative=self.keep_uninformative)
        if self.combine == "normalise_then_sum":
            separate = "algorithm.combine = 'normalise_then_sum', which normalizes each reward term separately"
            if self.kl is not None:
                yield f"algorithm.kl cannot be combined with {separate}. Use update.kl instead"
            if self.overlong is not None:
                yield f"algorithm.overlong cannot be combined with {separate}. Remove algorithm.overlong"


class Grpo(GroupRelative):
    """Reward minus the group mean, divided by the standard deviation (GRPO, arXiv 2402.03300, section 4.1.2). The
    result is the advantage of all tokens of the completion."""

    relative = "rheostat.models.algorithms.group_relative:grpo"

    kind: Literal["grpo"] = "grpo"
    std: Annotated[Literal["group", "batch"], Since("0.1.0", before="group")] = "group"
    """Standard deviation by which advantages are divided: that of the group's rewards ("group"), or that of all rewards
    of the iteration ("batch"). With "batch", groups whose rewards hardly differ have small advantages (Flow-GRPO, arXiv
    2505.05470)."""

    @property
    def compares_by(self) -> str:
        """Import path `pkg.mod:function` of the function that computes advantages. `std` selects the function that uses
        the standard deviation of the group, or the one that uses that of the batch."""
        return self.relative if self.std == "group" else "rheostat.models.algorithms.group_relative:grpo_over_batch"


class DrGrpo(GroupRelative):
    """Reward minus the group mean (Dr. GRPO, arXiv 2503.20783, section 3.2). The result is the advantage of all tokens
    of the completion. To follow the paper, also set `update.loss.aggregation` to kind "constant"."""

    relative = "rheostat.models.algorithms.group_relative:dr_grpo"

    kind: Literal["dr_grpo"] = "dr_grpo"


class Rloo(GroupRelative):
    """Reward minus the mean reward of the other completions in the group (RLOO, arXiv 2402.14740, eq. 8). The result is
    the advantage of all tokens of the completion."""

    relative = "rheostat.models.algorithms.group_relative:rloo"

    kind: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(Algorithm):
    """Advantages computed as discounted sums of token rewards, which include the KL penalty, normalized over the batch
    (REINFORCE++, arXiv 2501.03262)."""

    implementation = "rheostat.models.algorithms.group_relative:reinforce_pp"
    equal_rewards_teach = True

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    kl: RewardKl | None = None
    """KL penalty that is subtracted from the reward of each token, as in the paper. If not set, there is no such
    penalty."""
    gamma: Fraction = 1.0
    """Discount factor per token, with which later token rewards are summed."""

    @property
    def reward_kl(self) -> RewardKl | None:
        """KL penalty in the reward, or None if there is none."""
        return self.kl


class ReinforcePlusPlusBaseline(Algorithm):
    """Reward minus the group mean, normalized over the whole batch (REINFORCE++-baseline, arXiv 2501.03262). The result
    is the advantage of all tokens of the completion."""

    implementation = "rheostat.models.algorithms.group_relative:reinforce_pp_baseline"
    compares_groups = True

    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    keep_uninformative: bool = False
    """Whether groups with equal rewards are trained on too. Equal rewards give advantages of 0, so these groups
    contribute only through a KL penalty and lower the weight of the other groups in the mean loss."""

    @property
    def keeps_uninformative(self) -> bool:
        """Whether groups with equal rewards are trained on too, because `keep_uninformative` or a teacher is set."""
        return self.keep_uninformative or super().keeps_uninformative

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which this algorithm cannot be combined."""
        yield from super().find_conflicts(job)
        yield from _find_dynamic_conflicts(job, keep_uninformative=self.keep_uninformative)


class Ppo(Algorithm):
    """Advantages computed by generalized advantage estimation with a critic (PPO, arXiv 1707.06347; GAE, 1506.02438,
    eq. 16)."""

    implementation = "rheostat.models.algorithms.ppo:ppo"
    equal_rewards_teach = True

    kind: Literal["ppo"] = "ppo"
    gamma: Fraction = 1.0
    """Discount factor per token, with which later rewards and values are weighted."""
    lam: Fraction = 0.95
    """λ of generalized advantage estimation. With 1, the advantage is the whole discounted return minus the critic's
    value; with 0, it is the temporal-difference error of one token."""
    length_adaptive_lam: Annotated[Annotated[float, Field(gt=0)] | None, Since("0.2.0", before=None)] = None
    """Factor α of the length-adaptive λ (VAPO, arXiv 2504.05118, section 4.2), which replaces `lam` for the policy's
    advantages: λ = 1 - 1 / (α x length of the completion), at least 0. The paper uses 0.05. With it, the reward at the
    end also reaches the first tokens of long completions."""
    critic_lam: Annotated[Fraction | None, Since("0.2.0", before=None)] = None
    """λ of the advantages from which the critic's returns are computed (decoupled GAE, VC-PPO, arXiv 2503.01491). The
    paper uses 1, with which the critic learns from the unbiased returns. If not set, it is `lam`."""
    whiten: bool = True
    """Whether advantages are normalized to mean 0 and standard deviation 1 over the whole batch."""
    kl: RewardKl | None = None
    """KL penalty that is subtracted from the reward of each token. If not set, there is no such penalty."""
    critic: CriticConfig = CriticConfig()
    """Value model (critic). Its predictions are the baseline from which the advantages are computed."""

    @property
    def reward_kl(self) -> RewardKl | None:
        """KL penalty in the reward, or None if there is none."""
        return self.kl

    @property
    def value_model(self) -> CriticConfig | None:
        """Critic that predicts a value for every token and is trained together with the policy."""
        return self.critic


class Capo(Algorithm):
    """Token rewards computed from the outcome and from wrong steps, normalized over all tokens of the group (CAPO,
    arXiv 2508.02298).

    The reward of a token is the weighted sum of the completion's outcome rewards and of the scores of the step that
    contains the token. Outcome rewards score whole completions. Process rewards score steps. Examples are a judge that
    flags wrong steps, and a process reward model (`process_model`). The paper uses weight 2 for the outcome and 1 for
    the steps.
    """

    implementation = "rheostat.models.algorithms.capo:capo"
    informative = "rheostat.models.algorithms.capo:informative"
    compares_groups = True
    credits_steps = True

    kind: Literal["capo"] = "capo"
    allow_low_outcome: bool = False
    """Whether the total weight of the outcome rewards may be as low as that of the process rewards, or lower. In this
    case a token in a flagged step of a correct answer gets a reward no higher than a token of a wrong answer."""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each invalid combination of settings: outcome rewards or step rewards are missing, or
        the weight of the outcome rewards is not larger than that of the step rewards."""
        yield from super().find_conflicts(job)
        outcome, process = job.scoring.outcome_weight, job.scoring.process_weight
        if not process:
            yield (
                "algorithm.kind = 'capo' needs a reward that scores steps or tokens. Add a target with per = 'step' or "
                "per = 'token', a judge with verdict.kind = 'steps', or kind = 'process_model'"
            )
        elif outcome <= 0:
            yield (
                "algorithm.kind = 'capo' needs a reward that scores whole completions and has a weight above 0. Add "
                "one, such as kind = 'numeric'"
            )
        elif outcome <= process and not self.allow_low_outcome:
            yield (
                f"algorithm.kind = 'capo': rewards of whole completions weigh {outcome:g} and rewards of steps or "
                f"tokens weigh {process:g}, so a flagged token of a right answer would get as little credit as a wrong "
                "answer. Raise the weights of the first, or set algorithm.allow_low_outcome = true"
            )


class DistillationOnly(Algorithm):
    """Training only on the log-probs of a teacher (on-policy distillation). Rewards are measured, but advantages do not
    depend on rewards."""

    implementation = "rheostat.models.algorithms.advantages:rewards_earn_nothing"
    equal_rewards_teach = True

    kind: Literal["distillation"] = "distillation"
    distillation: Distillation
    """Teacher model, and the factor by which its log-prob difference to the policy is multiplied. This product is the
    advantage of a token."""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which this algorithm cannot be combined."""
        yield from super().find_conflicts(job)
        if self.overlong is not None:
            yield (
                "algorithm.overlong cannot be combined with algorithm.kind = 'distillation', which does not train on "
                "rewards. Remove algorithm.overlong"
            )


class TargetAlgorithm(Target):
    """User-defined algorithm: a subclass of `rheostat.models.config.algorithms.Algorithm` (see "Extending" in the
    documentation)."""


AlgorithmConfig = Annotated[
    Algorithm,
    OneOf(
        (Grpo, DrGrpo, Rloo, ReinforcePlusPlus, ReinforcePlusPlusBaseline, Ppo, Capo, DistillationOnly, TargetAlgorithm)
    ),
]
