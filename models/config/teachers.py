"""Configuration of on-policy distillation: the teacher model and the factor of its log-probs. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rheostat.infra.config import Settings
from rheostat.infra.store.inputs import ModelLocation
from rheostat.infra.variants import Variant
from rheostat.models.config.endpoints import Endpoint
from rheostat.models.config.job import Job


class Teacher(Variant):
    """Fields common to all teachers (models whose log-probs the policy is trained to match)."""

    checks = {"policy": "rheostat.models.inspection.training:check_teacher"}
    inspection: ClassVar[str]
    """Import path `pkg.mod:function` of a `rheostat.models.inspection.other_models.TeacherCheck`, which checks the
    teacher before a run begins."""

    @property
    def local_model(self) -> "TeacherDirectory | None":
        """This object if the run stores a copy of the teacher and runs it, else None."""
        return None

    @property
    def endpoint(self) -> "TeacherEndpoint | None":
        """This object if the teacher is behind an HTTP endpoint, else None."""
        return None

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which this teacher cannot be combined."""
        yield from ()


class TeacherDirectory(Teacher):
    """Teacher loaded from a causal language model directory. The teacher must have the policy's tokenizer. The run
    stores a copy of the directory."""

    inspection = "rheostat.models.inspection.other_models:check_teacher_directory"

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, or a model on the Hugging Face Hub (docs/hub.md)."""

    @property
    def local_model(self) -> "TeacherDirectory":
        """This object itself, because the run stores a copy of the teacher and runs it."""
        return self


class TeacherEndpoint(Endpoint, Teacher):
    """Teacher on a vLLM server that returns log-probs of given token ids (`prompt_logprobs`). It must have the policy's
    tokenizer."""

    inspection = "rheostat.models.inspection.other_models:check_teacher_endpoint"

    kind: Literal["endpoint"] = "endpoint"

    @property
    def endpoint(self) -> "TeacherEndpoint":
        """This object itself, because the teacher is behind an HTTP endpoint."""
        return self

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield a message if the sampling temperature is not 1, because the endpoint returns log-probs only at
        temperature 1."""
        temperature = job.rollout.sampling.temperature
        if temperature != 1:
            yield (
                f"rollout.sampling.temperature is {temperature:g}, but a teacher behind an endpoint returns log-probs "
                "at temperature 1. Use 1, or a teacher of kind 'directory'"
            )


TeacherConfig = Annotated[TeacherDirectory | TeacherEndpoint, Field(discriminator="kind")]


class Distillation(Settings):
    """On-policy distillation: adds coefficient x (log π_teacher - log π_student) to the advantage of each token, where
    the student is the policy."""

    teacher: TeacherConfig
    """Teacher model that computes the log-probs of the tokens in the policy's completions."""
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the log-prob difference in the advantage of a token."""
