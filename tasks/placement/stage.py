"""Placement: the assignment of workers to roles. It is planned before each batch from measurements, and corrected
inside a stage.

A correction moves idle workers to the role whose work is waiting. Every decision is recorded in the journal.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from prefect.artifacts import acreate_markdown_artifact
from pydantic import JsonValue

from rheostat.infra.pools.fleet import Fleet
from rheostat.infra.pools.moves import Move
from rheostat.models.records.versions import policy_of
from rheostat.placement.measurements import Role
from rheostat.placement.policies.build import build_policy
from rheostat.placement.records import Decision, DrainInputs, InFlight, Plan, PlanInputs, RoleProgress
from rheostat.tasks.config.gpus import gpu_layout
from rheostat.tasks.placement.demand import (
    add_observations,
    read_measurements,
    rollout_demand,
    scoring_demand,
    workers_per_role,
)
from rheostat.tasks.run.batch import Batch, BatchPlan
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import artifact_key, reward_model_role
from rheostat.tasks.run.open_run import OpenRun, PlacementState
from rheostat.tasks.run.stages import stage

logger = logging.getLogger(__name__)

PAST_ITERATIONS = 5
"""Number of iterations whose measurements are read on resume. Older measurements have no effect."""


async def place_stage(open_run: OpenRun, batch: Batch) -> Plan:
    """Assign the worker slots for a batch, and wake the workers with the weights that the batch names.

    Runs as a Prefect task if several roles share the slots. If only rollout uses the slots, it gets all of them.
    """
    workers = await (await open_run.get_fleet()).check_slots()
    if open_run.settings.scoring.hosted_rewards:
        return await _decide_placement(open_run, batch, workers)
    await _arrange(open_run, batch, {"rollout": workers})
    return Plan(mode="split", rollout=workers, scoring=0)


@stage("place {batch.key}")
async def _decide_placement(open_run: OpenRun, batch: Batch, workers: int) -> Plan:
    plan = batch.plan
    placement_state = get_placement(open_run, before=plan.number + (plan.split == "heldout"))
    inputs = _plan_inputs(open_run, placement_state, plan, workers=workers)
    decision = _last_decision(open_run, plan, workers=workers)
    if decision is None:
        decision = placement_state.policy.plan(inputs)
        again = f"-{open_run.run.epoch:04d}" if open_run.run.find_entry(f"placement/{plan.key}/plan") else ""
        record_decision(open_run, f"placement/{plan.key}/plan{again}", inputs, decision)
    if decision.plan != placement_state.current_plan:
        logger.info("placement of %s: %s", plan.key, decision.reason)
    placement_state.current_plan, placement_state.memory = decision.plan, decision.memory
    await _publish_decision(open_run, plan, decision)
    turn = "rollout" if decision.plan.mode == "colocated" else None
    await arrange(open_run, batch, decision.plan, turn=turn)
    placement_state.stage_start_time = time.monotonic()  # predicted times start with the first work
    return decision.plan


@stage("turn of {role} {batch.key}")
async def give_slots_to(open_run: OpenRun, batch: Batch, role: Role) -> None:
    """Give all slots to one role, and put the workers of the other roles to sleep. Used if roles take turns."""
    placement_state = open_run.placement
    assert placement_state is not None and placement_state.current_plan is not None, "a turn follows a plan"
    await arrange(open_run, batch, placement_state.current_plan, turn=role)


async def give_slots_to_scoring(open_run: OpenRun, batch: Batch) -> None:
    """Give all slots to the reward models that use slots, for a batch whose completions are stored already."""
    if open_run.settings.scoring.hosted_rewards:
        slots = await (await open_run.get_fleet()).check_slots()
        await arrange(open_run, batch, Plan(mode="colocated", rollout=slots, scoring=slots), turn="scoring")


async def place_single_role(open_run: OpenRun, batch: Batch, role: Role) -> None:
    """Wake the workers of one role for a batch. Used if this process runs no other role."""
    if role == "rollout" or open_run.settings.scoring.hosted_rewards:
        plan = await place_stage(open_run, batch)
        if role == "scoring" and plan.mode == "colocated":
            await give_slots_to(open_run, batch, role)


@asynccontextmanager
async def reserve_update_machines(open_run: OpenRun, iteration: Iteration) -> AsyncIterator[None]:
    """Run the block with machines reserved for the update. These are separate machines, or the machines of the worker
    slots, whose workers sleep during the update."""
    if open_run.settings.pools.dedicated_update_resources:
        yield
        return
    async with open_run.slots_lock:
        fleet = await open_run.get_fleet()
        started = time.monotonic()
        moves = await fleet.arrange({})
        if moves:
            key = f"placement/{iteration.key}/sleep-{open_run.run.epoch:04d}"
            open_run.run.write_entry(
                key, {"moves": [asdict(move) for move in moves], "seconds": time.monotonic() - started}
            )
        yield


@asynccontextmanager
async def reserve_shared_gpus(open_run: OpenRun) -> AsyncIterator[None]:
    """Run the block, which trains on the update ranks outside an iteration. If the ranks use the GPUs of the worker
    slots, the workers sleep meanwhile."""
    if not gpu_layout(open_run.settings).shares_gpus:
        yield
        return
    async with open_run.slots_lock:
        await (await open_run.get_fleet()).arrange({})
        yield


def record_measurements(open_run: OpenRun, batch: Batch) -> None:
    """Add the measured durations of a finished training batch to the measurements for placement decisions, and write
    the duration of any batch to the journal."""
    plan, placement_state = batch.plan, open_run.placement
    if placement_state is None:
        return
    open_run.run.write_entry(
        f"placement/{plan.key}/stage", {"seconds": time.monotonic() - placement_state.stage_start_time}
    )
    if plan.split == "train":
        placement_state.measurements = add_observations(
            placement_state.measurements, open_run.run, plan, stages_of(open_run)
        )


def get_placement(open_run: OpenRun, *, before: int) -> PlacementState:
    """Return the state with which placement decisions are made: current plan, measurements and policy. The first
    call reads earlier measurements from the store."""
    if open_run.placement is None:
        placement_state = PlacementState(policy=build_policy(open_run.settings.placement))
        placement_state.measurements = read_measurements(
            open_run.run, stages_of(open_run), before=before, iterations=PAST_ITERATIONS
        )
        batches = Iteration(open_run.run, before - 1).batches if before > 1 else ()
        last = [decision for batch in batches if (decision := _last_decision(open_run, batch.plan)) is not None]
        if last:
            placement_state.current_plan, placement_state.memory = last[-1].plan, last[-1].memory
        open_run.placement = placement_state
    return open_run.placement


def stages_of(open_run: OpenRun) -> dict[str, Role]:
    """Return the stages whose workers share the slots, each with its placement role: "rollout" or "scoring"."""
    judges: dict[str, Role] = {reward_model_role(term): "scoring" for term in open_run.settings.scoring.hosted_rewards}
    return {"rollout": "rollout", **judges}


async def arrange(open_run: OpenRun, batch: Batch, plan: Plan, *, turn: str | None = None) -> tuple[Move, ...]:
    """Wake the workers that a plan assigns to a batch, and record in the journal how long each worker took to wake."""
    return await _arrange(open_run, batch, workers_per_role(open_run.settings, plan, turn))


def record_decision(open_run: OpenRun, key: str, inputs: PlanInputs | DrainInputs, decision: Decision) -> None:
    """Record a placement decision in the journal, with the numbers and settings that it was based on."""
    entry = {"inputs": inputs, "decision": decision, "policy": open_run.settings.placement}
    open_run.run.write_entry(key, {name: value.model_dump(mode="json") for name, value in entry.items()})


async def _arrange(open_run: OpenRun, batch: Batch, workers: dict[str, int]) -> tuple[Move, ...]:
    fleet = await open_run.get_fleet()
    take: dict[str, object] = {"rollout": policy_of(batch.policy)} if "rollout" in workers else {}
    for term in open_run.settings.scoring.hosted_rewards:
        take[reward_model_role(term)] = policy_of(open_run.reward_model(term))
    started = time.monotonic()
    moves = await fleet.arrange(workers, take={role: take[role] for role in workers})
    for move in moves:
        if move.error is not None:
            logger.warning("worker slot %d keeps role %s: %s", move.slot, move.before, move.error)
    if moves and open_run.placement is not None:
        key = f"placement/{batch.key}/moves-{open_run.run.epoch:04d}-{open_run.placement.num_moves:04d}"
        open_run.placement.num_moves += 1
        entry: dict[str, JsonValue] = {"moves": [asdict(move) for move in moves], "seconds": time.monotonic() - started}
        open_run.run.write_entry(key, entry)
    return moves


def _plan_inputs(open_run: OpenRun, placement_state: PlacementState, plan: BatchPlan, *, workers: int) -> PlanInputs:
    demand = {"shards": plan.num_shards, "completions": completions_per_shard(plan)}
    return PlanInputs(
        workers=workers,
        rollout=rollout_demand(open_run.settings, placement_state.measurements, **demand),
        scoring=scoring_demand(open_run.settings, placement_state.measurements, **demand),
        resize=placement_state.measurements.resize(),
        current=placement_state.current_plan,
        memory=placement_state.memory,
        seed=plan.number,
    )


def completions_per_shard(plan: BatchPlan) -> int:
    """Return the number of completions per shard."""
    return max(1, min(plan.shard_prompts, len(plan.rows))) * plan.group_size


def _last_decision(open_run: OpenRun, plan: BatchPlan, *, workers: int | None = None) -> Decision | None:
    """Return the last placement decision for a batch, made by this or an earlier process. Return None if no decision
    was made for this number of slots."""
    entries = open_run.run.journal(f"placement/{plan.key}/plan")
    if not entries:
        return None
    entry = entries[max(entries)]  # `plan`, or for example `plan-0003` if epoch 3 decided again
    if workers not in (None, PlanInputs.model_validate(entry["inputs"]).workers):
        return None
    return Decision.model_validate(entry["decision"])


async def _publish_decision(open_run: OpenRun, plan: BatchPlan, decision: Decision) -> None:
    """Show a placement decision with its predicted duration as an artifact in Prefect's UI."""
    placement = decision.plan
    text = (
        f"**{plan.key}**: {decision.reason}\n\n"
        f"| mode | rollout slots | scoring slots | predicted | without change |\n|---|---|---|---|---|\n"
        f"| {placement.mode} | {placement.rollout} | {placement.scoring} | {decision.predicted_seconds:.1f} s "
        f"| {decision.unchanged_seconds:.1f} s |\n"
    )
    key = f"{artifact_key(open_run.run.name)}-placement"
    await acreate_markdown_artifact(text, key=key, description=decision.reason)


