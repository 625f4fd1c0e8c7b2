"""The frame of every stage: look in the store, ask a pool, commit the manifest."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.tasks import Task
from pydantic import JsonValue

from infra.costs import Cost
from infra.errors import Damaged, WorkerLost, WorkerStalled
from infra.store.bundles import BundleRef, sync_bundle
from infra.store.dependencies import DEPENDENCIES
from infra.store.manifests import Manifest, Provenance, provenance_here
from infra.store.runs import Run
from infra.store.shards import verify_shard
from models.records.versions import Outcome, bundles_of, critic_bundles_of
from tasks.run.session import Session
from tasks.run.states import STATES

logger = logging.getLogger(__name__)

P = ParamSpec("P")

R = TypeVar("R")

TRANSIENT = (WorkerLost, OSError)
"""Errors after which trying again can help: a lost worker, or the outside world."""

LOOK_SECONDS = {"nested": (1, 30), "deployment": (0.02, 0.25)}
"""Pauses between looks for what another process is to commit, by where controllers are: they grow from the first to the
last. What this process commits wakes who waits for it."""
LOOKS_LATE = 40
"""Who has waited for long looks that often in as much time again."""

_BATCH: ContextVar[str | None] = ContextVar("batch", default=None)


def stage(
    name: str, *, retries: int = 0, pauses_seconds: Sequence[float] = ()
) -> Callable[[Callable[P, Coroutine[object, object, R]]], Task[P, Coroutine[object, object, R]]]:
    """Make a function a task of that name in Prefect's UI, tried again where that can help.

    What it makes is in the store, so Prefect keeps no copy of it and has no reason to hash what it is handed.
    """
    make_task = task(
        task_run_name=name,
        retries=retries,
        retry_delay_seconds=list(pauses_seconds) or None,
        retry_condition_fn=is_transient,
        cache_policy=NO_CACHE,
    )

    def make(function: Callable[P, Coroutine[object, object, R]]) -> Task[P, Coroutine[object, object, R]]:
        @wraps(function)
        async def tagged(*arguments: P.args, **named: P.kwargs) -> R:
            running, tag = TaskRunContext.get(), _BATCH.get()
            if running is not None and tag is not None and tag not in running.task_run.tags:
                running.task_run.tags.append(tag)
            return await function(*arguments, **named)

        return make_task(tagged)

    return make


@contextmanager
def within(batch: str) -> Iterator[None]:
    """Tag the tasks of this context with the name of their iteration or evaluation, once they run.

    Tags that a task has before it runs are looked up as concurrency limits: for each new set of them, Prefect opens a
    connection to its server that it keeps until the process ends, and a run has one or more sets in each iteration.
    """
    before = _BATCH.set(batch)
    try:
        yield
    finally:
        _BATCH.reset(before)


async def once(
    session: Session,
    key: str,
    *,
    role: str,
    method: str,
    work: object,
    parents: Sequence[Manifest] = (),
    early: bool = False,
) -> Manifest:
    """Return the manifest under `key`, or have a worker of `role` do the work and commit what it made.

    Optimizers' states may still be on their way to the store. With `early` the manifest is returned at once, and
    committed when the role has synced the bundles: rollouts begin with weights that are not durable yet.
    """
    done_before = await session.ask_store(lambda: session.run.find(key))
    if done_before is not None:
        return done_before
    start = time.monotonic()
    done = await session.perform(role, method, work)
    outcome = done.result
    waited = {"worker": done.seconds, "stage": time.monotonic() - start}
    manifest = Manifest(
        key=key,
        shards=outcome.shards,
        bundles=_bundles(outcome),
        parents=tuple(parent.digest for parent in parents),
        metrics=outcome.metrics or {},
        detail={**_version(outcome), **(outcome.detail or {})},
        provenance=provenance_here(
            worker=f"{done.worker} pid {done.pid}",
            seconds={**(outcome.timings or {}), **waited},
        ),
    )
    if session.run.expects(manifest.parents):
        await session.settled()
    if not early:
        return await _commit_aside(session, manifest)
    expected = _expect(session, manifest)
    session.settle(_settle(session, role, expected))
    return expected


async def _settle(session: Session, role: str, made: Manifest) -> None:
    """Have a role sync the bundles that it made, and commit what was expected meanwhile."""
    await session.perform(role, "sync", [bundle for name, bundle in made.bundles.items() if name not in STATES])
    while left := session.run.expected():  # others may come while one is committed
        await _commit_aside(session, left[0])


def recover(run: Run) -> None:
    """Commit what the last holder of a run had made and expected when it was killed, as far as it is whole."""
    try:
        for made in run.left():
            for shard in made.shards:
                verify_shard(run.store, shard)
            for name, bundle in made.bundles.items():
                if name not in STATES:
                    sync_bundle(run.store, bundle)
            run.commit(made, promised=STATES)
    except Damaged as error:  # such as after a power cut: it is made again, and so is what follows from it
        logger.warning("run %s: %s; it is made again", run.name, error)
    run.forget(left=True)


def _commit(session: Session, manifest: Manifest) -> Manifest:
    committed = session.run.commit(manifest, promised=STATES)
    session.commits.announce(manifest.key)
    return committed


async def _commit_aside(session: Session, manifest: Manifest) -> Manifest:
    """Commit what a worker made, whose optimizer's states may come later; others may be committed at the same time."""
    committed = await session.ask_store(lambda: session.run.commit(manifest, promised=STATES))
    session.commits.announce(manifest.key)
    return committed


