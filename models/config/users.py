"""Configuration of simulated users: models that play the user in dialogues. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rheostat.infra.store.inputs import ModelLocation
from rheostat.infra.variants import Variant
from rheostat.models.config.endpoints import Endpoint
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.config.texts import RULES_BEFORE, AppendedTokens, TextRules
from rheostat.models.config.training import SupervisedWarmup


class UserModel(Variant):
    """Fields common to all simulated users (models that play the user in a dialogue). `implementation` names a
    `rheostat.models.modeling.initial.UserWriter`, which writes the model into the run."""

    implementation = "rheostat.models.modeling.initial:refuse_to_write_user"
    checks = {"models": "rheostat.models.inspection.engines:check_user"}
    inspection: ClassVar[str] = "rheostat.models.inspection.users:check_endpoint_user"
    """Import path `pkg.mod:function` of a `rheostat.models.inspection.users.UserCheck`, which checks the model before a
    run begins."""
    uses_chat_template: ClassVar[bool] = True
    """Whether the dialogue is formatted with the model's chat template if the model has one. If false, the model always
    receives plain text."""

    @property
    def local_engine(self) -> TransformersEngine | None:
        """Engine that runs the model inside the rollout workers, or None if the model is behind an endpoint."""
        return None

    @property
    def endpoint(self) -> "EndpointUser | None":
        """Endpoint of the model, or None if the model runs inside the rollout workers."""
        return None

    @property
    def training(self) -> SupervisedWarmup | None:
        """Settings for the supervised training of the simulated user, or None if the run does not train it."""
        return None

    @property
    def text_rules(self) -> TextRules:
        """Rules for converting dialogues to tokens."""
        return RULES_BEFORE

    def find_conflicts(self, sampling: SamplingConfig) -> Iterator[str]:
        """Yield one message for each sampling setting that this simulated user does not support."""
        yield from ()


class DirectoryUser(AppendedTokens, UserModel):
    """Simulated user loaded from a causal language model directory in Hugging Face format. The run stores a copy of the
    directory."""

    implementation = "rheostat.models.modeling.initial:copy_user"
    inspection = "rheostat.models.inspection.users:check_directory_user"

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, or a model on the Hugging Face Hub (docs/hub.md)."""
    engine: TransformersEngine = TransformersEngine()
    """Engine that runs the simulated user inside the rollout workers, next to the engine of the policy."""

    @property
    def local_engine(self) -> TransformersEngine:
        """Engine that runs the model inside the rollout workers."""
        return self.engine

    @property
    def text_rules(self) -> TextRules:
        """Rules for converting dialogues to tokens. Control tokens that occur in messages are encoded as ordinary
        text."""
        return RULES_BEFORE if self.appended_tokens == "keep" else TextRules()


class TrainedUser(UserModel):
    """Simulated user that the run trains: a small model, trained on the user's replies in the worked episodes (example
    dialogues) of the data."""

    implementation = "rheostat.models.modeling.initial:build_user"
    inspection = "rheostat.models.inspection.users:check_trained_user"
    uses_chat_template = False  # it learns from the bare text

    kind: Literal["trained"] = "trained"
    shape: ScratchPolicy = ScratchPolicy()
    """Architecture and size of the decoder, whose training starts with random weights."""
    warmup: SupervisedWarmup = SupervisedWarmup()
    """Settings for the supervised training of the simulated user. `worked_answer_fraction` has no effect, because all
    examples come from worked episodes (example dialogues)."""
    engine: TransformersEngine = TransformersEngine()
    """Engine that runs the simulated user inside the rollout workers, next to the engine of the policy."""

    @property
    def local_engine(self) -> TransformersEngine:
        """Engine that runs the model inside the rollout workers."""
        return self.engine

    @property
    def training(self) -> SupervisedWarmup:
        """Settings for the supervised training of the simulated user, as configured."""
        return self.warmup


class EndpointUser(Endpoint, UserModel):
    """Simulated user behind an OpenAI-compatible endpoint."""

    kind: Literal["endpoint"] = "endpoint"

    @property
    def endpoint(self) -> "EndpointUser":
        """This object itself, because the simulated user is behind an endpoint."""
        return self

    def find_conflicts(self, sampling: SamplingConfig) -> Iterator[str]:
        """Yield a message if `top_k` is set, because the OpenAI API does not have this parameter."""
        if sampling.top_k:
            yield f"top_k is {sampling.top_k}, but the OpenAI API has no parameter top_k. Set it to 0"


UserModelConfig = Annotated[DirectoryUser | TrainedUser | EndpointUser, Field(discriminator="kind")]
