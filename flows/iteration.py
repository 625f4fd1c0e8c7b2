"""One iteration: generate and score, compute auxiliary scores and credit, update, and seal during the next
iteration."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor

from flows.controllers import launch
from flows.generation import generate_and_score
from flows.update import update
from tasks.auxiliary import estimate
from tasks.commit import retire_policies, retire_rollouts, seal_iteration
from tasks.credit import assign_credit
from tasks.placement.stage import machines_of_update
from tasks.plan import plan_iteration, plan_next_wave
from tasks.reporting import report_iteration
from tasks.run.batch import Batch
from tasks.run.iteration import Iteration
from tasks.run.session import Session
from tasks.run.stages import within
from tasks.tracking.follow import note_metrics, track_iteration

CLOSE_AFTER_SECONDS = 0.05
"""Delay in seconds before an iteration is sealed, so that pending requests reach the workers before sealing uses the
CPU."""


async def generation(session: Session, number: int) -> None:
    """Generate and score the rollouts of an iteration, wave by wave. Work that is already in the store is not
    repeated."""
    this = Iteration(session.run, number)
    with within(this.key):
        wave: Batch | None = plan_iteration(session, this)
        while wave is not None:
            await generate_and_score(session, wave)
            wave = plan_next_wave(session, this, wave)


async def learning(session: Session, number: int) -> None:
    """Train the policy on the rollouts of an iteration: auxiliary scores, credit and update."""
    this = Iteration(session.run, number)
    with within(this.key):
        async with machines_of_update(session, this):
            await estimate(session, this)
            await assign_credit(session, this)
            await launch(update, session, batch=this.key)


async def closing(session: Session, number: int, thread: Executor) -> None:
    """Seal a trained iteration, delete the policies and rollouts that are now too old, and report the iteration.

    The next iteration runs meanwhile. It does not need the seal, because it continues from the same manifests.
    """
    this = Iteration(session.run, number)
    with within(this.key):
        await session.settled()
        await asyncio.sleep(CLOSE_AFTER_SECONDS)
        await asyncio.get_running_loop().run_in_executor(thread, _seal, session, this)
        await report_iteration(session, number)
        await track_iteration(session, number)


def _seal(session: Session, iteration: Iteration) -> None:
    seal_iteration(session, iteration)
    retire_policies(session, iteration)
    retire_rollouts(session, iteration)
    session.run.forget()
    note_metrics(session.run)


async def generated(beside: asyncio.TaskGroup, session: Session, numbers: Sequence[int]) -> AsyncIterator[int]:
    """Yield the number of each iteration when its rollouts are generated and scored.

    The caller trains on an iteration before it requests the next one. Meanwhile later iterations are generated one
    after another, as far ahead as `rollout.staleness` allows, because their generating policies already exist.
    """

    async def follow(before: "asyncio.Task[None] | None", number: int) -> None:
        if before is not None:
            await before
        await generation(session, number)

    ahead: deque[asyncio.Task[None]] = deque()
    begun: asyncio.Task[None] | None = None
    left = iter(numbers)
    for number in numbers:
        while len(ahead) <= session.settings.rollout.staleness and (following := next(left, None)) is not None:
            begun = beside.create_task(follow(begun, following))
            ahead.append(begun)
        await ahead.popleft()
        yield number
