"""Opening of runs: locking a run for this process, and joining a run that another process holds.

The holder of a run is the process that has locked it. Controllers in other processes join the run.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final, cast

from prefect import tags
from prefect.blocks.system import Secret
from prefect.client.schemas.objects import State
from prefect.states import Crashed
from pydantic import JsonValue, TypeAdapter, ValidationError

from rheostat.flows.controllers import open_controllers, serve_requests
from rheostat.flows.prefect_states import install_state_handling
from rheostat.infra.errors import BadInput, HolderLost, first_cause
from rheostat.infra.former_names import PACKAGE
from rheostat.infra.store.chain import linked_parts
from rheostat.infra.store.dependencies import check_dependencies, record_dependencies, recorded_commits, recorded_config
from rheostat.infra.store.garbage import tag_run
from rheostat.infra.store.inputs import PathNames
from rheostat.infra.store.run_record import has_results
from rheostat.infra.store.runs import create_run
from rheostat.infra.store.runs import open_run as open_stored_run
from rheostat.infra.untrusted_text import log_visibly
from rheostat.placement.measurements import Role
from rheostat.tasks.config.run import RunConfig, parse_config
from rheostat.tasks.events import emit_of_run
from rheostat.tasks.placement.stage import place_single_role
from rheostat.tasks.preparation import check_inputs, check_rewards
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.dependencies import dependencies_of, find_matching_run, next_iteration, recorded_layout
from rheostat.tasks.run.hub_inputs import fetch_hub_inputs, with_base_commits
from rheostat.tasks.run.open_run import OpenRun, RunRef, get_open_run, is_open, open_with_workers
from rheostat.tasks.run.preflight import is_checked, with_data_sized_defaults, with_recorded_defaults
from rheostat.tasks.run.stages import commit_pending_results, tag_tasks
from rheostat.tasks.run.work_queue import Shards

logger = logging.getLogger(__name__)

SECRETS_VARIABLE: Final = "RHEOSTAT_SECRETS"
"""Name of the environment variable that lists Prefect Secret blocks, separated by commas. The blocks contain keys, such
as API keys, for deployed flows."""
_VALUES: Final = TypeAdapter(dict[str, str])

BatchWork = Callable[[OpenRun, Batch, Sequence[int]], Awaitable[object]]
"""Function that does the work of one role, such as scoring, for some shards of a batch."""


@asynccontextmanager
async def lock_run(
    config: RunConfig, *, scope: RunConfig | None = None, accept_change: bool = False, final_key: str | None = None
) -> AsyncIterator[OpenRun]:
    """Create the configured run or open the existing one, lock it for this process, and start its worker pools. Yields
    the open run.

    `scope` is the configuration that the open run uses if it needs less than the whole run. With `accept_change` the
    run continues with the current code, data and libraries. `final_key` is the key of the last result of the run. If
    the run is already finished up to this result, no cluster is started. Raises BadInput before anything is written,
    RunLocked if another process has locked the run, RunChanged if the run was created with another configuration.
    """
    await _prepare_process()
    with tags(config.name, *config.tags):
        config = with_recorded_defaults(config)
        if not is_checked():  # the command line checks the inputs before it starts a flow
            result = await check_inputs(config)
            config, adaptations = with_data_sized_defaults(config, result.facts)
            for line in (*result.notes, *adaptations):
                logger.info("%s", line)
        if config.controllers.where == "deployment":
            # Queues are in the processes of the controllers, so the placement cannot be corrected during a stage.
            config = config.model_copy(update={"placement": config.placement.without_moves()})
        await asyncio.to_thread(fetch_hub_inputs, config)
        existing = find_matching_run(config, accept_change=accept_change)
        dependencies = dependencies_of(config, existing)
        run = existing or create_run(config.store, config.name, config.identity())
        with run.lock(sole_writer=config.controllers.where == "nested"):
            await asyncio.to_thread(commit_pending_results, run)
            record_dependencies(
                run,
                dependencies,
                iteration=next_iteration(run),
                folder=PathNames(config).folder,
                accept_change=accept_change or not has_results(run.store),
            )
            tag_run(run, config.tags)
            is_finished = final_key in linked_parts(run)
            opening = open_with_workers(
                run, scope or config, store=config.store, preloads_all_roles=True, is_finished=is_finished
            )
            async with opening as open_run, open_controllers(open_run):
                with _report_run(open_run):
                    yield open_run


@contextmanager
def _report_run(open_run: OpenRun) -> Iterator[None]:
    """Send Prefect an event that the run has started, run the block, and send an event that says how the run ended."""
    run = open_run.run
    emit_of_run(run.name, "run.started", iterations=next_iteration(run) - 1)
    outcome = "stopped"
    try:
        yield
        outcome = "done"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
        raise
    finally:
        emit_of_run(run.name, "run.ended", how=outcome)


@asynccontextmanager
async def reopen_run(config: RunConfig, *, has_new_rewards: bool = False) -> AsyncIterator[OpenRun]:
    """Lock an existing run and open it with the settings in `config`, to compute new scores or advantages from its
    stored rollouts. The configuration that is stored with the run does not change. Yields the open run.

    Set `has_new_rewards` if the rewards in `config` were not checked when the run began. Raises BadInput if a new
    reward cannot be computed, and RunLocked if another process holds the run.
    """
    await _prepare_process()
    run = open_stored_run(config.store, config.name)
    with tags(config.name), run.lock():
        if has_new_rewards and not is_checked():
            await check_rewards(config)
        async with open_with_workers(run, config, store=config.store) as open_run:
            yield open_run


@asynccontextmanager
async def join_run(ref: RunRef) -> AsyncIterator[OpenRun]:
    """Open the run for a controller (a flow that performs one role), and yield it. If this process has already opened
    the run, the open run is shared. Otherwise this process joins the run that another process has locked.

    If several tasks of a controller fail together, the first cause is raised, and its message is shown in the flow's
    state.
    """
    try:
        async with _join(ref) as open_run:
            yield open_run
    except BaseExceptionGroup as several:
        raise first_cause(several) from several


async def run_controller(
    run: RunRef, batch: str | None, *, work: BatchWork, slots: Role | None = None
) -> int | State[int]:
    """Do the work of one role for a single batch, or for all requests of the process that has locked the run if `batch`
    is None. `work` is the function that does the work for some shards of a batch. Return the number of processed
    batches.

    `slots` is the role whose workers use the worker slots. If a single batch is requested and no process has locked the
    run, this function assigns the slots. If the controller no longer receives messages, the flow run ends as crashed,
    and the process that has locked the run starts a successor if it is still alive. Raises BadInput if no batch is
    given and no process has locked the run.
    """
    if batch is None and run.epoch is None and not is_open(run):
        raise BadInput(
            "The parameter `batch` is missing. Only the process that trains the run may start a controller without "
            "it. To start a controller yourself, set it to the name of a batch such as it-0003."
        )
    try:
        async with join_run(run) as open_run:
            run_batch = partial(_carry_out, open_run, work)
            if batch is None:
                return await serve_requests(open_run, run_batch)
            if slots is not None and run.epoch is None:
                await place_single_role(open_run, Batch.read(open_run.run, batch), slots)
            await run_batch(batch, None)
            return 1
    except HolderLost as lost:
        return Crashed(message=f"{type(lost).__name__}: {lost}")


async def _carry_out(open_run: OpenRun, work: BatchWork, batch: str, shards: Shards) -> None:
    """Call `work`, which does the work of one role, for some shards of a planned batch, or for all shards if `shards`
    is None. `batch` is the key of the batch."""
    planned = Batch.read(open_run.run, batch)
    with tag_tasks(batch):
        await work(open_run, planned, planned.shards if shards is None else shards)


@asynccontextmanager
async def _join(ref: RunRef) -> AsyncIterator[OpenRun]:
    if is_open(ref):
        yield get_open_run(ref)
        return
    await _prepare_process()
    run = open_stored_run(ref.store, ref.name)
    document = {**recorded_config(run), "name": ref.name, "store": ref.store}
    config = parse_config(document, source=f"run {ref.name}", recorded=True)
    overrides = {"pools": ref.pools, "controllers": ref.controllers}
    config = config.model_copy(update={name: part for name, part in overrides.items() if part is not None})
    config = config.with_layout(recorded_layout(run))
    config = with_base_commits(config, recorded_commits(run), resolves=False)
    with tags(ref.name):
        if ref.epoch is None:
            check_dependencies(run, dependencies_of(config, run))
            with run.lock():
                async with open_with_workers(run, config, store=ref.store) as open_run:
                    yield open_run
        else:
            run = run.join(ref.epoch)
            run.check_lease()
            async with open_with_workers(run, config, store=ref.store, cluster_address=ref.cluster) as open_run:
                yield open_run


async def _prepare_process() -> None:
    """Prepare this process for running flows: set up error handling and logging, and load keys from Prefect's Secret
    blocks."""
    install_state_handling()
    log_visibly("prefect", PACKAGE)
    await _load_secrets()
    logging.getLogger(PACKAGE).setLevel(logging.INFO)


async def _load_secrets() -> None:
    """Set environment variables from the Prefect Secret blocks that are listed in the variable `SECRETS_VARIABLE`. Each
    block is a JSON object of variable names and values. Variables that are already set do not change.

    Raises BadInput if a block is missing or has other content. The message does not repeat the content.
    """
    for name in filter(None, map(str.strip, os.environ.get(SECRETS_VARIABLE, "").split(","))):
        try:
            block = cast(Secret[str], await Secret.aload(name))
        except ValueError:
            raise BadInput(
                f"The environment variable {SECRETS_VARIABLE} names {name!r}, but Prefect has no Secret block with "
                "this name. Create the block, or change the variable."
            ) from None
        value: JsonValue = block.value.get_secret_value()  # a block created in the UI contains text
        try:
            values = _VALUES.validate_json(value) if isinstance(value, str) else _VALUES.validate_python(value)
        except ValidationError:
            raise BadInput(
                f"The Secret block {name!r}, which {SECRETS_VARIABLE} names, must contain a JSON object of "
                "environment variables and their values. Change the block."
            ) from None
        for variable, text in values.items():
            os.environ.setdefault(variable, text)
