"""Configuration of advantages: from rewards to what each token is worth. Torch-free."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from infra.config import Fraction, Positive, Settings
from models.config.endpoints import Endpoint
from models.config.objectives import AdaptiveKl

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


# ---- teachers


class TeacherDirectory(Settings):
    """A causal language model directory with the policy's tokenizer; the run keeps a copy."""

    kind: Literal["directory"] = "directory"
    path: Path
    """Directory with config.json, safetensors and tokenizer."""


class TeacherEndpoint(Endpoint):
    """A vLLM server that scores given token ids (`prompt_logprobs`); its tokenizer must be the policy's."""

    kind: Literal["endpoint"] = "endpoint"


TeacherConfig = Annotated[TeacherDirectory | TeacherEndpoint, Field(discriminator="kind")]


class Distillation(Settings):
    """On-policy distillation: coefficient x (log π_teacher - log π_student) is added to each token's advantage."""

    teacher: TeacherConfig
    """Who scores what the policy wrote."""
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Factor."""


# ---- algorithms


class Algorithm(Settings):
    """What all algorithms share."""

    overlong: Overlong | None = None
    """Penalty on completions near the limit; none has no such penalty."""
    mask_truncated: bool = False
    """Leave completions that reached the limit out of the loss (overlong filtering, DAPO); baselines still see them."""
    distillation: Distillation | None = None
    """Add a teacher's opinion of every token; none asks no teacher."""


class GroupRelative(Algorithm):
    """What algorithms share whose baseline is the group."""

    keep_uninformative: bool = False
    """Train on groups of equal rewards too; they only matter with a KL penalty, and dilute the loss."""
    combine: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    """Several reward terms: make advantages of their weighted sum, or of each term and add those up by weight."""
    kl: RewardKl | None = None
    """Penalty in the reward of the whole completion; none has no such penalty."""


class Grpo(GroupRelative):
    """Reward minus the group's mean, over its standard deviation (GRPO, arXiv 2402.03300, section 4.1.2)."""

    kind: Literal["grpo"] = "grpo"


class DrGrpo(GroupRelative):
    """Reward minus the group's mean (Dr. GRPO, arXiv 2503.20783, section 3.2); goes with a constant aggregation."""

    kind: Literal["dr_grpo"] = "dr_grpo"


class Rloo(GroupRelative):
    """Reward minus the mean of the group's others (RLOO, arXiv 2402.14740, eq. 8)."""

    kind: Literal["rloo"] = "rloo"


class ReinforcePlusPlus(Algorithm):
    """Token rewards with KL, summed to the end, normalised over the whole batch (REINFORCE++, arXiv 2501.03262)."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    kl: RewardKl | None = None
    """Penalty in the reward of each token, as published; none has no such penalty."""
    gamma: Fraction = 1.0
    """Discount per token."""


class ReinforcePlusPlusBaseline(Algorithm):
    """Reward minus the group's mean, normalised over the whole batch (REINFORCE++-baseline, arXiv 2501.03262)."""

    kind: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    keep_uninformative: bool = False
    """Train on groups of equal rewards too; they only matter with a KL penalty, and dilute the loss."""


class CriticConfig(Settings):
    """The value model: a sequence classifier with one output that is read at every token, trained beside the policy."""

    path: Path | None = None
    """Directory in Hugging Face format to start from, such as a reward model; none takes the initial policy, with a
    head of zeros."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-6
    """Peak learning rate of its own AdamW; the rest is the update's."""
    clip: Annotated[float, Field(gt=0)] = 0.2
    """Values may move so far from those before the update (PPO's clipped value loss)."""
    warmup_iterations: Annotated[int, Field(ge=0)] = 0
    """Iterations in which only the critic learns."""


class Ppo(Algorithm):
    """Generalised advantage estimation with a critic (PPO, arXiv 1707.06347; GAE, 1506.02438, eq. 16)."""

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


class Capo(Algorithm):
    """Token rewards from outcomes and flagged steps, normalised over all tokens of the group (CAPO, arXiv 2508.02298).

    Process terms give values to steps; a token's reward is the weighted sum of the completion's scalar terms and of
    the values of its step. Published: an outcome of weight 2, flags of weight 1.
    """

    kind: Literal["capo"] = "capo"
    allow_low_outcome: bool = False
    """Accept an outcome weight that does not exceed the process weight: a flagged token of a right answer then falls
    to the level of a wrong answer."""


class DistillationOnly(Algorithm):
    """Learn from the teacher alone; rewards are measured and earn nothing."""

    kind: Literal["distillation"] = "distillation"
    distillation: Distillation
    """Whose opinion of every token is all that it is worth."""


AlgorithmConfig = Annotated[
    Grpo | DrGrpo | Rloo | ReinforcePlusPlus | ReinforcePlusPlusBaseline | Ppo | Capo | DistillationOnly,
    Field(discriminator="kind"),
]
