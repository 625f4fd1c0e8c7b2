"""Configuration of on-policy distillation: who teaches, and how much it counts. Torch-free."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from infra.config import Settings
from infra.store.inputs import LocalPath
from infra.variants import Variant
from models.config.endpoints import Endpoint

if TYPE_CHECKING:
    from models.config.job import Job


class Teacher(Variant):
    """What all teachers share."""

    inspection: ClassVar[str]
    """`pkg.mod:function` that checks it before a run begins, a `models.inspection.companions.TeacherCheck`."""

    @property
    def held(self) -> "TeacherDirectory | None":
        """The teacher, if the run holds its model."""
        return None

    @property
    def endpoint(self) -> "TeacherEndpoint | None":
        """The teacher, if its model is elsewhere."""
        return None

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Yield one line per combination that cannot work."""
        yield from ()


class TeacherDirectory(Teacher):
    """A causal language model directory with the policy's tokenizer; the run keeps a copy."""

    inspection = "models.inspection.companions:check_teacher_directory"

    kind: Literal["directory"] = "directory"
    path: LocalPath
    """Directory with config.json, safetensors and tokenizer."""

    @property
    def held(self) -> "TeacherDirectory":
        """The run holds a copy."""
        return self


class TeacherEndpoint(Endpoint, Teacher):
    """A vLLM server that scores given token ids (`prompt_logprobs`); its tokenizer must be the policy's."""

    inspection = "models.inspection.companions:check_teacher_endpoint"

    kind: Literal["endpoint"] = "endpoint"

    @property
    def endpoint(self) -> "TeacherEndpoint":
        """It is elsewhere."""
        return self

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Its answers know no temperature."""
        temperature = job.rollout.sampling.temperature
        if temperature != 1:
            yield (
                f"rollout.sampling.temperature {temperature:g}: a teacher behind an endpoint answers at temperature 1, "
                "use 1, or a teacher directory"
            )


TeacherConfig = Annotated[TeacherDirectory | TeacherEndpoint, Field(discriminator="kind")]


class Distillation(Settings):
    """On-policy distillation: coefficient x (log π_teacher - log π_student) is added to each token's advantage."""

    teacher: TeacherConfig
    """Who scores what the policy wrote."""
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Factor."""
