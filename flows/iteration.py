"""Steps of one iteration: generate and score completions, compute auxiliary scores and advantages (credit), and update
the policy. The iteration is sealed (marked as complete) while the next one runs."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor

from rheostat.flows.controllers import run_on_controller
from rheostat.flows.generation import generate_and_score
from rheostat.flows.update import update
from rheostat.tasks.auxiliary import compute_auxiliary_scores
from rheostat.tasks.commit import retire_policies, retire_rollouts, seal_iteration
from rheostat.tasks.credit import assign_credit
from rheostat.tasks.placement.stage import reserve_update_machines
from rheostat.tasks.plan import plan_iteration, plan_next_wave
from rheostat.tasks.reporting import report_iteration
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.stages import tag_tasks
from rheostat.tasks.tracking.follow import track_iteration, update_metrics_file

CLOSE_AFTER_SECONDS = 0.05
"""Delay in seconds before a trained iteration is marked as complete (sealed). Sealing uses the CPU, so the delay lets
pending requests reach the workers first."""


async def generate_iteration(open_run: OpenRun, number: int) -> None:
    """Generate and score the completions of an iteration. More batches are generated until enough groups (the
    completions of one prompt) have unequal rewards. Results that are stored already are not computed again."""
    this = Iteration(open_run.run, number)
    with tag_tasks(this.key):
        wave: Batch | None = plan_iteration(open_run, this)
        while wave is not None:
            await generate_and_score(open_run, wave)
            wave = plan_next_wave(open_run, this, wave)


async def train_iteration(open_run: OpenRun, number: int) -> None:
    """Train the policy on the rollouts of an iteration, in three stages: compute auxiliary scores (such as log-probs of
    a reference model), compute advantages, and update the policy."""
    this = Iteration(open_run.run, number)
    with tag_tasks(this.key):
        async with reserve_update_machines(open_run, this):
            await compute_auxiliary_scores(open_run, this)
            await assign_credit(open_run, this)
            await run_on_controller(update, open_run, batch=this.key)


async def close_iteration(open_run: OpenRun, number: int, thread: Executor) -> None:
    """Mark a trained iteration as complete (seal it), delete policies and rollouts that the retention settings no
    longer keep, and report the iteration's metrics. `thread` executes the writes to the store.

    The next iteration runs meanwhile. It does not need the seal, because it reads the results of the stages directly.
    """
    this = Iteration(open_run.run, number)
    with tag_tasks(this.key):
        await open_run.wait_for_commits()
        await asyncio.sleep(CLOSE_AFTER_SECONDS)
        await asyncio.get_running_loop().run_in_executor(thread, _seal, open_run, this)
        await report_iteration(open_run, number)
        await track_iteration(open_run, number)


def _seal(open_run: OpenRun, iteration: Iteration) -> None:
    seal_iteration(open_run, iteration)
    retire_policies(open_run, iteration)
    retire_rollouts(open_run, iteration)
    open_run.run.delete_pending_copies()
    update_metrics_file(open_run.run)


async def generate_ahead(group: asyncio.TaskGroup, open_run: OpenRun, numbers: Sequence[int]) -> AsyncIterator[int]:
    """Start the generation of rollouts for several iterations ahead of training, and yield the number of each iteration
    when its rollouts are generated and scored.

    The caller trains on an iteration before it requests the next one. Meanwhile later iterations are generated one
    after another, as far ahead as `rollout.staleness` allows, because their generating policies already exist.
    """

    async def follow(before: "asyncio.Task[None] | None", number: int) -> None:
        if before is not None:
            await before
        await generate_iteration(open_run, number)

    ahead: deque[asyncio.Task[None]] = deque()
    newest: asyncio.Task[None] | None = None
    remaining = iter(numbers)
    for number in numbers:
        while len(ahead) <= open_run.settings.rollout.staleness and (following := next(remaining, None)) is not None:
            newest = group.create_task(follow(newest, following))
            ahead.append(newest)
        await ahead.popleft()
        yield number
