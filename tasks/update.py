"""The optimizer steps of an iteration: one task, all ranks.

Coefficients of KL penalties are fixed, or adapted to what the iteration before measured: the store alone decides them.
"""

from collections.abc import Mapping

from prefect import task

from infra.store.manifests import Manifest
from models.config.objectives import AdaptiveKl
from models.objectives.kl_control import next_coefficient
from models.records.work import UpdateWork
from tasks.run.batch import BatchPlan
from tasks.run.keys import StageKey, iteration_key
from tasks.run.session import RunRef, session_of
from tasks.run.stages import is_transient, once, required
from tasks.run.versions import critic_of, policy_of


def reward_coefficient(run: RunRef, number: int) -> float:
    """Coefficient of an iteration's penalty in the reward; 0 without one."""
    kl = session_of(run).settings.algorithm.reward_kl
    if kl is None:
        return 0.0
    return _coefficient(
        run,
        number,
        first=kl.coefficient,
        adaptive=kl.adaptive,
        measured=StageKey.of(iteration_key(number - 1), "credit"),
    )


def loss_coefficient(run: RunRef, number: int) -> float:
    """Coefficient of an iteration's penalty in the loss; 0 without one."""
    kl = session_of(run).settings.update.kl_penalty
    if kl is None:
        return 0.0
    return _coefficient(run, number, first=kl.coefficient, adaptive=kl.adaptive, measured=StageKey.policy(number - 1))


def _coefficient(run: RunRef, number: int, *, first: float, adaptive: AdaptiveKl | None, measured: str) -> float:
    if number == 1 or adaptive is None:
        return first
    discarded = required(run, StageKey.policy(number - 1)).metrics["quarantined"] > 0
    return adapted(required(run, measured).metrics, adaptive=adaptive, discarded=discarded)


def adapted(measured: Mapping[str, float], *, adaptive: AdaptiveKl, discarded: bool) -> float:
    """Coefficient after an iteration; it stays where nothing was learnt or no divergence was measured."""
    coefficient = measured["kl_coefficient"]
    if discarded or "kl" not in measured:
        return coefficient
    completions = int(measured.get("completions", measured["samples"]))
    return next_coefficient(coefficient, kl=measured["kl"], completions=completions, adaptive=adaptive)


@task(task_run_name="{plan.key} update", retries=2, retry_condition_fn=is_transient)
async def update_policy(run: RunRef, plan: BatchPlan) -> Manifest:
    """Have the update ranks learn from the iteration's samples and commit the new policy version."""
    settings = session_of(run).settings
    critic = settings.algorithm.value_model
    parent, credit = required(run, plan.policy), required(run, StageKey.of(iteration_key(plan.number), "credit"))
    work = UpdateWork(
        iteration=plan.number,
        policy=policy_of(parent),
        reference=policy_of(required(run, StageKey.policy(0))),
        samples=credit.shards,
        total_iterations=settings.iterations,
        seed=settings.seed,
        critic=None if critic is None else critic_of(required(run, StageKey.critic(plan.number - 1))),
        learns=critic is None or plan.number > critic.warmup_iterations,
        kl_coefficient=loss_coefficient(run, plan.number),
    )
    return await once(
        run, StageKey.policy(plan.number), role="update", method="update", work=work, parents=[parent, credit]
    )
