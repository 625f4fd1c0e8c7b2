"""The manifest that makes an iteration exist, and the retirement of policies that nothing needs any more."""

from datetime import UTC, datetime

from prefect import task

from infra.store.bundles import BundleRef, retirement_key
from infra.store.manifests import Manifest
from infra.store.retention import retire_bundle
from models.algorithms.advantages import required_models
from tasks.credit import stage_of
from tasks.run.batch import waves_of
from tasks.run.carry_over import carry_over_before, handover_after
from tasks.run.keys import StageKey, iteration_key
from tasks.run.session import RunRef, session_of
from tasks.run.stages import record, required
from tasks.run.versions import policy_of


@task(task_run_name="it-{number:04d} seal")
async def seal_iteration(run: RunRef, number: int) -> Manifest:
    """Commit the list of everything that the iteration made, with its metrics, and what it leaves to the next."""
    session = session_of(run)
    rollout, waves = session.settings.rollout, waves_of(session.run, number)
    plans = [required(run, wave.plan_key) for wave in waves]
    rollouts, scores = stage_of(run, waves, "rollout"), stage_of(run, waves, "scoring")
    credit, update = required(run, StageKey.of(iteration_key(number), "credit")), required(run, StageKey.policy(number))
    estimates = (
        [required(run, StageKey.of(iteration_key(number), "estimates"))]
        if required_models(session.settings.algorithm).any
        else []
    )
    handover = handover_after(
        carry_over_before(session.run, number),
        waves,
        rollouts=rollouts,
        scores=scores,
        credit=credit,
        keep_surplus=rollout.dynamic is not None and rollout.dynamic.surplus == "keep",
        dynamic=rollout.dynamic is not None,
    )
    elapsed = datetime.now(UTC) - datetime.fromisoformat(plans[0].provenance.created)
    seconds = {
        "rollout": max((m.provenance.seconds["stage"] for m in rollouts), default=0.0),
        "scoring": sum(m.provenance.seconds["worker"] for m in scores),
        "estimates": sum(m.provenance.seconds["stage"] for m in estimates),
        "credit": credit.provenance.seconds["stage"],
        "update": update.provenance.seconds["stage"],
        "total": elapsed.total_seconds(),
        **{
            name: sum(m.provenance.seconds[name] for m in rollouts)  # over workers, which load side by side
            for name in ("weights_seconds", "weights_bytes")
        },
    }
    return record(
        run,
        StageKey.of(iteration_key(number), "seal"),
        parents=[*plans, *rollouts, *scores, *estimates, credit, update],
        metrics={
            "prompts": sum(len(wave.rows) for wave in waves),
            **{f"credit/{name}": value for name, value in credit.metrics.items()},
            **{f"update/{name}": value for name, value in update.metrics.items()},
        },
        detail={"policy": policy_of(update).digest, **handover.detail()},
        seconds=seconds,
    )


@task(task_run_name="it-{number:04d} retire")
async def retire_policies(run: RunRef, number: int) -> int:
    """Delete the files of policies that retention no longer keeps after `number` iterations; return how many bundles.

    All earlier versions are looked at, since a run may be continued with a smaller retention.
    """
    session = session_of(run)
    keep = session.settings.retention
    kept = kept_versions(number, keep_last=keep.keep_last, keep_every=keep.keep_every)
    used = {bundle.key for version in kept for bundle in _bundles(run, version)}
    old = {
        bundle.key: bundle for version in range(number + 1) if version not in kept for bundle in _bundles(run, version)
    }
    newest_gone = {bundle.key for bundle in _bundles(run, max(0, number - keep.keep_last))}
    retired = 0
    for key, bundle in old.items():
        known = session.run.find(retirement_key(bundle)) is not None
        if key not in used and (not known or key in newest_gone):  # the newest may have been cut short
            retire_bundle(session.run, bundle)
            retired += 1
    return retired


def kept_versions(number: int, *, keep_last: int, keep_every: int) -> set[int]:
    """Versions that keep their files after `number` iterations: the first, the newest, and every `keep_every`-th."""
    newest = range(max(0, number + 1 - keep_last), number + 1)
    regular = range(0, number + 1, keep_every) if keep_every else range(0)
    return {0, *newest, *regular}


def _bundles(run: RunRef, version: int) -> list[BundleRef]:
    """Bundles of a policy and its critic; the first critic has a manifest of its own."""
    first_critic = session_of(run).run.find(StageKey.critic(0)) if version == 0 else None
    manifests = [required(run, StageKey.policy(version)), *([] if first_critic is None else [first_critic])]
    return [bundle for manifest in manifests for bundle in manifest.bundles.values()]
