"""Which workers serve which role: planned before each batch, from measurements. Every decision is in the journal."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from prefect.artifacts import acreate_markdown_artifact
from pydantic import JsonValue

from infra.pools.fleet import Move
from models.records.versions import policy_of
from placement.measurements import Role
from placement.policies.build import build_policy
from placement.records import Decision, DrainInputs, Plan, PlanInputs
from tasks.placement.demand import observed, recalled, rollout_demand, scoring_demand, workers_of
from tasks.run.batch import Batch, BatchPlan
from tasks.run.iteration import Iteration
from tasks.run.keys import artifact_key, reward_model_role
from tasks.run.session import Placing, Session
from tasks.run.stages import stage

logger = logging.getLogger(__name__)

PAST_ITERATIONS = 5
"""Iterations that are read again on resume: measurements forget what is older."""


@stage("place {batch.key}")
async def place_stage(session: Session, batch: Batch) -> Plan:
    """Deal the worker slots for a batch, and have its workers awake with the weights that it names."""
    plan, workers = batch.plan, await (await session.fleet()).look()
    if not session.settings.scoring.hosted_rewards:  # nobody to share with
        await _arrange(session, batch, {"rollout": workers})
        return Plan(mode="split", rollout=workers, scoring=0)
    placing = placing_of(session, before=plan.number + (plan.split == "heldout"))
    inputs = _inputs(session, placing, plan, workers=workers)
    decision = _begun(session, plan, workers=workers)
    if decision is None:
        decision = placing.policy.plan(inputs)
        again = f"-{session.run.epoch:04d}" if session.run.noted(f"placement/{plan.key}/plan") else ""
        note_decision(session, f"placement/{plan.key}/plan{again}", inputs, decision)
    if decision.plan != placing.current:
        logger.info("placement of %s: %s", plan.key, decision.reason)
    placing.current, placing.memory = decision.plan, decision.memory
    await _publish(session, plan, decision)
    turn = "rollout" if decision.plan.mode == "colocated" else None
    await arrange(session, batch, decision.plan, turn=turn)
    placing.began = time.monotonic()  # predictions begin with the first work
    return decision.plan


@stage("turn of {role} {batch.key}")
async def place_turn(session: Session, batch: Batch, role: Role) -> None:
    """Where roles take turns: put the others to sleep, and have this one awake on all slots."""
    placing = session.placing
    assert placing is not None and placing.current is not None, "a turn follows a plan"
    await arrange(session, batch, placing.current, turn=role)


@asynccontextmanager
async def machines_of_update(session: Session, iteration: Iteration) -> AsyncIterator[None]:
    """Have machines for the update: its own, or those of the slots, whose workers are put to sleep meanwhile."""
    if session.settings.pools.update_apart:
        yield
        return
    async with session.slots_taken:
        fleet = await session.fleet()
        started = time.monotonic()
        moves = await fleet.arrange({})
        if moves:
            key = f"placement/{iteration.key}/sleep-{session.run.epoch:04d}"
            session.run.note(key, {"moves": [asdict(move) for move in moves], "seconds": time.monotonic() - started})
        yield


def learn(session: Session, batch: Batch) -> None:
    """Take in what a batch measured, and note how long it took."""
    plan, placing = batch.plan, session.placing
    if placing is None:
        return
    session.run.note(f"placement/{plan.key}/stage", {"seconds": time.monotonic() - placing.began})
    if plan.split == "train":
        placing.measurements = observed(placing.measurements, session.run, plan, stages_of(session))


def placing_of(session: Session, *, before: int) -> Placing:
    """The placement of a run; at first use it is recalled from the store."""
    if session.placing is None:
        placing = Placing(policy=build_policy(session.settings.placement))
        placing.measurements = recalled(session.run, stages_of(session), before=before, iterations=PAST_ITERATIONS)
        batches = Iteration(session.run, before - 1).batches if before > 1 else ()
        last = [decision for batch in batches if (decision := _begun(session, batch.plan)) is not None]
        if last:
            placing.current, placing.memory = last[-1].plan, last[-1].memory
        session.placing = placing
    return session.placing


def stages_of(session: Session) -> dict[str, Role]:
    """Stages whose workers share the slots, and the roles that placement knows them by."""
    judges: dict[str, Role] = {reward_model_role(term): "scoring" for term in session.settings.scoring.hosted_rewards}
    return {"rollout": "rollout", **judges}


async def arrange(session: Session, batch: Batch, dealt: Plan, *, turn: str | None = None) -> tuple[Move, ...]:
    """Have the workers of a plan awake, and note what moving them took."""
    return await _arrange(session, batch, workers_of(session.settings, dealt, turn))


def note_decision(session: Session, key: str, inputs: PlanInputs | DrainInputs, decision: Decision) -> None:
    """Keep a decision with all that it was made from, and by which policy."""
    entry = {"inputs": inputs, "decision": decision, "policy": session.settings.placement}
    session.run.note(key, {name: value.model_dump(mode="json") for name, value in entry.items()})


async def _arrange(session: Session, batch: Batch, workers: dict[str, int]) -> tuple[Move, ...]:
    fleet = await session.fleet()
    take: dict[str, object] = {"rollout": policy_of(batch.policy)}
    for term in session.settings.scoring.hosted_rewards:
        take[reward_model_role(term)] = policy_of(session.reward_model(term))
    started = time.monotonic()
    moves = await fleet.arrange(workers, take={role: take[role] for role in workers})
    for move in moves:
        if move.error is not None:
            logger.warning("slot %d stays with %s: %s", move.slot, move.before, move.error)
    if moves and session.placing is not None:
        key = f"placement/{batch.key}/moves-{session.run.epoch:04d}-{session.placing.arranged:04d}"
        session.placing.arranged += 1
        entry: dict[str, JsonValue] = {"moves": [asdict(move) for move in moves], "seconds": time.monotonic() - started}
        session.run.note(key, entry)
    return moves


def _inputs(session: Session, placing: Placing, plan: BatchPlan, *, workers: int) -> PlanInputs:
    demand = {"shards": plan.num_shards, "completions": completions_of(plan)}
    return PlanInputs(
        workers=workers,
        rollout=rollout_demand(session.settings, placing.measurements, **demand),
        scoring=scoring_demand(session.settings, placing.measurements, **demand),
        resize=placing.measurements.resize(),
        current=placing.current,
        memory=placing.memory,
        seed=plan.number,
    )


def completions_of(plan: BatchPlan) -> int:
    """Completions per shard."""
    return max(1, min(plan.shard_prompts, len(plan.rows))) * plan.group_size


def _begun(session: Session, plan: BatchPlan, *, workers: int | None = None) -> Decision | None:
    """The last decision about a batch, of this process or one before, unless it was about another number of slots."""
    entries = session.run.journal(f"placement/{plan.key}/plan")
    if not entries:
        return None
    entry = entries[max(entries)]  # `plan`, and `plan-0003` where epoch 3 decided again
    if workers not in (None, PlanInputs.model_validate(entry["inputs"]).workers):
        return None
    return Decision.model_validate(entry["decision"])


async def _publish(session: Session, plan: BatchPlan, decision: Decision) -> None:
    """Show the decision with the run in Prefect's UI."""
    dealt = decision.plan
    text = (
        f"**{plan.key}**: {decision.reason}\n\n"
        f"| mode | rollout | scoring | predicted | unchanged |\n|---|---|---|---|---|\n"
        f"| {dealt.mode} | {dealt.rollout} | {dealt.scoring} | {decision.predicted_seconds:.1f} s "
        f"| {decision.unchanged_seconds:.1f} s |\n"
    )
    key = f"{artifact_key(session.run.name)}-placement"
    await acreate_markdown_artifact(text, key=key, description=decision.reason)
