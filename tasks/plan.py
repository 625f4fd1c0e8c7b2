"""Plan a batch: which prompts, which shards, which policy. What is planned is committed before it is done."""

from math import floor

from prefect import task

from infra.store.manifests import Manifest
from models.config.engines import SamplingConfig
from models.data.curriculum import take
from models.rollouts.dynamic_sampling import DynamicSamplingState, another_wave, wave_size
from tasks.run.batch import BatchPlan, waves_of
from tasks.run.carry_over import carry_over_before
from tasks.run.keys import PROMPTS, StageKey, evaluation_key, iteration_key
from tasks.run.session import RunRef, session_of
from tasks.run.stages import record, required


async def plan_iteration(run: RunRef, number: int) -> BatchPlan:
    """Plan an iteration's first batch: what was carried over, and the prompts that come next."""
    session = session_of(run)
    before = carry_over_before(session.run, number)
    rollout = session.settings.rollout
    gap = max(0, rollout.prompts - sum(len(groups.rows) for groups in before.kept))
    ema, margin = (
        (before.sampling or DynamicSamplingState()).ema,
        1.0 if rollout.dynamic is None else rollout.dynamic.margin,
    )
    over_dispatch = 0.0 if rollout.partial is None else rollout.partial.over_dispatch
    going_on = sum(len(groups.rows) for groups in before.carried)
    wanted = wave_size(gap, ema, margin, over_dispatch=over_dispatch) - going_on
    return await plan_wave(run, number, 1, wanted)


async def plan_next_wave(run: RunRef, plan: BatchPlan) -> BatchPlan | None:
    """Plan another batch if informative groups are wanting and waves are left (DAPO, arXiv 2503.14476)."""
    session = session_of(run)
    rollout = session.settings.rollout
    dynamic = rollout.dynamic
    if dynamic is None:
        return None
    before = carry_over_before(session.run, plan.number)
    ema = (before.sampling or DynamicSamplingState()).ema
    informative, cut = sum(len(groups.rows) for groups in before.kept), 0
    for wave in waves_of(session.run, plan.number)[: plan.wave]:
        scores = [required(run, wave.shard_key("scoring", shard)) for shard in range(wave.num_shards)]
        informative += sum(int(manifest.metrics["informative_groups"]) for manifest in scores)
        rollouts = [required(run, wave.shard_key("rollout", shard)) for shard in range(wave.num_shards)]
        cut += sum(int(manifest.metrics["carried_groups"]) for manifest in rollouts)
    gap = rollout.prompts - informative - floor(cut / ema)  # of those that go on later, as many as usual will count
    if not another_wave(plan.wave, gap, max_extra_waves=dynamic.max_extra_waves):
        return None
    wanted = wave_size(gap, ema, dynamic.margin)
    following = await plan_wave(run, plan.number, plan.wave + 1, wanted)
    return following if following.num_shards else None


@task(task_run_name="plan eval-{number:04d}")
async def plan_evaluation(run: RunRef, number: int) -> BatchPlan:
    """Take the first held-out problems for the policy after `number` iterations."""
    return _plan_heldout(run, evaluation_key(number), number, policy=StageKey.policy(number))


@task(task_run_name="plan measurement of {policy}")
async def plan_measurement(run: RunRef, policy: str) -> BatchPlan:
    """Take the first held-out problems for a policy that comes before the first iteration."""
    return _plan_heldout(run, evaluation_key(0, policy=policy), 0, policy=policy)


def _plan_heldout(run: RunRef, key: str, number: int, *, policy: str) -> BatchPlan:
    settings = session_of(run).settings
    sampling = settings.rollout.sampling
    problems = min(settings.evaluation.problems, _num_prompts(required(run, PROMPTS["heldout"])))
    plan = BatchPlan(
        key=key,
        number=number,
        split="heldout",
        rows=tuple(range(problems)),
        group_size=1,
        # As many completions per shard as in training, so that a shard costs the same.
        shard_prompts=settings.rollout.shard_prompts * settings.rollout.group_size,
        sampling=SamplingConfig(
            temperature=settings.evaluation.temperature, max_new_tokens=sampling.max_new_tokens, stop=sampling.stop
        ),
        policy=policy,
    )
    return _commit(run, plan, required(run, policy))


def read_plan(run: RunRef, batch: str) -> BatchPlan:
    """The plan that was committed for a batch: small parameters and the store, rather than the plan itself, travel."""
    return BatchPlan.read(required(run, StageKey.of(batch, "plan")))


@task(task_run_name="plan it-{number:04d} wave {wave}")
async def plan_wave(run: RunRef, number: int, wave: int, wanted: int) -> BatchPlan:
    """Take so many of the next prompts, as far as there are: none that the iteration has already, none left out."""
    session = session_of(run)
    before = carry_over_before(session.run, number)
    rollout = session.settings.rollout
    policy = required(run, StageKey.policy(number - 1))
    earlier = waves_of(session.run, number)[: wave - 1]
    taken = before.rows().union(*(plan.rows for plan in earlier))
    num_prompts = _num_prompts(required(run, PROMPTS["train"]))
    cursor = earlier[-1].cursor if earlier else before.cursor
    assert cursor is not None, "an iteration's batches have a cursor"
    count = max(0, min(wanted, num_prompts - len(taken)))
    rows, after = tuple[int, ...](), cursor
    if count:
        rows, after = take(cursor, count, taken=taken, num_prompts=num_prompts, seed=session.settings.seed)
    plan = BatchPlan(
        key=iteration_key(number, wave),
        number=number,
        split="train",
        rows=rows,
        group_size=rollout.group_size,
        shard_prompts=rollout.shard_prompts,
        sampling=rollout.sampling,
        policy=policy.key,
        wave=wave,
        carried=tuple(groups.rollouts for groups in before.carried) if wave == 1 else (),
        cursor=after,
    )
    return _commit(run, plan, policy)


def _commit(run: RunRef, plan: BatchPlan, policy: Manifest) -> BatchPlan:
    prompts = required(run, PROMPTS[plan.split])
    return BatchPlan.read(record(run, plan.plan_key, parents=[policy, prompts], detail=plan.model_dump(mode="json")))


def _num_prompts(prompts: Manifest) -> int:
    return prompts.shards[0].rows
