"""Update stage: trains the policy on the samples of an iteration, in one task on all update ranks.

The coefficient of a KL penalty is either constant, or adapted after each iteration to the measured divergence. It
depends only on stored metrics.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from rheostat.infra.store.manifests import Manifest
from rheostat.models.algorithms.shaping import next_coefficient
from rheostat.models.config.divergence import AdaptiveKl
from rheostat.models.records.versions import AVERAGE, critic_of, policy_of
from rheostat.models.records.work import UpdateWork
from rheostat.tasks.run.dependencies import relayout_iteration
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.references import recorded_rule
from rheostat.tasks.run.reverts import updating_iteration
from rheostat.tasks.run.stages import run_once, stage
from rheostat.tasks.run.states import STATES, is_due, states_of, updates_since_state


def reward_coefficient(open_run: OpenRun, iteration: Iteration) -> float:
    """Return the coefficient of the KL penalty in the reward for an iteration, or 0 if there is no penalty."""
    kl = open_run.settings.algorithm.reward_kl
    return 0.0 if kl is None else _find_coefficient(iteration, kl.coefficient, kl.adaptive, measured="credit")


def loss_coefficient(open_run: OpenRun, iteration: Iteration) -> float:
    """Return the coefficient of the KL penalty in the loss for an iteration, or 0 if there is no penalty."""
    kl = open_run.settings.update.kl_penalty
    return 0.0 if kl is None else _find_coefficient(iteration, kl.coefficient, kl.adaptive, measured="update")


def _find_coefficient(
    iteration: Iteration, first: float, adaptive: AdaptiveKl | None, *, measured: Literal["credit", "update"]
) -> float:
    """Return the coefficient for an iteration. `measured` is the stage that measured the divergence of the iteration
    before. A fork whose settings of the divergence differ from those of its parent begins with its own
    coefficient."""
    run, table = iteration.run, "algorithm" if measured == "credit" else "update"
    last = Iteration(run, updating_iteration(run, iteration.number - 1))
    if adaptive is None or not last.number:
        return first
    settings = [config.get(table) for config in (run.config_at(last.number), run.record.config)]
    before, now = (each.get("kl") if isinstance(each, Mapping) else None for each in settings)
    if before != now:
        return first
    return adapt_coefficient(
        last.stage_manifest(measured).metrics, adaptive=adaptive, discarded=last.update.metrics["quarantined"] > 0
    )


def adapt_coefficient(measured: Mapping[str, float], *, adaptive: AdaptiveKl, discarded: bool) -> float:
    """Return the KL coefficient for the next iteration. The coefficient does not change if the update was discarded or
    no divergence was measured."""
    coefficient = measured["kl_coefficient"]
    if discarded or "kl" not in measured:
        return coefficient
    completions = int(measured.get("completions", measured["samples"]))
    return next_coefficient(coefficient, kl=measured["kl"], completions=completions, adaptive=adaptive)


@stage("{iteration.key} update", retries=2)
async def update_policy(open_run: OpenRun, iteration: Iteration) -> Manifest:
    """Train the policy on the samples of an iteration, and return the record of the new policy. The record is committed
    as soon as the files of the policy are durable (fsync).

    The optimizer state is stored later. If the state is lost, it is recomputed from the previous stored state and the
    training samples since then.
    """
    run, key = open_run.run, iteration.stage_key("update")
    if (manifest := run.find(key)) is not None:
        return manifest
    _, way = updates_since_state(run, iteration.number - 1)
    past = [Iteration(run, number) for number in way]
    work = replace(
        _build_work(open_run, iteration),
        keeps_state=is_due(run, iteration.number, every=open_run.settings.update.state_every),
        stages_weights=open_run.is_on_one_machine,
        was_moved=bool(way) and relayout_iteration(run) >= way[0],
        past=tuple(replace(_build_work(open_run, each), keeps_state=bool(states_of(each.update))) for each in past),
    )
    manifest = await run_once(
        open_run,
        key,
        role="update",
        method="update",
        work=work,
        parents=iteration.update_parents,
        returns_before_durable=True,
    )
    others = (*STATES, AVERAGE)
    open_run.prefetch("rollout", tuple(bundle for name, bundle in manifest.bundles.items() if name not in others))
    return manifest


def _build_work(open_run: OpenRun, iteration: Iteration) -> UpdateWork:
    settings, critic = open_run.settings, open_run.settings.algorithm.value_model
    return UpdateWork(
        iteration=iteration.number,
        policy=policy_of(iteration.policy),
        reference=iteration.reference_model,
        samples=iteration.credit.shards,
        media=iteration.media,
        total_iterations=settings.iterations,
        seed=settings.seed,
        critic=None if critic is None else critic_of(iteration.critic),
        learns=critic is None or iteration.number > critic.warmup_iterations,
        kl_coefficient=loss_coefficient(open_run, iteration),
        ema_decay=recorded_rule(open_run.run, iteration.number).ema_decay,
        exact_behaviour=settings.rollout.engine.matches_trainer(settings.update),
        is_replayed=open_run.run.replays(iteration.number),
    )
