"""Plans of batches. A plan lists the prompts, their division into shards, and the policy that generates
completions. It is stored before work on the batch starts, so a resumed run does the same work."""

from collections.abc import Mapping
from math import floor

from rheostat.infra.errors import Damaged
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.data.curriculum import DynamicSamplingState, another_wave, take_rows, wave_size
from rheostat.tasks.run.batch import Batch, BatchPlan
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import PROMPTS, evaluation_key, iteration_key
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.reverts import policy_key
from rheostat.tasks.run.solve_rates import prompt_order
from rheostat.tasks.run.stages import commit_decision


def plan_iteration(open_run: OpenRun, iteration: Iteration) -> Batch:
    """Plan the first batch of an iteration. It contains groups whose generation continues from the previous
    iteration, and the next prompts of the stream."""
    rollout, before = open_run.settings.rollout, iteration.start_state
    gap = max(0, rollout.prompts - before.num_leftover)
    ema = (before.sampling or DynamicSamplingState()).ema
    margin = 1.0 if rollout.dynamic is None else rollout.dynamic.margin
    over_dispatch = 0.0 if rollout.partial is None else rollout.partial.over_dispatch
    num_wanted = wave_size(gap, ema, margin, over_dispatch=over_dispatch) - before.num_partial
    return plan_wave(open_run, iteration, 1, num_wanted)


def plan_next_wave(open_run: OpenRun, iteration: Iteration, batch: Batch) -> Batch | None:
    """Plan another batch if too few groups of the iteration have unequal rewards and the limit on batches is not
    reached (dynamic sampling of DAPO, arXiv 2503.14476).

    Return None if no batch is needed or possible.
    """
    rollout, before, wave = open_run.settings.rollout, iteration.start_state, batch.plan.wave
    dynamic = rollout.dynamic
    if dynamic is None:
        return None
    ema = (before.sampling or DynamicSamplingState()).ema
    informative, cut = before.num_leftover, 0
    for earlier in iteration.batches[:wave]:
        informative += sum(
            int(manifest.metrics["informative_groups"]) for manifest in earlier.stage_manifests("scoring")
        )
        cut += sum(int(manifest.metrics["carried_groups"]) for manifest in earlier.rollout_manifests)
    # the usual share of the groups with partial completions will become informative
    gap = rollout.prompts - informative - floor(cut / ema)
    if not another_wave(wave, gap, max_extra_waves=dynamic.max_extra_waves):
        return None
    following = plan_wave(open_run, iteration, wave + 1, wave_size(gap, ema, dynamic.margin))
    return following if following.shards else None


def plan_wave(open_run: OpenRun, iteration: Iteration, wave: int, num_wanted: int) -> Batch:
    """Plan a batch with up to `num_wanted` prompts, which come next in the stream. Prompts that are already in use
    in the iteration are skipped."""
    settings, before = open_run.settings, iteration.start_state
    earlier = [batch.plan for batch in iteration.batches[: wave - 1]]
    excluded_rows = open_run.run.excluded_rows(iteration.number)
    taken_rows = {*before.rows(), *(row for plan in earlier for row in plan.rows)}
    order = prompt_order(iteration, settings.rollout, open_run.solve_rates)
    cursor = earlier[-1].cursor if earlier else before.cursor
    assert cursor is not None, "an iteration's batches have a cursor"
    count = max(0, min(num_wanted, order.num_prompts - len(taken_rows | excluded_rows)))
    rows, next_cursor = tuple[int, ...](), cursor
    if count:
        rows, next_cursor = take_rows(cursor, count, order, taken=taken_rows, excluded=excluded_rows)
    plan = BatchPlan(
        key=iteration_key(iteration.number, wave),
        number=iteration.number,
        split="train",
        rows=rows,
        group_size=settings.rollout.group_size,
        shard_prompts=settings.rollout.shard_prompts,
        sampling=settings.rollout.sampling,
        policy=iteration.generating_policy_key,
        wave=wave,
        carried=tuple(groups.rollouts for groups in before.partial_groups) if wave == 1 else (),
        cursor=next_cursor,
    )
    return _commit_plan(open_run, plan, {} if order.choice is None else order.choice.metrics(rows))


def plan_evaluation(open_run: OpenRun, number: int) -> Batch:
    """Plan the evaluation of the policy that the run has after `number` iterations. It uses the first held-out
    problems."""
    return _plan_heldout(open_run, evaluation_key(number), number, policy=policy_key(open_run.run, number))


def plan_measurement(open_run: OpenRun, policy: str) -> Batch:
    """Plan the evaluation of a policy before the first iteration, for example before and after the warm-up. It uses
    the first held-out problems."""
    return _plan_heldout(open_run, evaluation_key(0, policy=policy), 0, policy=policy)


def _plan_heldout(open_run: OpenRun, key: str, number: int, *, policy: str) -> Batch:
    settings, prompts = open_run.settings, open_run.run.require(PROMPTS["heldout"])
    sampling, samples = settings.rollout.sampling, settings.evaluation.samples
    plan = BatchPlan(
        key=key,
        number=number,
        split="heldout",
        rows=tuple(range(min(settings.evaluation.problems, prompts.shards[0].rows))),
        group_size=samples,
        # The same number of completions per shard as in training, so that a shard costs the same.
        shard_prompts=max(1, settings.rollout.shard_prompts * settings.rollout.group_size // samples),
        sampling=SamplingConfig(
            temperature=settings.evaluation.temperature, max_new_tokens=sampling.max_new_tokens, stop=sampling.stop
        ),
        policy=policy,
    )
    return _commit_plan(open_run, plan)


def _commit_plan(open_run: OpenRun, plan: BatchPlan, metrics: Mapping[str, float] | None = None) -> Batch:
    batch = Batch(open_run.run, plan)
    if batch.is_replayed and not open_run.run.has(plan.plan_key):
        raise Damaged(
            f"run {open_run.run.name!r}: {plan.plan_key!r} is not among the shared results, so its rollouts do not "
            "exist. Create the what-if run again under another name."
        )
    manifest = commit_decision(
        open_run, plan.plan_key, parents=[batch.policy, batch.prompts], metrics=metrics, detail=plan.as_recorded()
    )
    return Batch(open_run.run, BatchPlan.read(manifest))
