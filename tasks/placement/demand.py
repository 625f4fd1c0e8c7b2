"""Estimates of the work that generation and scoring require, based on measurements of earlier batches. Placement
decisions use these estimates."""

from collections.abc import Iterator

from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.models.config.engines import EngineSettings
from rheostat.models.config.judges import ServedReward
from rheostat.placement.measurements import Measurements, Prior, Role, UnitObservation
from rheostat.placement.records import Demand, Pace, Plan
from rheostat.placement.slots import assign_replicas, count_min_slots
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.run.batch import BatchPlan
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import reward_model_role


def rollout_demand(settings: RunConfig, measured: Measurements, *, shards: int, completions: int) -> Demand:
    """Estimate the work for generating `shards` shards with `completions` completions each."""
    rollout = settings.rollout
    prior = _prior(rollout.engine, max_tokens=rollout.sampling.max_new_tokens)
    return measured.demand("rollout", units=shards, sequences=completions, prior=prior)


def scoring_demand(settings: RunConfig, measured: Measurements, *, shards: int, completions: int) -> Demand:
    """Estimate the work for scoring that many completions per shard, summed over all reward models in worker slots.
    The result is zero work if there are none."""
    local = settings.scoring.hosted_rewards
    if not local:
        return measured.demand("scoring", units=0, sequences=0)
    slots = {term: reward.slots for term, reward in local.items()}
    answers = sum(reward.votes for reward in local.values())
    return measured.demand(
        "scoring",
        units=shards * len(local),
        sequences=max(1, round(completions * answers / len(local))),
        slots=max(1, round(sum(slots.values()) / len(local))),
        min_slots=count_min_slots(slots, fixed=settings.placement.replicas),
        prior=_served_prior(next(iter(local.values()))),
    )


def workers_per_role(settings: RunConfig, plan: Plan, turn: str | None) -> dict[str, int]:
    """Return the number of workers that a plan assigns to each role. If the roles take turns, only the role `turn` has
    workers."""
    terms = {term: reward.slots for term, reward in settings.scoring.hosted_rewards.items()}
    workers: dict[str, int] = {}
    if turn in (None, "rollout"):
        workers["rollout"] = plan.rollout
    if turn in (None, "scoring") and terms:
        replicas = assign_replicas(plan.scoring, terms, fixed=settings.placement.replicas)
        workers |= {reward_model_role(term): count for term, count in replicas.items()}
    return workers


def _served_prior(reward: ServedReward) -> Prior:
    if reward.engine is None or not reward.generates_text:
        return Prior(median_tokens=1, sigma=0, max_tokens=1)
    return _prior(reward.engine, max_tokens=reward.sampling.max_new_tokens)


def _prior(engine: EngineSettings, *, max_tokens: int) -> Prior:
    """Return the expected completion length and speed before the first measurement: the engine's known values, or half
    of the maximum length."""
    known = engine.known_pace()
    if known is None:
        return Prior(median_tokens=max(1.0, max_tokens / 2), max_tokens=max_tokens)
    pace = Pace(
        base_seconds=known.base_seconds,
        per_sequence_seconds=known.per_sequence_seconds,
        setup_seconds=known.setup_seconds,
    )
    return Prior(median_tokens=known.median_tokens, sigma=known.sigma, max_tokens=max_tokens, pace=pace)


STEPS = ("steps", "step_sequences", "step_sequences_squared", "step_seconds", "step_sequence_seconds")

LOADING = "load"


def add_observations(measured: Measurements, run: Run, plan: BatchPlan, stages: dict[str, Role]) -> Measurements:
    """Return the measurements together with those of a finished batch. `stages` maps each stage of the batch that
    uses worker slots to a role."""
    return measured.observe(_observe_units(run, plan, stages), moves=_move_seconds(run, plan))


def read_measurements(run: Run, stages: dict[str, Role], *, before: int, iterations: int) -> Measurements:
    """Return the measurements of the last `iterations` iterations before iteration `before`.

    Iterations that are not stored are skipped.
    """
    measured = Measurements()
    for number in range(max(1, before - iterations), before):
        for batch in Iteration(run, number).batches:
            measured = add_observations(measured, run, batch.plan, stages)
    return measured


def _observe_units(run: Run, plan: BatchPlan, stages: dict[str, Role]) -> Iterator[UnitObservation]:
    for stage, role in stages.items():
        for shard in range(plan.num_shards):
            manifest = run.find(plan.shard_key(stage, shard))
            if manifest is not None:
                yield _observe_unit(manifest, role)


def _observe_unit(manifest: Manifest, role: Role) -> UnitObservation:
    seconds, lengths = manifest.provenance.seconds, manifest.detail.get("lengths", [])
    assert isinstance(lengths, list)
    return UnitObservation(
        role=role,
        sequences=int(manifest.metrics["sequences"]),
        seconds=seconds["worker"] - seconds.get(LOADING, 0.0),
        lengths=tuple(float(str(length)) for length in lengths),
        **{name: seconds.get(name, 0.0) for name in STEPS},
    )


def _move_seconds(run: Run, plan: BatchPlan) -> Iterator[float]:
    """Yield the seconds of each move of a worker slot from one role to another during a batch. The start of a new
    worker process is not counted, because each process starts only once."""
    for entry in run.journal(f"placement/{plan.key}/moves").values():
        moves = entry["moves"]
        assert isinstance(moves, list)
        for move in moves:
            assert isinstance(move, dict)
            if move["how"] == "wake" and move["error"] is None:
                yield float(str(move["seconds"]))
