"""Configuration of simulated users: models that play the user in dialogues. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from infra.store.inputs import ModelLocation
from infra.variants import Variant
from models.config.endpoints import Endpoint
from models.config.engines import SamplingConfig, TransformersEngine
from models.config.policy import ScratchPolicy
from models.config.texts import RULES_BEFORE, AppendedTokens, TextRules
from models.config.training import WarmupConfig


class UserModel(Variant):
    """Fields common to all simulated users (models that play the user). `implementation` names a
    `models.modeling.initial.UserWriter`."""

    implementation = "models.modeling.initial:refuse_to_write_user"
    inspection: ClassVar[str] = "models.inspection.users:check_endpoint_user"
    """`pkg.mod:function` that checks the model before a run begins, a `models.inspection.users.UserCheck`."""
    uses_chat_template: ClassVar[bool] = True
    """Whether the dialogue is formatted with the model's chat template if it has one. If false, the model always reads
    plain text."""

    @property
    def local_engine(self) -> TransformersEngine | None:
        """Engine that runs the model in the rollout workers, or None if the model is behind an endpoint."""
        return None

    @property
    def endpoint(self) -> "EndpointUser | None":
        """Endpoint of the model, or None if the model runs in the rollout workers."""
        return None

    @property
    def training(self) -> WarmupConfig | None:
        """Settings for the supervised training of the simulated user, or None if the run does not train it."""
        return None

    @property
    def text_rules(self) -> TextRules:
        """Rules for encoding dialogues."""
        return RULES_BEFORE

    def find_conflicts(self, sampling: SamplingConfig) -> Iterator[str]:
        """Yield one line per sampling parameter that the simulated user does not support."""
        yield from ()


class DirectoryUser(AppendedTokens, UserModel):
    """A causal language model directory in Hugging Face format; the run stores a copy of it."""

    implementation = "models.modeling.initial:copy_user"
    inspection = "models.inspection.users:check_directory_user"

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, or a model on the Hugging Face Hub (docs/hub.md)."""
    engine: TransformersEngine = TransformersEngine()
    """Engine that runs the simulated user. It runs in the rollout workers, next to the engine of the policy."""

    @property
    def local_engine(self) -> TransformersEngine:
        """Engine that runs the model in the rollout workers."""
        return self.engine

    @property
    def text_rules(self) -> TextRules:
        """Rules for encoding dialogues: control tokens in their messages are ordinary text."""
        return RULES_BEFORE if self.appended_tokens == "keep" else TextRules()


class TrainedUser(UserModel):
    """A small model that the run trains to play the user, on the user's replies in the worked episodes of the data."""

    implementation = "models.modeling.initial:build_user"
    inspection = "models.inspection.users:check_trained_user"
    uses_chat_template = False  # it learns from the bare text

    kind: Literal["trained"] = "trained"
    shape: ScratchPolicy = ScratchPolicy()
    """Size of the decoder, which starts with random weights."""
    warmup: WarmupConfig = WarmupConfig()
    """Settings for the supervised training of the simulated user. `worked_answer_fraction` has no effect, because all
    examples are worked episodes."""
    engine: TransformersEngine = TransformersEngine()
    """Engine that runs the simulated user. It runs in the rollout workers, next to the engine of the policy."""

    @property
    def local_engine(self) -> TransformersEngine:
        """Engine that runs the model in the rollout workers."""
        return self.engine

    @property
    def training(self) -> WarmupConfig:
        """Settings for the supervised training of the simulated user, as configured."""
        return self.warmup


class EndpointUser(Endpoint, UserModel):
    """A model behind an OpenAI-compatible endpoint that plays the user."""

    kind: Literal["endpoint"] = "endpoint"

    @property
    def endpoint(self) -> "EndpointUser":
        """This configuration itself, because the simulated user is behind an endpoint."""
        return self

    def find_conflicts(self, sampling: SamplingConfig) -> Iterator[str]:
        """Yield a conflict if `top_k` is set, because the OpenAI API does not have this parameter."""
        if sampling.top_k:
            yield f"top_k is {sampling.top_k}, but the OpenAI API has no parameter top_k. Set it to 0"


UserModelConfig = Annotated[DirectoryUser | TrainedUser | EndpointUser, Field(discriminator="kind")]
