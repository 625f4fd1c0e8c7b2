"""Flow that trains a run again without some prompts, from the last version that had not used them."""

import asyncio

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact

from rheostat.flows.train import train
from rheostat.infra.store.runs import open_run
from rheostat.tasks.forks.creation import create_fork
from rheostat.tasks.forks.unlearning import (
    Unlearned,
    read_unlearned,
    record_retraining,
    remove_unlearned,
    request_unlearning,
)
from rheostat.tasks.preparation import check_inputs
from rheostat.tasks.run.keys import artifact_key
from rheostat.tasks.run.preflight import is_checked, mark_as_checked


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
    iterations before are shared. If the flow is started again, it continues.

    Args:
        run: Run that learned from the prompts.
        name: Name of the new run.
        prompt_ids: Ids of the prompts.
        overrides: Other settings that differ, such as `iterations=30`.
        store: Store that contains the run.
        forget: Afterwards, also remove the prompts and their completions from all runs that share rollouts with these.
        accept_change: Continue even if reward code or library versions have changed since the new run was created.
    """
    ids = frozenset(prompt_ids)
    unlearned = await asyncio.to_thread(read_unlearned, store, name)
    if unlearned is None:
        planned = await asyncio.to_thread(request_unlearning, store, run, name, ids, overrides=overrides or [])
        if not is_checked():
            await check_inputs(planned.fork.config)
        await asyncio.to_thread(create_fork, planned.fork)
        with mark_as_checked():
            await train(planned.fork.config, accept_change=accept_change)
        unlearned = await asyncio.to_thread(_record, store, name, ids)
    if forget and unlearned.tombstones is None:
        unlearned = await asyncio.to_thread(remove_unlearned, store, unlearned)
    text = f"# Unlearned prompts in run {name}\n\n```text\n{unlearned.text()}\n```"
    await acreate_markdown_artifact(text, key=f"{artifact_key(name)}-unlearned", description="Record")
    return unlearned


def _record(store: str, name: str, ids: frozenset[str]) -> Unlearned:
    with open_run(store, name).lock() as locked_run:
        return record_retraining(locked_run, ids)
