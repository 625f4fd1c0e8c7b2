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
from prefect.runtime import deployment
from prefect.states import Crashed
from pydantic import JsonValue, TypeAdapter, ValidationError

from flows.controllers import controllers, serve
from flows.endings import install_state_handling
from infra.errors import BadInput, HolderLost, first_cause
from infra.plugins import PACKAGES
from infra.store.chain import linked_parts
from infra.store.dependencies import check_dependencies, record_dependencies, recorded_config
from infra.store.garbage import tag_run
from infra.store.inputs import PathNames
from infra.store.run_record import has_results
from infra.store.runs import create_run, open_run
from infra.untrusted_text import log_visibly
from placement.measurements import Role
from tasks.config.run import RunConfig, parse_config
from tasks.events import emit_of_run
from tasks.placement.stage import place_alone
from tasks.preparation import check_inputs
from tasks.run.batch import Batch
from tasks.run.dependencies import dependencies_of, find_run, layout_of, next_iteration
from tasks.run.orders import Shards
from tasks.run.preflight import with_data_sized_defaults, with_recorded_defaults
from tasks.run.session import RunRef, Session, is_open, open_session, session_of
from tasks.run.stages import recover, within

logger = logging.getLogger(__name__)

SECRETS: Final = "RHEOSTAT_SECRETS"
"""Environment variable with the names of Prefect Secret blocks, separated by commas, that contain keys for deployed
flows."""
_VALUES: Final = TypeAdapter(dict[str, str])

Work = Callable[[Session, Batch, Sequence[int]], Awaitable[object]]
"""Function that does the work of a role for some shards of a batch."""


@asynccontextmanager
async def hold(
    config: RunConfig, *, scope: RunConfig | None = None, accept_change: bool = False, last: str | None = None
) -> AsyncIterator[Session]:
    """Create or resume the configured run, lock it for this process, and open its worker pools.

    `scope` is the configuration used by the session if it needs less than the whole run. With `accept_change` the run
    continues with the current code, data and libraries. `last` is the last manifest of the run. If it is already in the
    chain, no cluster is started. Raises BadInput before anything is written, RunLocked if another process holds the
    run, RunChanged if the run was created with another configuration.
    """
    await _prepare_process()
    with tags(config.name, *config.tags):
        config = with_recorded_defaults(config)
        if deployment.id is not None:  # the command line has already checked the inputs
            config, adaptations = with_data_sized_defaults(config, await check_inputs(config))
            for line in adaptations:
                logger.info("%s", line)
        if config.controllers.where == "deployment":
            # Queues are in the processes of the controllers, so the placement cannot be corrected during a stage.
            config = config.model_copy(update={"placement": config.placement.without_moves()})
        existing = find_run(config, accept_change=accept_change)
        dependencies = dependencies_of(config, existing)
        run = existing or create_run(config.store, config.name, config.identity())
        with run.lock(sole_writer=config.controllers.where == "nested"):
            await asyncio.to_thread(recover, run)
            record_dependencies(
                run,
                dependencies,
                iteration=next_iteration(run),
                folder=PathNames(config).folder,
                accept_change=accept_change or not has_results(run.store),
            )
            tag_run(run, config.tags)
            is_over = last in linked_parts(run)
            opening = open_session(run, scope or config, store=config.store, whole=True, over=is_over)
            async with opening as session, controllers(session):
                with _report_run(session):
                    yield session


@contextmanager
def _report_run(session: Session) -> Iterator[None]:
    """Report to Prefect that a run has started, after how many iterations, and how it ended."""
    run = session.run
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
async def reopen_run(config: RunConfig) -> AsyncIterator[Session]:
    """Lock an existing run for this process to derive more from it with `config`. The recorded configuration is kept.

    Raises RunLocked if another process holds the run.
    """
    await _prepare_process()
    run = open_run(config.store, config.name)
    with tags(config.name), run.lock():
        async with open_session(run, config, store=config.store) as session:
            yield session


