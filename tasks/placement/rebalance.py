"""Correct the placement inside a stage: whoever has nothing left to do goes where work waits."""

import asyncio
import logging
import time

from pydantic import JsonValue

from infra.pools.fleet import Fleet
from placement.measurements import Role
from placement.records import DrainInputs, InFlight, Plan, RoleProgress
from tasks.placement.demand import rollout_demand, scoring_demand
from tasks.placement.stage import arrange, completions_of, note_decision, stages_of
from tasks.run.batch import Batch, BatchPlan
from tasks.run.session import Placing, Session

logger = logging.getLogger(__name__)

LEAST_SECONDS = 0.5
"""Between two looks; or a quarter of what a move costs, where that is more."""


async def correct_placement(session: Session, batch: Batch, dealt: Plan) -> None:
    """Watch a stage while it runs, and move workers where the policy says so. Runs until cancelled."""
    placing = session.placing
    if placing is None:
        return
    stage = _Stage(session, placing, batch.plan, await session.fleet(), dealt)
    try:
        while True:
            await asyncio.sleep(max(LEAST_SECONDS, placing.measurements.resize().mean_seconds / 4))
            inputs = stage.inputs()
            stage.queues.append(_depths(inputs))
            if stage.slots_lost():
                stage.moved(dealt, failed=True)
                inputs = stage.inputs()
            if _starved(inputs):
                logger.warning(
                    "placement inside %s: work came back to a role without workers, as planned again", batch.key
                )
                stage.moved(dealt, failed=False)
                await arrange(session, batch, dealt)
            if not session.settings.placement.corrects:
                continue
            decision = placing.policy.drain(inputs)
            placing.memory = decision.memory
            if decision.plan != stage.dealt:
                note_decision(session, stage.next_key("drain"), inputs, decision)
                logger.info("placement inside %s: %s", batch.key, decision.reason)
                moves = await arrange(session, batch, decision.plan)
                stage.moved(decision.plan, failed=any(move.error is not None for move in moves))
    finally:
        if stage.queues:
            session.run.note(stage.next_key("queues"), {"queues": stage.queues})


def _starved(inputs: DrainInputs) -> bool:
    """Whether units wait for a role that has handed all its workers over: one was lost, or its commit failed."""
    return any(role.waiting and not role.slots for role in (inputs.rollout, inputs.scoring))


def _depths(inputs: DrainInputs) -> JsonValue:
    """What waits, runs and serves at a moment, by role."""
    roles = {"rollout": inputs.rollout, "scoring": inputs.scoring}
    depths: dict[str, JsonValue] = {"seconds": round(inputs.elapsed_seconds, 3)}
    for name, role in roles.items():
        depths[name] = {"waiting": role.waiting, "busy": len(role.in_flight), "slots": role.slots, "done": role.done}
    return depths


class _Stage:
    """A stage as it goes: what is left, and which workers have not been moved yet."""

    def __init__(self, session: Session, placing: Placing, plan: BatchPlan, fleet: Fleet, dealt: Plan) -> None:
        self.dealt = dealt
        self._session, self._placing, self._plan, self._fleet = session, placing, plan, fleet
        self._began, self._slots = time.monotonic(), fleet.slots
        self._movable = {"rollout": dealt.rollout, "scoring": dealt.scoring}
        self._noted = 0
        self.queues: list[JsonValue] = []
        self._done_before = {role: load.done for role, load in fleet.load().items()}
        self._units: dict[Role, int] = {"rollout": 0, "scoring": 0}
        for stage, role in stages_of(session).items():
            keys = (plan.shard_key(stage, shard) for shard in range(plan.num_shards))
            self._units[role] += sum(session.run.find(key) is None for key in keys)

    def inputs(self) -> DrainInputs:
        """What the policy is asked with now."""
        return DrainInputs(
            elapsed_seconds=time.monotonic() - self._began,
            workers=self._fleet.slots,
            plan=self.dealt,
            rollout=self._progress("rollout"),
            scoring=self._progress("scoring"),
            movable_rollout=self._movable["rollout"],
            movable_scoring=self._movable["scoring"],
            resize=self._placing.measurements.resize(),
            memory=self._placing.memory,
            seed=self._plan.number,
        )

    def slots_lost(self) -> bool:
        """Whether a machine has been lost since the stage began: the fleet has dealt what is left by itself."""
        return self._fleet.slots < self._slots

    def moved(self, dealt: Plan, *, failed: bool) -> None:
        """Take note of a correction: a worker moves at most once per stage; of one that failed, what is left of it."""
        if failed:
            slots = {role: len(its) for role, its in self._fleet.allocation().items()}
            rollout = slots.pop("rollout")
            dealt = Plan(mode="split", rollout=rollout, scoring=sum(slots.values()))
        self._movable["rollout"] -= max(0, self.dealt.rollout - dealt.rollout)
        self._movable["scoring"] -= max(0, self.dealt.scoring - dealt.scoring)
        self.dealt = dealt

    def next_key(self, what: str) -> str:
        """Name the next entry of the journal; a resumed stage counts anew under its own epoch."""
        self._noted += 1
        return f"placement/{self._plan.key}/{what}-{self._session.run.epoch:04d}-{self._noted:04d}"

    def _progress(self, role: Role) -> RoleProgress:
        stages = [stage for stage, its in stages_of(self._session).items() if its == role]
        all_loads = self._fleet.load()
        loads = [all_loads[stage] for stage in stages]
        demand = (rollout_demand if role == "rollout" else scoring_demand)(
            self._session.settings,
            self._placing.measurements,
            shards=self._plan.num_shards,
            completions=completions_of(self._plan),
        )
        elapsed = [seconds for load in loads for seconds, _ in load.in_flight]
        done = sum(load.done - self._done_before[load.role] for load in loads)
        queued = sum(load.waiting for load in loads)
        unseen = max(0, self._units[role] - queued - len(elapsed) - done)
        # Rollout waits for nobody: units that its flows have not asked for yet are as good as there.
        waiting, coming = (queued + unseen, 0) if role == "rollout" else (queued, unseen)
        return RoleProgress(
            demand=demand,
            slots=self.dealt.rollout if role == "rollout" else self.dealt.scoring,
            waiting=waiting,
            coming=coming,
            in_flight=tuple(InFlight(elapsed_seconds=seconds, sequences=demand.sequences) for seconds in elapsed),
            done=done,
        )