MIN_CHECK_SECONDS = 0.5
"""Minimum interval in seconds between two checks of a stage. The interval is a quarter of the cost of a move if that is
more."""


async def correct_placement(open_run: OpenRun, batch: Batch, planned: Plan) -> None:
    """Watch a running stage, and move workers when the placement policy decides so. Runs until canceled."""
    placement_state = open_run.placement
    if placement_state is None:
        return
    stage = _Stage(open_run, placement_state, batch.plan, await open_run.get_fleet(), planned)
    try:
        while True:
            await asyncio.sleep(max(MIN_CHECK_SECONDS, placement_state.measurements.resize().mean_seconds / 4))
            inputs = stage.inputs()
            stage.queues.append(_queue_depths(inputs))
            if stage.slots_lost():
                stage.moved(planned, failed=True)
                inputs = stage.inputs()
            if _is_starved(inputs):
                logger.warning(
                    "placement during %s: a role without workers has work again, so the plan is restored", batch.key
                )
                stage.moved(planned, failed=False)
                await arrange(open_run, batch, planned)
            if not open_run.settings.placement.can_move_workers:
                continue
            decision = placement_state.policy.drain(inputs)
            placement_state.memory = decision.memory
            if decision.plan != stage.dealt:
                record_decision(open_run, stage.next_key("drain"), inputs, decision)
                logger.info("placement during %s: %s", batch.key, decision.reason)
                moves = await arrange(open_run, batch, decision.plan)
                stage.moved(decision.plan, failed=any(move.error is not None for move in moves))
    finally:
        if stage.queues:
            open_run.run.write_entry(stage.next_key("queues"), {"queues": stage.queues})


