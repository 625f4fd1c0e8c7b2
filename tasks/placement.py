"""Plan a batch: which prompts, which shards, which policy, and which workers serve it."""

from prefect import task

from infra.manifests import Manifest
from models.config import SamplingConfig
from models.curriculum import prompt_rows
from tasks.plan import BatchPlan, evaluation_key, iteration_key, plan_key, policy_key
from tasks.preparation import PROMPTS
from tasks.reports import sealed_iterations
from tasks.session import RunRef, session_of
from tasks.stages import record, required


@task(task_run_name="place it-{number:04d}")
async def place_iteration(run: RunRef, number: int) -> BatchPlan:
    """Take the next prompts after those of the sealed iterations and cut them into shards."""
    session = session_of(run)
    rollout = session.settings.rollout
    policy = required(run, policy_key(number - 1))
    # The cursor is derived: an iteration that was not sealed never moved it.
    earlier = sealed_iterations(session.run)[: number - 1]
    issued = sum(int(sealed.metrics["prompts"]) for sealed in earlier)
    num_prompts = _num_prompts(required(run, PROMPTS["train"]))
    rows = prompt_rows(issued, rollout.prompts, num_prompts=num_prompts, seed=session.settings.seed)
    plan = BatchPlan(
        key=iteration_key(number),
        number=number,
        split="train",
        rows=rows,
        group_size=rollout.group_size,
        shard_prompts=rollout.shard_prompts,
        sampling=rollout.sampling,
        policy=policy.key,
    )
    return _commit(run, plan, policy)


@task(task_run_name="place eval-{number:04d}")
async def place_evaluation(run: RunRef, number: int) -> BatchPlan:
    """Take the first held-out problems for the policy after `number` iterations."""
    settings = session_of(run).settings
    policy = required(run, policy_key(number))
    sampling = settings.rollout.sampling
    problems = min(settings.evaluation.problems, _num_prompts(required(run, PROMPTS["heldout"])))
    plan = BatchPlan(
        key=evaluation_key(number),
        number=number,
        split="heldout",
        rows=tuple(range(problems)),
        group_size=1,
        # As many completions per shard as in training, so that a shard costs the same.
        shard_prompts=settings.rollout.shard_prompts * settings.rollout.group_size,
        sampling=SamplingConfig(
            temperature=settings.evaluation.temperature, max_new_tokens=sampling.max_new_tokens, stop=sampling.stop
        ),
        policy=policy.key,
    )
    return _commit(run, plan, policy)


def read_plan(run: RunRef, batch: str) -> BatchPlan:
    """The plan that was committed for a batch: small parameters and the store, rather than the plan itself, travel."""
    return BatchPlan.read(required(run, plan_key(batch)))


def _commit(run: RunRef, plan: BatchPlan, policy: Manifest) -> BatchPlan:
    prompts = required(run, PROMPTS[plan.split])
    return BatchPlan.read(
        record(run, plan_key(plan.key), parents=[policy, prompts], detail=plan.model_dump(mode="json"))
    )


def _num_prompts(prompts: Manifest) -> int:
    return prompts.shards[0].rows
