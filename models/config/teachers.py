"""Configuration of on-policy distillation: the teacher models and the factor of their log-probs. Torch-free."""

import json
import re
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


_FIELD: Final = re.compile(r"\{([A-Za-z_]\w*)\}")

SOLUTION: Final = "solution"
"""Field of a teacher's template for a completion of the same prompt with a high reward."""

FEEDBACK: Final = "feedback"
"""Field of a teacher's template for the feedback of the rewards on the completion itself."""


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

    @property
    def privileged(self) -> "TeacherPolicy | None":
        """This object if the teacher is the policy with another prompt, else None."""
        return None

    @property
    def aligns_text(self) -> bool:
        """Whether the teacher may have another tokenizer than the policy."""
        return False

    @property
    def builds_prompts(self) -> bool:
        """Whether the prompts of the teacher are built from the problems, and are not the policy's tokens."""
        return self.aligns_text or self.privileged is not None

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which this teacher cannot be combined."""
        yield from ()


class TeacherDirectory(Teacher):
    """Teacher loaded from a causal language model directory. The teacher must have the policy's tokenizer, except with
    `align = "text"`. The run stores a copy of the directory."""

    checks = {"models": "rheostat.models.inspection.teacher_prompts:check_aligned_teacher"}
    inspection = "rheostat.models.inspection.other_models:check_teacher_directory"

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, or a model on the Hugging Face Hub (docs/hub.md)."""
    align: Annotated[Literal["tokens", "text"], Since("0.2.0", before="tokens")] = "tokens"
    """Alignment of the policy's tokens with the teacher's: "tokens" requires the same tokenizer. With "text", the
    teacher reads the text of prompts and completions with its own tokenizer and chat template, and log-probs are
    compared over the shortest parts of the text at whose ends tokens of both models end."""

    @property
    def aligns_text(self) -> bool:
        """Whether the teacher may have another tokenizer than the policy, because `align` is "text"."""
        return self.align == "text"

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield a message if texts are aligned and the sampling temperature is not 1, because then the sum of a text's
        log-probs depends on the tokenizer."""
        temperature = job.rollout.sampling.temperature
        if self.aligns_text and temperature != 1:
            yield (
                f"rollout.sampling.temperature is {temperature:g}, but with align = 'text' the log-probs of texts are "
                "compared, which are defined only at temperature 1. Use 1, or a teacher with the policy's tokenizer"
            )

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


class TeacherPolicy(Teacher):
    """Policy before the update of the iteration, or a moving average of the policies, which reads a prompt with
    privileged information, such as the reference answer, instead of the student's prompt (self-distillation: SDFT,
    arXiv 2601.19897; SDPO, arXiv 2601.20802)."""

    checks = {"policy": "rheostat.models.inspection.teacher_prompts:check_policy_teacher"}

    kind: Literal["policy"] = "policy"
    template: Annotated[str, Field(min_length=1)]
    """Prompt of the teacher. `{prompt}` is replaced by the student's prompt, or in a chat by the last user message, and
    the result replaces it. `{answer}` is the reference answer, and `{NAME}` the column NAME of the problem, which
    `data.environment_columns` must list. `{solution}` is another completion of the same group with the highest reward,
    if this reward is at least `min_reward`. `{feedback}` is the text that rewards with `feedback = true`
    returned about the completion. If a template contains one or both of these fields, but there is no text for any of
    them, the teacher reads the student's prompt. Other text in braces is not a field."""
    min_reward: float = 1.0
    """Minimum total reward of a completion that replaces `{solution}`."""
    ema_decay: Annotated[float | None, Field(gt=0, lt=1), Since("0.2.0", before=None)] = None
    """Decay d of an exponential moving average of the weights of the policies, with which the teacher computes: the
    teacher of iteration 1 is the initial policy, and the teacher of iteration i + 1 is d x the teacher of iteration i +
    (1 - d) x the policy after iteration i, in float32. If not set, the teacher has the weights of the policy before the
    update. A run stores one moving average, so penalties and teachers with a moving average must have the same
    decay."""

    @property
    def privileged(self) -> "TeacherPolicy":
        """This object itself, because the teacher is the policy with another prompt."""
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields in the template, in order."""
        return tuple(_FIELD.findall(self.template))

    @property
    def score_fields(self) -> set[str]:
        """Fields of the template whose values depend on the scores: `SOLUTION` and `FEEDBACK`."""
        return {SOLUTION, FEEDBACK} & {*self.fields}

    def fill_template(self, values: Mapping[str, str]) -> str:
        """Return the template in which each field is replaced by its value."""
        return _FIELD.sub(lambda field: values[field[1]], self.template)

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield a message if routers use recorded experts, if the template needs feedback, but no reward returns any,
        or if the template needs a solution, but there are no other completions or no rewards from which it could be
        chosen."""
        if job.update.router_replay is not None:
            yield (
                "update.router_replay cannot be combined with a teacher of kind 'policy', because the recorded experts "
                "do not belong to its prompts. Remove update.router_replay, or use another teacher"
            )
        if job.iterations and FEEDBACK in self.fields and not job.scoring.has_feedback:
            yield (
                "scoring.rewards: no reward has feedback = true, but the template of a teacher contains {feedback}. "
                "Set feedback = true in a reward of kind 'target' or 'code', or remove {feedback}"
            )
        if not job.iterations or SOLUTION not in self.fields:
            return
        if job.rollout.group_size < 2:
            yield (
                f"rollout.group_size is {job.rollout.group_size}, but {{solution}} in the template of a teacher is "
                "another completion of the same group. Set it to at least 2, or remove {solution}"
            )
        if not any(reward.weight for reward in job.scoring.rewards):
            yield (
                "scoring.rewards: the weight of every reward is 0, but {solution} in the template of a teacher is "
                "chosen by the total reward. Set the weight of at least one reward, or remove {solution}"
            )


TeacherConfig = Annotated[TeacherDirectory | TeacherEndpoint | TeacherPolicy, Field(discriminator="kind")]


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
            if self.top_k is not None and teacher.endpoint is not None:
                yield (
                    f"{key}.kind is {teacher.label!r}, but algorithm.distillation.top_k needs the log-probs of the "
                    "teacher's most probable tokens, which Rheostat does not request from endpoints. Use a teacher of "
                    "kind 'directory', or remove algorithm.distillation.top_k"
                )
            if self.top_k is not None and teacher.aligns_text:
                yield (
                    f"{key}.align is 'text', but algorithm.distillation.top_k compares single tokens of one "
                    "vocabulary. Use a teacher with the policy's tokenizer, or remove algorithm.distillation.top_k"
                )
