"""Flow that trains a run again without some prompts, from the last version that had not used them."""

import asyncio

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact

from rheostat.flows.train import train
from rheostat.infra.store.runs import open_run
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.forks.creation import create_fork
from rheostat.tasks.forks.unlearning import (
    Unlearned,
    read_unlearned,
    record_retraining,
    remove_unlearned,
    request_unlearning,
)
from rheostat.tasks.preparation import check_and_adapt
from rheostat.tasks.reporting import delete_published_completions
from rheostat.tasks.run.keys import artifact_key
from rheostat.tasks.run.preflight import mark_as_checked


@flow(name="unlearn", flow_run_name="{name}", validate_parameters=True)
async def unlearn(
    run: str,
    name: str,
    prompt_ids: list[str],
    overrides: list[str] | None = None,
    store: str = "./runs",
    forget: bool = False,
    accept_change: bool = False,
) -> Unlearned:
    """Train a run again from the last stored policy that had not learned from some prompts, without these prompts. The
    iterations before are shared. If the flow is started again with the same arguments, it continues.

    Args:
        run: Run that learned from the prompts.
        name: Name of the new run.
        prompt_ids: Ids of the prompts.
        overrides: Other settings that differ, such as `iterations=30`.
        store: Store that contains the run.
        forget: Afterwards, also remove the prompts and their completions from all runs that share rollouts with these.
        accept_change: Continue even if reward code or library versions have changed since the new run was created.
    """
    ids, words = frozenset(prompt_ids), overrides or []
    unlearned = await asyncio.to_thread(read_unlearned, store, name, parent=run, ids=ids, overrides=words)
    if unlearned is None:
        planned = await asyncio.to_thread(request_unlearning, store, run, name, ids, overrides=words)
        config = await check_and_adapt(planned.fork.config)
        await asyncio.to_thread(create_fork, planned.fork)
        with mark_as_checked():
            unlearned = await train_without_prompts(config, prompt_ids, accept_change=accept_change)
    if forget and unlearned.tombstones is None:
        unlearned = await remove_prompts(unlearned, store=store)
    return unlearned


@flow(name="train without prompts", flow_run_name="{config.name}", validate_parameters=True)
async def train_without_prompts(config: RunConfig, prompt_ids: list[str], accept_change: bool = False) -> Unlearned:
    """Train a fork that excludes some prompts, record what it shares, and publish the record in Prefect.

    Args:
        config: Configuration of the fork, which exists.
        prompt_ids: Ids of the prompts.
        accept_change: Continue even if reward code or library versions have changed since the fork was created.
    """
    await train(config, accept_change=accept_change)
    unlearned = await asyncio.to_thread(_record, config.store, config.name, frozenset(prompt_ids))
    await _publish(unlearned)
    return unlearned


@flow(name="remove prompts", flow_run_name="{unlearned.run}", validate_parameters=True)
async def remove_prompts(unlearned: Unlearned, store: str = "./runs") -> Unlearned:
    """Remove unlearned prompts and their completions from all runs that share rollouts with the new run or its parent,
    and from the pages of these runs in Prefect. Record the tombstones.

    Args:
        unlearned: Record of the unlearning.
        store: Store that contains the runs.
    """
    removed = await asyncio.to_thread(remove_unlearned, store, unlearned)
    for name in removed.tombstones or {}:
        await delete_published_completions(name)
    await _publish(removed)
    return removed


def _record(store: str, name: str, ids: frozenset[str]) -> Unlearned:
    with open_run(store, name).lock() as locked_run:
        return record_retraining(locked_run, ids)


async def _publish(unlearned: Unlearned) -> None:
    text = f"# Unlearned prompts in run {unlearned.run}\n\n```text\n{unlearned.text()}\n```"
    await acreate_markdown_artifact(text, key=f"{artifact_key(unlearned.run)}-unlearned", description="Record")
