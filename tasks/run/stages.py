"""Functions shared by all stages of a run. A stage first looks for its result in the store. If there is none, workers
do the work, and the result is stored by committing its manifest (record)."""

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

from rheostat.infra.costs import Cost
from rheostat.infra.errors import Damaged, WorkerLost, WorkerStalled
from rheostat.infra.store.bundles import BundleRef, sync_bundle
from rheostat.infra.store.dependencies import DEPENDENCIES
from rheostat.infra.store.manifests import Manifest, Provenance, provenance_here
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import verify_shard
from rheostat.infra.store.staging import upload_staged_bundle
from rheostat.models.records.versions import AVERAGE, Outcome, bundles_of, critic_bundles_of
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.states import STATES

logger = logging.getLogger(__name__)

P = ParamSpec("P")

R = TypeVar("R")

TRANSIENT_ERRORS = (WorkerLost, OSError)
"""Errors after which a retry can succeed: a lost worker, or an error of the operating system or network."""

POLL_SECONDS = {"nested": (1, 30), "deployment": (0.02, 0.25)}
"""Minimum and maximum pause in seconds between two checks for results of other processes, by location of the
controllers (`controllers.where`).

The pause grows from the first to the second value. Results of this process wake the waiting task at once.
"""
POLL_DIVISOR = 40
"""Divisor that limits the pause in long waits: the pause may grow to the time waited so far divided by this number."""

_BATCH: ContextVar[str | None] = ContextVar("batch", default=None)


def stage(
    name: str, *, retries: int = 0, pauses_seconds: Sequence[float] = ()
) -> Callable[[Callable[P, Coroutine[object, object, R]]], Task[P, Coroutine[object, object, R]]]:
    """Turn a function into a Prefect task with this name, which is retried after transient errors.

    The result is stored in the run's store. Therefore Prefect does not persist it and does not hash the arguments.
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
        async def tagged(*arguments: P.args, **keywords: P.kwargs) -> R:
            running, tag = TaskRunContext.get(), _BATCH.get()
            if running is not None and tag is not None and tag not in running.task_run.tags:
                running.task_run.tags.append(tag)
            return await function(*arguments, **keywords)

        return make_task(tagged)

    return make


@contextmanager
def tag_tasks(batch: str) -> Iterator[None]:
    """Add a tag with the name of an iteration or evaluation to all Prefect tasks in the block. Each task gets the tag
    when it starts to run.

    Tags are not set earlier, because Prefect looks up concurrency limits for tags that a task has before it runs. For
    each new set of tags it opens a server connection that stays open until the process ends, and each iteration would
    have at least one new set of tags.
    """
    before = _BATCH.set(batch)
    try:
        yield
    finally:
        _BATCH.reset(before)


async def run_once(
    open_run: OpenRun,
    key: str,
    *,
    role: str,
    method: str,
    work: object,
    parents: Sequence[Manifest] = (),
    returns_before_durable: bool = False,
) -> Manifest:
    """Return the stored result with this key. If there is none, send the work to a worker of `role`, store the outcome
    and return it.

    Optimizer states may be stored later than the commit. With `returns_before_durable`, the manifest is returned at
    once and is committed after the role has made its bundles durable (fsync), so that rollouts can start with weights
    that are not durable yet.
    """
    done_before = await open_run.query_store(lambda: open_run.run.find(key))
    if done_before is not None:
        return done_before
    start = time.monotonic()
    done = await open_run.perform(role, method, work)
    outcome = done.result
    waited = {"worker": done.seconds, "stage": time.monotonic() - start}
    manifest = Manifest(
        key=key,
        shards=outcome.shards,
        bundles=_bundles_of(outcome),
        parents=tuple(parent.digest for parent in parents),
        metrics=outcome.metrics or {},
        detail={**_version_of(outcome), **(outcome.detail or {})},
        provenance=provenance_here(
            worker=f"{done.worker} pid {done.pid}",
            seconds={**(outcome.timings or {}), **waited},
        ),
    )
    if open_run.run.has_pending(manifest.parents):
        await open_run.wait_for_commits()
    if not returns_before_durable:
        return await _commit_aside(open_run, manifest)
    expected = _expect_manifest(open_run, manifest)
    open_run.commit_in_background(_commit_when_durable(open_run, role, expected))
    return expected


async def _commit_when_durable(open_run: OpenRun, role: str, manifest: Manifest) -> None:
    """Make the files of a new policy durable (fsync), then commit all results that were waiting for this."""
    await open_run.perform(role, "sync", [bundle for name, bundle in manifest.bundles.items() if name not in STATES])
    while pending := open_run.run.pending_manifests():  # more manifests may be added during a commit
        await _commit_aside(open_run, pending[0])


def commit_pending_results(run: Run) -> None:
    """Store the results that the previous process of the run had computed but not committed when it was killed. Results
    with damaged data are skipped and computed again."""
    try:
        for manifest in run.leftover_manifests():
            for shard in manifest.shards:
                verify_shard(run.store, shard)
            for name, bundle in manifest.bundles.items():
                if name not in STATES:
                    upload_staged_bundle(run.store, bundle)
                    sync_bundle(run.store, bundle)
            run.commit(manifest, deferred=STATES)
    except Damaged as error:  # for example after a power failure: this result and its successors are computed again
        logger.warning("run %s: %s. This result is computed again", run.name, error)
    run.delete_pending_copies(every_copy=True)


def _commit_manifest(open_run: OpenRun, manifest: Manifest) -> Manifest:
    committed = open_run.run.commit(manifest, deferred=STATES)
    open_run.commits.announce(manifest.key)
    return committed


async def _commit_aside(open_run: OpenRun, manifest: Manifest) -> Manifest:
    """Store a result without blocking other tasks, and wake the tasks that wait for it. Optimizer states may be stored
    later."""
    committed = await open_run.query_store(lambda: open_run.run.commit(manifest, deferred=STATES))
    open_run.commits.announce(manifest.key)
    return committed


def _expect_manifest(open_run: OpenRun, manifest: Manifest) -> Manifest:
    expected = open_run.run.add_pending(manifest)
    open_run.commits.announce(manifest.key)
    return expected


def commit_decision(
    open_run: OpenRun,
    key: str,
    *,
    parents: Sequence[Manifest] = (),
    bundles: Mapping[str, BundleRef] | None = None,
    metrics: Mapping[str, float] | None = None,
    detail: Mapping[str, JsonValue] | None = None,
    provenance: Provenance | None = None,
) -> Manifest:
    """Store a decision or another small result that needs no worker, unless a result with this key exists. Return the
    stored result.

    If a parent manifest is not committed yet, the new manifest is committed after this parent.
    """
    if (done_before := open_run.run.find(key)) is not None:
        return done_before
    manifest = Manifest(
        key=key,
        bundles=dict(bundles or {}),
        parents=tuple(parent.digest for parent in parents),
        metrics=dict(metrics or {}),
        detail=dict(detail or {}),
        provenance=provenance or controller_provenance(),
    )
    return (
        _expect_manifest(open_run, manifest)
        if open_run.run.has_pending(manifest.parents)
        else _commit_manifest(open_run, manifest)
    )


def controller_provenance(
    *,
    seconds: Mapping[str, float] | None = None,
    requests: Mapping[str, int] | None = None,
    costs: Mapping[str, Cost] | None = None,
    alarms: Mapping[str, str] | None = None,
) -> Provenance:
    """Return who computed a result and how, for a result that this process computes without a worker. The arguments are
    recorded with it: times in seconds, store requests, costs and alarms."""
    worker = f"controller pid {os.getpid()}"
    return provenance_here(worker=worker, seconds=seconds, requests=requests, costs=costs, alarms=alarms)


def append_to_chain(open_run: OpenRun, part: str) -> None:
    """Append a finished iteration or evaluation to the verifiable list of the run (chain), together with its placement
    decisions and dependencies."""
    open_run.chain.link(part, journal=[f"placement/{part}/", DEPENDENCIES])


async def run_concurrently(works: Iterable[Coroutine[object, object, object]]) -> None:
    """Run the coroutines of a stage concurrently. An error that a retry cannot fix cancels all other coroutines at
    once.

    After a transient error the other coroutines are finished first, because the retry reuses all results that they
    store.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            for ended in done:
                error = ended.exception()
                if error is not None and not isinstance(error, TRANSIENT_ERRORS):
                    raise error
    finally:
        for unfinished in pending:
            unfinished.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for ended in tasks:
        ended.result()


