"""Configuration of on-policy distillation: the teacher models and the factor of their log-probs. Torch-free."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, JsonValue

from rheostat.infra.config import Positive, Settings, Since
from rheostat.infra.store.inputs import ModelLocation
from rheostat.infra.variants import Variant
from rheostat.models.config.endpoints import Endpoint
from rheostat.models.config.job import Job

Direction = Literal["reverse", "forward"]
"""Direction of a KL divergence: KL(policy ‖ teacher) or KL(teacher ‖ policy)."""

TEACHER_KEY: Final = "algorithm.distillation.teacher"
"""Configuration key of the teacher for all problems that no specialist selects."""


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


def encode_value(value: JsonValue) -> str:
    """Return the text with which the value of a column is compared: text unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


class Specialist(Settings):
    """Teacher for some of the problems, which are selected by the value of a column."""

    column: Annotated[str, Field(min_length=1)]
    """Name of the column. Problems have the columns that `data.environment_columns` lists."""
    values: Annotated[tuple[str, ...], Field(min_length=1)]
    """Values of the column with which a problem is selected. A value that is not text is compared as JSON, such as
    `3` or `true`."""
    teacher: TeacherConfig
    """Teacher model for the selected problems."""

    def selects(self, columns: Mapping[str, JsonValue]) -> bool:
        """Return whether a problem with these columns is selected. A problem without the column is not selected."""
        return self.column in columns and encode_value(columns[self.column]) in self.values


class TopK(Settings):
    """KL divergence between policy and teacher as a term of the loss, over the teacher's most probable tokens at each
    position and the probability of all other tokens together."""

    tokens: Positive = 64
    """Number k of most probable tokens. Estimates and samples each store k token IDs and k log-probs for every
    completion token, which need 8 · k bytes per token."""
    direction: Direction = "reverse"
    """Direction of the divergence. With "reverse", KL(policy ‖ teacher), the policy concentrates on tokens that the
    teacher finds probable. With "forward", KL(teacher ‖ policy), the policy gives probability to all such tokens."""


class Distillation(Settings):
    """On-policy distillation: adds coefficient x (log π_teacher - log π_student) to the advantage of each token, where
    the student is the policy. With `top_k`, it adds coefficient x the KL divergence to the loss of each token
    instead."""

    teacher: TeacherConfig
    """Teacher model that computes the log-probs of the tokens in the policy's completions, except completions of
    problems that a specialist selects."""
    specialists: Annotated[tuple[Specialist, ...], Since("0.2.0", before=())] = ()
    """Further teachers, each for some of the problems. The first specialist that selects a problem is the only teacher
    of its completions. Each update rank has at most one teacher of kind "directory" in memory at a time."""
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the log-prob difference in the advantage of a token, or of the divergence in the loss of a token."""
    top_k: Annotated[TopK | None, Since("0.2.0", before=None)] = None
    """Divergence over the teacher's most probable tokens. If not set, only the log-prob of the sampled token is used,
    and it is part of the advantage."""

    @property
    def teachers(self) -> dict[str, TeacherConfig]:
        """All teachers by their configuration keys: first `teacher`, then the teachers of `specialists` in order."""
        keys = (f"algorithm.distillation.specialists[{index}].teacher" for index in range(len(self.specialists)))
        others = zip(keys, (each.teacher for each in self.specialists), strict=True)
        return {TEACHER_KEY: self.teacher, **dict(others)}

    def choose_teacher(self, columns: Mapping[str, JsonValue]) -> int:
        """Return the index in `teachers` of the teacher for a problem with these columns."""
        return next((index for index, each in enumerate(self.specialists, 1) if each.selects(columns)), 0)

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which a teacher cannot be combined."""
        for key, teacher in self.teachers.items():
            yield from teacher.find_conflicts(job)
            if self.top_k is not None and teacher.local_model is None:
                yield (
                    f"{key}.kind is {teacher.label!r}, but algorithm.distillation.top_k needs the log-probs of the "
                    "teacher's most probable tokens, which Rheostat does not request from endpoints. Use a teacher of "
                    "kind 'directory', or remove algorithm.distillation.top_k"
                )
