"""Configuration that all models behind rewards share, and the rewards of discriminative models. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rheostat.infra.variants import Variant
from rheostat.models.config.reward_terms import RewardTerm


class ServedModel(Variant):
    """Fields common to all models that compute rewards (judges and reward models). `implementation` names a
    `rheostat.models.modeling.initial.ServedModelWriter`, which writes the model into the run."""

    implementation = "rheostat.models.modeling.initial:refuse_to_write"
    inspection: ClassVar[str]
    """Import path `pkg.mod:function` of a `rheostat.models.inspection.other_models.ServedModelCheck`, which checks the
    model before the run starts. Not defined for models that the run neither builds nor copies."""
    training: ClassVar[str | None] = None
    """Import path `pkg.mod:function` of a `rheostat.models.records.training_orders.TrainingOrder`, which returns the
    work unit for training the model. None if the run does not train the model."""

    @property
    def begins_as_policy(self) -> bool:
        """Whether the model starts as a copy of the policy, after the policy's supervised training (warm-up and
        DPO)."""
        return False


class HostedModelReward(RewardTerm):
    """Fields common to rewards of models that run in worker slots and score a completion, or each step of a completion,
    in one forward pass."""

    implementation = "rheostat.models.workers.reward_model:RewardModelWorker"
    checks = {"models": "rheostat.models.inspection.rewards:check_model"}
    scorer: ClassVar[str]
    """Import path `pkg.mod:Class` of the `rheostat.models.workers.reward_model.CompletionScorer` that runs the
    model."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations."""
    slots: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of worker slots that one replica of the reward model occupies."""

    is_graded: ClassVar[bool] = True
    votes: ClassVar[int] = 1
    """Number of scores per completion: always 1."""
    vote: ClassVar[Literal["mean"]] = "mean"
    """Method that combines several scores of a completion. It has no effect, because there is only one."""
    engine: ClassVar[None] = None
    """Inference engine: always None, because reward models run in their worker without an engine."""
    uses_rubric: ClassVar[bool] = False
    """Whether the model rates each criterion of a rubric: always false, because it scores completions or steps."""
    steps_verdict: ClassVar[None] = None
    """Settings of a verdict on steps: always None, because only judges have verdicts."""
    generates_text: ClassVar[bool] = False
    """Whether the model generates text: always false, because it scores a completion in one forward pass."""
    endpoint: ClassVar[None] = None
    """Endpoint of the model: always None, because reward models run in worker slots."""