async def wait_for_manifest(open_run: OpenRun, key: str) -> Manifest:
    """Wait until another controller has stored the result with this key, and return it.

    Raises WorkerStalled if this process sees no commit at all for `controllers.silence_seconds`.
    """
    silence, began = open_run.settings.controllers.silence_seconds, time.monotonic()
    pause, longest = POLL_SECONDS[open_run.settings.controllers.where]
    while (manifest := await open_run.query_store(lambda: open_run.run.find(key))) is None:
        now = time.monotonic()
        remaining_seconds = max(began, open_run.commits.last_commit_time) + silence - now
        if remaining_seconds <= 0:
            raise WorkerStalled(
                f"No controller has committed {key} within {silence:g} s (controllers.silence_seconds). Look at the "
                "flow runs of the controllers in Prefect's UI for the reason, then run the same command again to "
                "continue."
            )
        await open_run.commits.wait(key, seconds=min(pause, remaining_seconds))
        pause = min(2 * pause, max(longest, (now - began) / POLL_DIVISOR))
    # a commit of another process shows other waiting tasks that the controllers are alive
    open_run.commits.announce(key)
    return manifest


def _bundles_of(outcome: Outcome) -> dict[str, BundleRef]:
    policy = {} if outcome.model is None else bundles_of(outcome.model)
    policy |= {} if outcome.average is None else {AVERAGE: outcome.average}
    return policy | ({} if outcome.critic is None else critic_bundles_of(outcome.critic))


def _version_of(outcome: Outcome) -> dict[str, JsonValue]:
    """Return the version number of the policy or critic in an outcome, as a part of the result's detail. Empty if the
    outcome has neither."""
    model = outcome.model or outcome.critic
    return {} if model is None else {"version": model.version}


async def is_transient(task: Task[..., object], task_run: TaskRun, state: State[object]) -> bool:
    """Return whether a retry of a task can succeed: after the loss of a worker or an external error, but not after a
    wrong result."""
    try:
        await state.aresult()
    except TRANSIENT_ERRORS:
        return True
    except Exception:  # aresult raises the error of the task, and no other error is transient
        return False
    return False
