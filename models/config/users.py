"""Configuration of models that play the user in dialogues. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from infra.store.inputs import LocalPath
from infra.variants import Variant
from models.config.endpoints import Endpoint
from models.config.engines import SamplingConfig, TransformersEngine
from models.config.policy import ScratchPolicy
from models.config.training import WarmupConfig


class UserModel(Variant):
    """What all models that play users share. `implementation` is a `models.modeling.initial.UserWriter`."""

    implementation = "models.modeling.initial:refuse_to_write_user"
    inspection: ClassVar[str] = "models.inspection.users:check_asked_user"
    """`pkg.mod:function` that checks it before anything is made, a `models.inspection.users.UserCheck`."""
    chats: ClassVar[bool] = True
    """Whether it reads a chat, where it has a template for that; else plain text."""

    @property
    def held(self) -> TransformersEngine | None:
        """What runs it beside the policy; none where it runs elsewhere."""
        return None

    @property
    def elsewhere(self) -> "EndpointUser | None":
        """Where it runs, if elsewhere."""
        return None

    @property
    def training(self) -> WarmupConfig | None:
        """How the run trains it; none does not."""
        return None

    def reasons_against(self, sampling: SamplingConfig) -> Iterator[str]:
        """Yield what of the sampling it cannot be asked for."""
        yield from ()


class DirectoryUser(UserModel):
    """Any causal language model directory in Hugging Face format; the run keeps a copy."""

    implementation = "models.modeling.initial:copy_user"
    inspection = "models.inspection.users:check_directory_user"

    kind: Literal["directory"] = "directory"
    path: LocalPath
    """Directory with config.json, safetensors and tokenizer."""
    engine: TransformersEngine = TransformersEngine()
    """What runs it, in the workers of the policy's engine."""

    @property
    def held(self) -> TransformersEngine:
        """What runs it beside the policy."""
        return self.engine


class TrainedUser(UserModel):
    """A small model that the run trains on the worked episodes of the data: on what is said to each turn."""

    implementation = "models.modeling.initial:build_user"
    inspection = "models.inspection.users:check_trained_user"
    chats = False  # it learns from the bare text

    kind: Literal["trained"] = "trained"
    shape: ScratchPolicy = ScratchPolicy()
    """The decoder."""
    warmup: WarmupConfig = WarmupConfig()
    """Its training; all of its examples are worked."""
    engine: TransformersEngine = TransformersEngine()
    """What runs it, in the workers of the policy's engine."""

    @property
    def held(self) -> TransformersEngine:
        """What runs it beside the policy."""
        return self.engine

    @property
    def training(self) -> WarmupConfig:
        """As configured."""
        return self.warmup


class EndpointUser(Endpoint, UserModel):
    """A model behind an OpenAI-compatible endpoint."""

    kind: Literal["endpoint"] = "endpoint"

    @property
    def elsewhere(self) -> "EndpointUser":
        """Here."""
        return self

    def reasons_against(self, sampling: SamplingConfig) -> Iterator[str]:
        """The API has no such parameter."""
        if sampling.top_k:
            yield "top_k is no part of the OpenAI API; leave it 0"


UserModelConfig = Annotated[DirectoryUser | TrainedUser | EndpointUser, Field(discriminator="kind")]