@asynccontextmanager
async def join_run(ref: RunRef) -> AsyncIterator[Session]:
    """Open the run for a controller: use the session of this process, or join the run from a separate process.

    If several tasks of a controller fail together, the first cause is raised, and its message is shown in the flow's
    state.
    """
    try:
        async with _join(ref) as session:
            yield session
    except BaseExceptionGroup as several:
        raise first_cause(several) from several


async def control(run: RunRef, batch: str | None, *, work: Work, slots: Role | None = None) -> int | State[int]:
    """Do a role's work for one batch, or for all orders of the run's holder. Return the number of batches.

    `slots` is the role that has workers in the slots; for a single batch of a run that nobody holds, they are placed
    here. If the controller no longer receives messages from the holder, the flow run ends as crashed. The holder, if it
    still runs, then starts a successor. Raises BadInput if no batch is given and no process holds the run.
    """
    if batch is None and run.epoch is None and not is_open(run):
        raise BadInput(
            "Parameter `batch` is missing. Set it to a batch such as it-0003: only the process that trains the run may "
            "start a controller without a batch."
        )
    try:
        async with join_run(run) as session:
            perform = partial(_carry_out, session, work)
            if batch is None:
                return await serve(session, perform)
            if slots is not None and run.epoch is None:
                await place_alone(session, Batch.read(session.run, batch), slots)
            await perform(batch, None)
            return 1
    except HolderLost as lost:
        return Crashed(message=f"{type(lost).__name__}: {lost}")


async def _carry_out(session: Session, work: Work, batch: str, shards: Shards) -> None:
    """Do the work for some shards of a planned batch, or for all if `shards` is None."""
    planned = Batch.read(session.run, batch)
    with within(batch):
        await work(session, planned, planned.shards if shards is None else shards)


@asynccontextmanager
async def _join(ref: RunRef) -> AsyncIterator[Session]:
    if is_open(ref):
        yield session_of(ref)
        return
    await _prepare_process()
    run = open_run(ref.store, ref.name)
    document = {**recorded_config(run), "name": ref.name, "store": ref.store}
    config = parse_config(document, source=f"run {ref.name}", recorded=True)
    overrides = {"pools": ref.pools, "controllers": ref.controllers}
    config = config.model_copy(update={name: part for name, part in overrides.items() if part is not None})
    config = config.with_layout(layout_of(run))
    with tags(ref.name):
        if ref.epoch is None:
            check_dependencies(run, dependencies_of(config, run))
            with run.lock():
                async with open_session(run, config, store=ref.store) as session:
                    yield session
        else:
            run = run.join(ref.epoch)
            run.check_lease()
            async with open_session(run, config, store=ref.store, join=ref.cluster) as session:
                yield session


async def _prepare_process() -> None:
    """Install error handling, configure logging, and load keys from Prefect."""
    install_state_handling()
    log_visibly("prefect", *PACKAGES)
    await _load_secrets()
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)


async def _load_secrets() -> None:
    """Set the environment variables from the named Secret blocks, which are JSON objects of text. Set variables are
    kept.

    Raises BadInput if a block is missing or has other content. The message does not repeat the content.
    """
    for name in filter(None, map(str.strip, os.environ.get(SECRETS, "").split(","))):
        try:
            block = cast(Secret[str], await Secret.aload(name))
        except ValueError:
            raise BadInput(f"{SECRETS} names {name!r}, but Prefect has no Secret block with this name.") from None
        value: JsonValue = block.value.get_secret_value()  # a block created in the UI contains text
        try:
            values = _VALUES.validate_json(value) if isinstance(value, str) else _VALUES.validate_python(value)
        except ValidationError:
            raise BadInput(
                f"{SECRETS}: the Secret block {name!r} must be a JSON object of environment variables and their values."
            ) from None
        for variable, text in values.items():
            os.environ.setdefault(variable, text)
