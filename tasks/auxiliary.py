"""Scores by auxiliary models: before advantages are computed, reference, critic and teacher score every rollout token.

One task uses all update ranks. The initial critic is created once, if the algorithm has a critic. Each teacher is
copied into the run once, unless it is behind an endpoint or is the policy itself.
"""

from rheostat.infra.store.manifests import Manifest
from rheostat.models.algorithms.advantages import required_models
from rheostat.models.config.teachers import TeacherDirectory
from rheostat.models.records.versions import critic_of, policy_of
from rheostat.models.records.work import CriticWork, EstimateWork, TeacherWork
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import BASE, PROMPTS, StageKey
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.stages import run_once, stage


def find_stored_teachers(settings: RunConfig) -> dict[int, TeacherDirectory]:
    """Return the configured distillation teachers whose models the run copies into the store, by their index in
    `Distillation.teachers`. Teachers that an endpoint serves, and the policy itself, are omitted."""
    teachers = settings.algorithm.all_teachers.values()
    return {index: local for index, each in enumerate(teachers) if (local := each.local_model) is not None}


@stage("teacher", retries=2)
async def make_teacher(open_run: OpenRun, index: int) -> Manifest:
    """Copy the model of one of `find_stored_teachers` into the run. Raises BadInput if its tokenizer does not match the
    policy's."""
    settings = open_run.settings
    where = [*settings.algorithm.all_teachers][index]
    base, prompts = open_run.run.require(BASE), open_run.run.require(PROMPTS["train"])
    longest = int(prompts.metrics["longest"]) + settings.rollout.sampling.max_new_tokens
    pixels = open_run.settings.data.pixels
    work = TeacherWork(
        teacher=find_stored_teachers(settings)[index],
        policy=policy_of(base),
        longest_tokens=longest,
        pixels=pixels,
        where=where,
    )
    return await run_once(
        open_run, StageKey.teacher(index), role="preparation", method="make_teacher", work=work, parents=[base, prompts]
    )


async def compute_auxiliary_scores(open_run: OpenRun, iteration: Iteration) -> None:
    """Compute per-token scores of reference, critic and teacher if the algorithm needs them. Most algorithms do not."""
    if required_models(open_run.settings.algorithm).any:
        await score_tokens(open_run, iteration)


@stage("{iteration.key} estimates", retries=2)
async def score_tokens(open_run: OpenRun, iteration: Iteration) -> Manifest:
    """Compute per-token scores by the reference model, the critic and the teacher on the update ranks, for all
    completions that the credit stage reads. They include surplus groups (left over from the previous iteration)."""
    needs, scored, policy = required_models(open_run.settings.algorithm), iteration.scored_rollouts(), iteration.policy
    critic = iteration.critic if needs.critic else None
    stored = find_stored_teachers(open_run.settings)
    teachers = {index: open_run.run.require(StageKey.teacher(index)) for index in stored}
    sources = [*open_run.settings.algorithm.all_teachers.values()]
    builds = any(each.builds_prompts for each in sources)
    privileged = {index: own for index, each in enumerate(sources) if (own := each.privileged) is not None}
    reads_scores = any(own.score_fields for own in privileged.values())
    prompts = iteration.prompts if len(sources) > 1 or builds else None
    averaged = [index for index, own in privileged.items() if own.ema_decay]
    reference = iteration.reference if needs.reference or averaged else None
    models_by_teacher = {index: policy_of(manifest) for index, manifest in teachers.items()}
    models_by_teacher |= dict.fromkeys(averaged, iteration.reference_model)
    teacher, *specialists = (models_by_teacher.get(index) for index in range(max(1, len(sources))))
    work = EstimateWork(
        iteration=iteration.number,
        shards=scored.shards,
        media=iteration.media,
        policy=policy_of(policy),
        reference=iteration.reference_model if needs.reference else None,
        critic=None if critic is None else critic_of(critic),
        teacher=teacher,
        specialists=tuple(specialists),
        prompts=None if prompts is None else prompts.shards[0],
        text_rules=open_run.settings.data.text_rules,
    )
    inputs = (policy, reference, critic, *teachers.values(), prompts)
    models = {manifest.key: manifest for manifest in inputs if manifest is not None}
    scores = scored.scores if reads_scores else ()
    key, parents = iteration.stage_key("estimates"), [*scored.rollouts, *scores, *models.values()]
    return await run_once(open_run, key, role="update", method="estimate", work=work, parents=parents)


def auxiliary_manifests(open_run: OpenRun, iteration: Iteration) -> list[Manifest]:
    """Return the stored scores by reference model, critic and teacher, as a list with one item. The list is empty if
    the algorithm needs no such scores."""
    return [iteration.stage_manifest("estimates")] if required_models(open_run.settings.algorithm).any else []


def has_critic(open_run: OpenRun) -> bool:
    """Return whether the run trains a critic together with its policy."""
    return open_run.settings.algorithm.value_model is not None and open_run.settings.iterations > 0


@stage("initial critic", retries=2)
async def make_critic(open_run: OpenRun, policy: Manifest) -> Manifest:
    """Build the initial critic from the initial policy, or import the configured one."""
    critic = open_run.settings.algorithm.value_model
    assert critic is not None, "make_critic needs an algorithm with a critic"
    work, key = CriticWork(policy=policy_of(policy), critic=critic), StageKey.critic(0)
    return await run_once(open_run, key, role="preparation", method="make_critic", work=work, parents=[policy])
