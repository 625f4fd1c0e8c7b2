"""Which process holds a run, and who joins it there."""

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
from flows.endings import tell_endings
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
from tasks.run.preflight import adopted, fitted
from tasks.run.session import RunRef, Session, is_open, open_session, session_of
from tasks.run.stages import recover, within

logger = logging.getLogger(__name__)

SECRETS: Final = "RHEOSTAT_SECRETS"
"""Names of Secret blocks of Prefect, separated by commas, where flows of deployments find keys."""
_VALUES: Final = TypeAdapter(dict[str, str])

Work = Callable[[Session, Batch, Sequence[int]], Awaitable[object]]
"""What a role does with some of a batch's shards."""


@asynccontextmanager
async def hold(
    config: RunConfig, *, scope: RunConfig | None = None, accept_change: bool = False, last: str | None = None
) -> AsyncIterator[Session]:
    """Make or reopen the configured run, take it for this process, and open its pools.

    `scope` is what the session works with where it needs less than the run. With `accept_change` a run goes on with the
    code, data and libraries that are there now. `last` is the part of the run after which there is none to make: where
    it is in the chain, no cluster is opened.
    Raises BadInput before anything is written, RunHeld if another process has it, RunChanged if it was made otherwise.
    """
    await _begin()
    with tags(config.name, *config.tags):
        config = adopted(config)
        if deployment.id is not None:  # the command line has checked before it started anything
            config, told = fitted(config, await check_inputs(config))
            for line in told:
                logger.info("%s", line)
        if config.controllers.where == "deployment":
            # Queues are in the controllers' own processes, so nobody can correct the placement inside a stage.
            config = config.model_copy(update={"placement": config.placement.standing()})
        begun = find_run(config, accept_change=accept_change)
        dependencies = dependencies_of(config, begun)
        run = begun or create_run(config.store, config.name, config.identity())
        with run.hold(alone=config.controllers.where == "nested"):
            await asyncio.to_thread(recover, run)
            record_dependencies(
                run,
                dependencies,
                iteration=next_iteration(run),
                folder=PathNames(config).folder,
                accept_change=accept_change or not has_results(run.store),
            )
            tag_run(run, config.tags)
            over = last in linked_parts(run)
            opening = open_session(run, scope or config, store=config.store, whole=True, over=over)
            async with opening as session, controllers(session):
                with _telling(session):
                    yield session


@contextmanager
def _telling(session: Session) -> Iterator[None]:
    """Tell Prefect that a run is taken, after how many iterations, and that it is let go."""
    run = session.run
    emit_of_run(run.name, "run.started", iterations=next_iteration(run) - 1)
    how = "stopped"
    try:
        yield
        how = "done"
    except Exception as error:
        how = f"{type(error).__name__}: {error}"
        raise
    finally:
        emit_of_run(run.name, "run.ended", how=how)


@asynccontextmanager
async def reopened(config: RunConfig) -> AsyncIterator[Session]:
    """Take an existing run for this process, to make more of what it holds as `config` says; its record stays.

    Raises RunHeld if another process has it.
    """
    await _begin()
    run = open_run(config.store, config.name)
    with tags(config.name), run.hold():
        async with open_session(run, config, store=config.store) as session:
            yield session


@asynccontextmanager
async def joined(ref: RunRef) -> AsyncIterator[Session]:
    """The run as a controller sees it: open in this process already, or joined by a process of its own.

    Of the errors that a controller's tasks end with together it raises one, whose message the flow's state then shows.
    """
    try:
        async with _joined(ref) as here:
            yield here
    except BaseExceptionGroup as several:
        raise first_cause(several) from several


async def control(run: RunRef, batch: str | None, *, work: Work, slots: Role | None = None) -> int | State[int]:
    """Do a role's part of one batch, or of all that the run's holder asks for; return of how many.

    `slots` is the role that has workers in the slots, which are awake where another process deals them.
    A flow run that no longer hears of the holder ends as crashed, which has the holder, if there still is one, begin a
    successor.
    """
    if batch is None and run.epoch is None and not is_open(run):
        raise BadInput("expected a batch, such as it-0003: a controller without one is for who holds a run to start")
    try:
        async with joined(run) as session:
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
    """Do it with some shards of a planned batch, by default all."""
    planned = Batch.read(session.run, batch)
    with within(batch):
        await work(session, planned, planned.shards if shards is None else shards)


@asynccontextmanager
async def _joined(ref: RunRef) -> AsyncIterator[Session]:
    if is_open(ref):
        yield session_of(ref)
        return
    await _begin()
    run = open_run(ref.store, ref.name)
    document = {**recorded_config(run), "name": ref.name, "store": ref.store}
    config = parse_config(document, source=f"run {ref.name}", recorded=True)
    ours = {"pools": ref.pools, "controllers": ref.controllers}
    config = config.model_copy(update={name: part for name, part in ours.items() if part is not None})
    config = config.laid_out(layout_of(run))
    with tags(ref.name):
        if ref.epoch is None:
            check_dependencies(run, dependencies_of(config, run))
            with run.hold():
                async with open_session(run, config, store=ref.store) as here:
                    yield here
        else:
            run = run.join(ref.epoch)
            run.check_lease()
            async with open_session(run, config, store=ref.store, join=ref.cluster) as here:
                yield here


async def _begin() -> None:
    """Take keys from Prefect, and let our reports through to handlers such as Prefect's, with visible characters."""
    tell_endings()
    log_visibly("prefect", *PACKAGES)
    await _take_secrets()
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)


async def _take_secrets() -> None:
    """Set the variables that the named blocks hold, as JSON objects of text; those that are set already stay.

    Raises BadInput where there is no such block, or one with something else in it, which is not repeated.
    """
    for name in filter(None, map(str.strip, os.environ.get(SECRETS, "").split(","))):
        try:
            block = cast(Secret[str], await Secret.aload(name))
        except ValueError:
            raise BadInput(f"{SECRETS}: expected a Secret block of Prefect called {name!r}, found none") from None
        value: JsonValue = block.value.get_secret_value()  # one that was written in the UI is text
        try:
            values = _VALUES.validate_json(value) if isinstance(value, str) else _VALUES.validate_python(value)
        except ValidationError:
            raise BadInput(f"{SECRETS}: expected Secret block {name!r} to be a JSON object of texts by name") from None
        for variable, text in values.items():
            os.environ.setdefault(variable, text)
