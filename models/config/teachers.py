"""Configuration of on-policy distillation: the teacher model and the factor of its log-probs. Torch-free."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from infra.config import Settings
from infra.store.inputs import ModelLocation
from infra.variants import Variant
from models.config.endpoints import Endpoint

if TYPE_CHECKING:
    from models.config.job import Job


class Teacher(Variant):
    """Fields common to all teachers (models from which the policy is distilled)."""

    inspection: ClassVar[str]
    """`pkg.mod:function` that checks the teacher before a run begins, a
    `models.inspection.other_models.TeacherCheck`."""

    @property
    def local_model(self) -> "TeacherDirectory | None":
        """This teacher if the run stores and runs its model, else None."""
        return None

    @property
    def endpoint(self) -> "TeacherEndpoint | None":
        """This teacher if its model is behind an endpoint, else None."""
        return None

    def find_conflicts(self, job: "Job") -> Iterator[str]:
        """Yield one line per invalid combination of settings."""
        yield from ()


class TeacherDirectory(Teacher):
    """A causal language model directory with the policy's tokenizer. The run stores a copy of it."""

    inspection = "models.inspection.other_models:check_teacher_directory"

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, or a model on the Hugging Face Hub (docs/hub.md)."""

    @property
    def local_model(self) -> "TeacherDirectory":
        """This teacher, because the run stores and runs its model."""
        return self


class TeacherEndpoint(Endpoint, Teacher):
    """A vLLM server with the policy's tokenizer that returns log-probs of given token ids (`prompt_logprobs`)."""

    inspection = "models.inspection.other_models:check_teacher_endpoint"

    kind: Literal["endpoint"] = "endpoint"

    @property
    def endpoint(self) -> "TeacherEndpoint":
        """This teacher, because its model is behind an endpoint."""
        return self

    def find_conflicts(self, job: "Job") -> Iterator[str]:
        """Yield a conflict if the sampling temperature is not 1, because the endpoint only returns log-probs at
        temperature 1."""
        temperature = job.rollout.sampling.temperature
        if temperature != 1:
            yield (
                f"rollout.sampling.temperature is {temperature:g}, but a teacher behind an endpoint returns log-probs "
                "at temperature 1. Use 1, or a teacher of kind 'directory'"
            )


TeacherConfig = Annotated[TeacherDirectory | TeacherEndpoint, Field(discriminator="kind")]


class Distillation(Settings):
    """On-policy distillation, which adds coefficient x (log π_teacher - log π_student) to each token's advantage."""

    teacher: TeacherConfig
    """Teacher that scores the tokens of the policy's completions."""
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the log-prob difference in the advantage."""