def _expect(session: Session, manifest: Manifest) -> Manifest:
    expected = session.run.expect(manifest)
    session.commits.announce(manifest.key)
    return expected


def record(
    session: Session,
    key: str,
    *,
    parents: Sequence[Manifest] = (),
    bundles: Mapping[str, BundleRef] | None = None,
    metrics: Mapping[str, float] | None = None,
    detail: Mapping[str, JsonValue] | None = None,
    provenance: Provenance | None = None,
) -> Manifest:
    """Return the manifest under `key`, or commit a decision that needed no worker: after its parents, if these wait."""
    if (done_before := session.run.find(key)) is not None:
        return done_before
    manifest = Manifest(
        key=key,
        bundles=dict(bundles or {}),
        parents=tuple(parent.digest for parent in parents),
        metrics=dict(metrics or {}),
        detail=dict(detail or {}),
        provenance=provenance or decided_here(),
    )
    return _expect(session, manifest) if session.run.expects(manifest.parents) else _commit(session, manifest)


def decided_here(
    *,
    seconds: Mapping[str, float] | None = None,
    requests: Mapping[str, int] | None = None,
    costs: Mapping[str, Cost] | None = None,
    alarms: Mapping[str, str] | None = None,
) -> Provenance:
    """Return the provenance of what this process decides."""
    worker = f"controller pid {os.getpid()}"
    return provenance_here(worker=worker, seconds=seconds, requests=requests, costs=costs, alarms=alarms)


def finish(session: Session, part: str) -> None:
    """Append a finished iteration or evaluation to the run's chain, with its placement and what it was made with."""
    session.chain.link(part, journal=[f"placement/{part}/", DEPENDENCIES])


async def side_by_side(works: Iterable[Coroutine[object, object, object]]) -> None:
    """Do a stage's works, shard by shard, side by side; what trying again cannot help ends all of them at once.

    Where it can help, the others are finished first: what they commit is not done again.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            for ended in done:
                error = ended.exception()
                if error is not None and not isinstance(error, TRANSIENT):
                    raise error
    finally:
        for left in pending:
            left.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for ended in tasks:
        ended.result()


async def committed(session: Session, key: str) -> Manifest:
    """Wait until another controller has committed `key`.

    Raises WorkerStalled when so long as is configured nothing at all was committed that this process could see.
    """
    silence, began = session.settings.controllers.silence_seconds, time.monotonic()
    pause, longest = LOOK_SECONDS[session.settings.controllers.where]
    while (manifest := await session.ask_store(lambda: session.run.find(key))) is None:
        now = time.monotonic()
        left = max(began, session.commits.newest) + silence - now
        if left <= 0:
            raise WorkerStalled(f"{key}: expected a commit within {silence:g} s, none came")
        await session.commits.wait(key, seconds=min(pause, left))
        pause = min(2 * pause, max(longest, (now - began) / LOOKS_LATE))
    session.commits.announce(key)  # of another process it is news, which shows that the others are alive
    return manifest


def _bundles(outcome: Outcome) -> dict[str, BundleRef]:
    policy = {} if outcome.model is None else bundles_of(outcome.model)
    return policy | ({} if outcome.critic is None else critic_bundles_of(outcome.critic))


def _version(outcome: Outcome) -> dict[str, JsonValue]:
    """Policy and critic of one manifest have the same number."""
    model = outcome.model or outcome.critic
    return {} if model is None else {"version": model.version}


async def is_transient(task: Task[..., object], task_run: TaskRun, state: State[object]) -> bool:
    """Whether trying a task again can help: a lost worker or the outside world, never a bad result."""
    try:
        await state.aresult()
    except TRANSIENT:
        return True
    except Exception:  # Prefect raises here whatever the task raised: all else would be raised again
        return False
    return False
