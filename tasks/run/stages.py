"""The frame of every stage: look in the store, ask a pool, commit the manifest."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence

from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task
from pydantic import JsonValue

from infra.errors import WorkerLost, WorkerStalled
from infra.store.bundles import BundleRef
from infra.store.manifests import Manifest, provenance_here
from models.records.versions import Outcome
from tasks.run.session import RunRef, session_of
from tasks.run.versions import bundles_of, critic_bundles_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02  # a look for one name on local disk costs 20 µs


async def once(
    ref: RunRef,
    key: str,
    *,
    role: str,
    method: str,
    work: object,
    parents: Sequence[Manifest] = (),
    detail: Mapping[str, JsonValue] | None = None,
) -> Manifest:
    """Return the manifest under `key`, or have a worker of `role` do the work and commit what it made."""
    session = session_of(ref)
    done_before = session.run.find(key)
    if done_before is not None:
        return done_before
    start = time.monotonic()
    done = await session.perform(role, method, work)
    outcome = done.result
    waited = {"worker": done.seconds, "stage": time.monotonic() - start}
    return session.run.commit(
        Manifest(
            key=key,
            shards=outcome.shards,
            bundles=_bundles(outcome),
            parents=tuple(parent.digest for parent in parents),
            metrics=outcome.metrics or {},
            detail={**_version(outcome), **(outcome.detail or {}), **(detail or {})},
            provenance=provenance_here(
                worker=f"{done.worker} pid {done.pid}",
                seconds={**(outcome.timings or {}), **waited},
            ),
        )
    )


def record(
    ref: RunRef,
    key: str,
    *,
    parents: Sequence[Manifest] = (),
    bundles: Mapping[str, BundleRef] | None = None,
    metrics: Mapping[str, float] | None = None,
    detail: Mapping[str, JsonValue] | None = None,
    seconds: Mapping[str, float] | None = None,
) -> Manifest:
    """Return the manifest under `key`, or commit a decision that needed no worker."""
    run = session_of(ref).run
    return run.find(key) or run.commit(
        Manifest(
            key=key,
            bundles=dict(bundles or {}),
            parents=tuple(parent.digest for parent in parents),
            metrics=dict(metrics or {}),
            detail=dict(detail or {}),
            provenance=provenance_here(worker=f"controller pid {os.getpid()}", seconds=seconds),
        )
    )


async def committed(ref: RunRef, key: str, *, silence_seconds: float) -> Manifest:
    """Wait until another controller has committed `key`. Raises WorkerStalled after `silence_seconds`."""
    run = session_of(ref).run
    deadline = time.monotonic() + silence_seconds
    while (manifest := run.find(key)) is None:
        if time.monotonic() > deadline:
            raise WorkerStalled(f"{key}: expected a commit within {silence_seconds:g} s, none came")
        await asyncio.sleep(POLL_SECONDS)
    return manifest


def required(ref: RunRef, key: str) -> Manifest:
    """The manifest under `key`, which an earlier stage committed. Raises Damaged if it is gone."""
    return session_of(ref).run.require(key)


def _bundles(outcome: Outcome) -> dict[str, BundleRef]:
    policy = {} if outcome.policy is None else bundles_of(outcome.policy)
    return policy | ({} if outcome.critic is None else critic_bundles_of(outcome.critic))


def _version(outcome: Outcome) -> dict[str, JsonValue]:
    """Policy and critic of one manifest have the same number."""
    model = outcome.policy or outcome.critic
    return {} if model is None else {"version": model.version}


async def is_transient(task: Task[..., object], task_run: TaskRun, state: State[object]) -> bool:
    """Whether trying a task again can help: a lost worker or the outside world, never a bad result."""
    try:
        await state.aresult()
    except (WorkerLost, OSError):
        return True
    except Exception:  # Prefect raises here whatever the task raised: all else would be raised again
        return False
    return False
