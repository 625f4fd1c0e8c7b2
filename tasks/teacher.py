"""The teacher of on-policy distillation: its model is copied into the run once, unless it is behind an endpoint."""

from prefect import task

from infra.store.manifests import Manifest
from models.config.algorithms import TeacherDirectory
from models.records.work import TeacherWork
from tasks.plan import PROMPTS
from tasks.session import RunRef, session_of
from tasks.settings import RunSettings
from tasks.stages import is_transient, once, required
from tasks.versions import policy_of

TEACHER = "teacher/model"
"""Key of the manifest that committed the teacher's model."""


def held_teacher(settings: RunSettings) -> TeacherDirectory | None:
    """The teacher whose model the run holds; none without a teacher, or with one behind an endpoint."""
    distillation = settings.algorithm.distillation
    teacher = None if distillation is None else distillation.teacher
    return teacher if isinstance(teacher, TeacherDirectory) else None


def holds_teacher(run: RunRef) -> bool:
    """Whether the run holds a teacher's model."""
    return held_teacher(session_of(run).settings) is not None


@task(task_run_name="teacher", retries=2, retry_condition_fn=is_transient)
async def make_teacher(run: RunRef) -> Manifest:
    """Copy the teacher's model, which must know the policy's tokens."""
    settings = session_of(run).settings
    teacher = held_teacher(settings)
    assert teacher is not None, "make_teacher where holds_teacher"
    base, prompts = required(run, "policy/base"), required(run, PROMPTS["train"])
    longest = int(prompts.metrics["longest"]) + settings.rollout.sampling.max_new_tokens
    work = TeacherWork(teacher=teacher, policy=policy_of(base), longest_tokens=longest)
    return await once(run, TEACHER, role="preparation", method="make_teacher", work=work, parents=[base, prompts])
