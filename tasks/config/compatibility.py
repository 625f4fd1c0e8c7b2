"""Combinations of algorithm, loss, rollout and engine that cannot do what they say, each refused with its reason.

Each variant tells its own reasons; here are those that no single one of them has.
"""

from collections.abc import Iterator

from models.config.data import DataConfig, PreferencesConfig
from models.config.job import Job, slot_engines
from models.config.objectives import UpdateConfig
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.config.training import DpoConfig


def reasons_against(job: Job) -> Iterator[str]:
    """Yield one line per combination that cannot work; the first is what the user is told."""
    yield from job.algorithm.reasons_against(job)
    yield from job.update.loss.reasons_against(job)
    yield from _against_staleness(job.update, job.rollout)
    yield from job.rollout.engine.reasons_against(job)
    for name, engine, slots in slot_engines(job.rollout, job.scoring):
        yield from engine.reasons_against_place(name, gpus=slots * job.pools.gpus_per_worker, pools=job.pools)


def _against_staleness(update: UpdateConfig, rollout: RolloutConfig) -> Iterator[str]:
    keeps = rollout.dynamic is not None and rollout.dynamic.surplus == "keep"
    if rollout.partial is None and not keeps:
        for name in ("stale_correction", "max_staleness"):
            if getattr(update, name) is not None:
                yield (
                    f"update.{name}: no token is ever stale without rollout.partial or rollout.dynamic.surplus='keep'"
                )


def reasons_against_preferences(
    preferences: PreferencesConfig | None, *, dpo: DpoConfig | None, data: DataConfig, scoring: ScoringConfig
) -> Iterator[str]:
    """Yield one line for each thing that preferences are for and lack, or that lacks them."""
    trained = list(scoring.trained_reward_models)
    if preferences is None:
        for term in trained:
            yield f"reward {term!r}: a trained reward model learns from preferences, set [preferences]"
        if dpo is not None:
            yield "dpo learns from preferences, set [preferences]"
        return
    if dpo is None and not trained:
        yield "preferences: nothing learns from them, set [dpo] or a reward of kind 'model' with model.kind 'trained'"
    if preferences.kind == "arithmetic" and not data.makes_pairs:
        yield (
            f"preferences.kind 'arithmetic' with data.kind {data.known_as!r}: its pairs are made from arithmetic "
            "problems, use preferences.kind 'file'"
        )