def _is_starved(inputs: DrainInputs) -> bool:
    """Return whether work waits for a role that has no workers left, for example because a worker was lost or its
    commit failed."""
    return any(role.waiting and not role.slots for role in (inputs.rollout, inputs.scoring))


def _queue_depths(inputs: DrainInputs) -> JsonValue:
    """Return the numbers of waiting, running and finished work units and of slots for each role, for the journal."""
    roles = {"rollout": inputs.rollout, "scoring": inputs.scoring}
    depths: dict[str, JsonValue] = {"seconds": round(inputs.elapsed_seconds, 3)}
    for name, role in roles.items():
        depths[name] = {"waiting": role.waiting, "busy": len(role.in_flight), "slots": role.slots, "done": role.done}
    return depths


class _Stage:
    """State of a running stage, for placement decisions: the remaining work, and the workers that may still move to
    another role."""

    def __init__(
        self, open_run: OpenRun, placement_state: PlacementState, plan: BatchPlan, fleet: Fleet, planned: Plan
    ) -> None:
        self.dealt = planned
        self._open_run, self._placement_state, self._plan, self._fleet = open_run, placement_state, plan, fleet
        self._began, self._slots = time.monotonic(), fleet.slots
        self._movable = {"rollout": planned.rollout, "scoring": planned.scoring}
        self._noted = 0
        self.queues: list[JsonValue] = []
        self._done_before = {role: load.done for role, load in fleet.load().items()}
        self._units: dict[Role, int] = {"rollout": 0, "scoring": 0}
        for name, role in stages_of(open_run).items():
            keys = (plan.shard_key(name, shard) for shard in range(plan.num_shards))
            self._units[role] += sum(open_run.run.find(key) is None for key in keys)

    def inputs(self) -> DrainInputs:
        """Return the current numbers from which the placement policy decides whether to move workers."""
        return DrainInputs(
            elapsed_seconds=time.monotonic() - self._began,
            workers=self._fleet.slots,
            plan=self.dealt,
            rollout=self._progress("rollout"),
            scoring=self._progress("scoring"),
            movable_rollout=self._movable["rollout"],
            movable_scoring=self._movable["scoring"],
            resize=self._placement_state.measurements.resize(),
            memory=self._placement_state.memory,
            seed=self._plan.number,
        )

    def slots_lost(self) -> bool:
        """Return whether a machine was lost since the stage began. The fleet then reassigns the remaining slots
        itself."""
        return self._fleet.slots < self._slots

    def moved(self, plan: Plan, *, failed: bool) -> None:
        """Record that workers were moved according to `plan`. Each worker moves at most once per stage. If a move
        failed, the actual assignment of the slots is recorded instead."""
        if failed:
            slots = {role: len(workers) for role, workers in self._fleet.allocation().items()}
            rollout = slots.pop("rollout")
            plan = Plan(mode="split", rollout=rollout, scoring=sum(slots.values()))
        self._movable["rollout"] -= max(0, self.dealt.rollout - plan.rollout)
        self._movable["scoring"] -= max(0, self.dealt.scoring - plan.scoring)
        self.dealt = plan

    def next_key(self, what: str) -> str:
        """Return the key of the next journal entry. Numbering restarts at 1 if another process resumes the stage."""
        self._noted += 1
        return f"placement/{self._plan.key}/{what}-{self._open_run.run.epoch:04d}-{self._noted:04d}"

    def _progress(self, role: Role) -> RoleProgress:
        stages = [stage for stage, stage_role in stages_of(self._open_run).items() if stage_role == role]
        all_loads = self._fleet.load()
        loads = [all_loads[stage] for stage in stages]
        demand = (rollout_demand if role == "rollout" else scoring_demand)(
            self._open_run.settings,
            self._placement_state.measurements,
            shards=self._plan.num_shards,
            completions=completions_per_shard(self._plan),
        )
        elapsed = [seconds for load in loads for seconds, _ in load.in_flight]
        done = sum(load.done - self._done_before[load.role] for load in loads)
        queued = sum(load.waiting for load in loads)
        num_pending = max(0, self._units[role] - queued - len(elapsed) - done)
        # Rollout waits for no other stage, so units that are not requested yet count as waiting.
        waiting, coming = (queued + num_pending, 0) if role == "rollout" else (queued, num_pending)
        return RoleProgress(
            demand=demand,
            slots=self.dealt.rollout if role == "rollout" else self.dealt.scoring,
            waiting=waiting,
            coming=coming,
            in_flight=tuple(InFlight(elapsed_seconds=seconds, sequences=demand.sequences) for seconds in elapsed),
            done=done,
        )
