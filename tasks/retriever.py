"""Stages that train a retriever. They build training pairs, train a student (dual encoder) and a teacher
(cross-encoder), and choose the final student."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from rheostat.infra.config import adopt_recorded
from rheostat.infra.pools.cluster import RayCluster
from rheostat.infra.pools.pool import Pool
from rheostat.infra.pools.threads import ThreadCluster
from rheostat.infra.pools.worker import PoolSpec
from rheostat.infra.store.dependencies import Dependencies, record_dependencies
from rheostat.infra.store.manifests import Manifest, provenance_here
from rheostat.infra.store.run_record import has_results
from rheostat.infra.store.runs import Run, create_run, list_runs, open_run
from rheostat.models.config.retriever import RETRIEVERS, RetrieverConfig, Terms
from rheostat.models.records.retrievals import CrossEncoderWork, Retrieval, StudentWork, TrainedRetriever
from rheostat.models.records.versions import Outcome
from rheostat.tasks.run.hub_inputs import fetch_hub_inputs, hub_commits, with_hub_commits
from rheostat.tasks.run.stages import controller_provenance, stage

logger = logging.getLogger(__name__)

FILES: Final = "files"
PAIRS, TEACHER, CHOSEN = "pairs", "cross-encoder", "chosen"
"""Keys under which results are stored in a retriever's run. The result of a student has the name of its training method
as key."""


@dataclass(frozen=True, slots=True)
class OpenRetriever:
    """Retriever whose stored results are locked by this process, with the worker that trains its models."""

    config: RetrieverConfig
    run: Run
    pool: Pool


@asynccontextmanager
async def lock_retriever(config: RetrieverConfig) -> AsyncIterator[OpenRetriever]:
    """Create or reopen the stored results of a retriever, lock them during the block, and start the worker that trains.

    Raises BadInput before anything is written, RunLocked if another process has locked it, and RunChanged if it was
    made with another configuration.
    """
    store, pools, existing = _store_of(config), config.pools, _find_existing(config)
    opening = (
        ThreadCluster.open(threads=pools.threads)
        if pools.cluster == "threads"
        else RayCluster.open(
            f"rheostat-{RETRIEVERS}-{config.name}", address=pools.ray_address, start_seconds=pools.start_seconds
        )
    )
    options: dict[str, object] = {"store_uri": f"{store}/{config.name}", "config": config, "threads": pools.threads}
    spec = PoolSpec(
        role="retriever",
        target="rheostat.models.workers.retriever:RetrieverWorker",
        options=options,
        threads=pools.threads,
        gpus=pools.gpus_per_update_rank,
        start_seconds=pools.start_seconds,
        stall_seconds=pools.stall_seconds,
        max_restarts=pools.max_restarts,
    )
    await asyncio.to_thread(fetch_hub_inputs, config)
    async with opening as cluster:
        pool = await cluster.pool(spec)
        if existing is None:
            await pool.run("check_pairs", config, returns=Outcome)
        run = existing or create_run(store, config.name, config.identity())
        with run.lock():
            commits = Dependencies(code={}, data={}, libraries={}, hub=hub_commits(config))
            record_dependencies(run, commits, iteration=1)
            yield OpenRetriever(config, run, pool)


def with_recorded_defaults(config: RetrieverConfig) -> RetrieverConfig:
    """Return the configuration with defaults that preserve the previous behavior for keys that are newer than the
    stored results, and with the commits of the stored results for names on the Hugging Face Hub."""
    existing = _find_existing(config)
    config = with_hub_commits(config, existing)
    return config if existing is None else adopt_recorded(config, existing.record.config)


def find_finished(config: RetrieverConfig) -> TrainedRetriever | None:
    """Return the stored retriever, or None if its training is not complete. Raises RunChanged if it was trained with
    another configuration."""
    existing = _find_existing(config)
    return None if existing is None or not existing.has(CHOSEN) else _read_result(existing)


def first_training_method(config: RetrieverConfig) -> Terms:
    """Return the training method of the first student, which depends on the configured method."""
    return "dual" if config.method == "dual" else "self-distillation"


def trains_teacher(config: RetrieverConfig) -> bool:
    """Return whether the configured method trains a cross-encoder, either as a teacher or to compare with."""
    return config.method in ("checked", "cascade")


@stage("pairs", retries=2)
async def make_pairs(opened: OpenRetriever) -> Manifest:
    """Create the training pairs, or return them if they are stored already."""
    return await _run_once(opened, PAIRS, "make_pairs", opened.config)


@stage("dual encoder, {terms}", retries=2)
async def train_student(
    opened: OpenRetriever, pairs: Manifest, terms: Terms, teacher: Manifest | None = None
) -> Manifest:
    """Train a dual encoder by the training method `terms`, and evaluate it."""
    teachers = () if teacher is None else (teacher,)
    work = StudentWork(pairs.bundles[FILES], terms, *(each.bundles[FILES] for each in teachers))
    return _log_metrics(await _run_once(opened, terms, "train_student", work, parents=[pairs, *teachers]))


@stage("cross-encoder", retries=2)
async def train_cross_encoder(opened: OpenRetriever, pairs: Manifest, student: Manifest) -> Manifest:
    """Train the cross-encoder of a cascade, and evaluate it on the top results of the student."""
    work = CrossEncoderWork(pairs.bundles[FILES], student.bundles[FILES])
    return _log_metrics(await _run_once(opened, TEACHER, "train_cross_encoder", work, parents=[pairs, student]))


def should_teach(config: RetrieverConfig, student: Manifest, teacher: Manifest) -> bool:
    """Return whether the cross-encoder should teach another student. This holds if its held-out MRR is higher than the
    student's or if the method is "cascade"."""
    return config.method == "cascade" or teacher.metrics["mrr"] > student.metrics["mrr"]


@stage("choice")
async def select_retriever(
    opened: OpenRetriever, students: Sequence[Manifest], teacher: Manifest | None = None
) -> TrainedRetriever:
    """Record the last trained student as the final retriever, with the reason for the choice, and return it."""
    chosen, run = students[-1], opened.run
    method, others = opened.config.method, () if teacher is None else (teacher,)
    decision = f"method {method!r}"
    if teacher is not None:
        teacher_mrr, student = (each.metrics["mrr"] for each in (teacher, students[0]))
        than = "higher than" if teacher_mrr > student else "not higher than"
        decision += f": the cross-encoder's MRR {teacher_mrr:.3f} is {than} the student's {student:.3f}"
    if not run.has(CHOSEN):
        manifest = Manifest(
            key=CHOSEN,
            bundles={FILES: chosen.bundles[FILES]},
            parents=tuple(each.digest for each in (*students, *others)),
            metrics=chosen.metrics,
            detail={"method": chosen.key, "decision": decision},
            provenance=controller_provenance(),
        )
        run.commit(manifest)
    return _read_result(run)


async def _run_once(
    opened: OpenRetriever, key: str, method: str, work: object, *, parents: Sequence[Manifest] = ()
) -> Manifest:
    """Return the stored result with this key. If there is none yet, call `method` of the worker and store
    the result."""
    if (done_before := opened.run.find(key)) is not None:
        return done_before
    done = await opened.pool.run(method, work, returns=Outcome)
    outcome = done.result
    assert outcome.model is not None, "it makes files"
    manifest = Manifest(
        key=key,
        bundles={FILES: outcome.model.weights},
        parents=tuple(parent.digest for parent in parents),
        metrics=outcome.metrics or {},
        detail=outcome.detail or {},
        provenance=provenance_here(worker=f"{done.worker} pid {done.pid}", seconds=outcome.timings),
    )
    return opened.run.commit(manifest)


def _log_metrics(manifest: Manifest) -> Manifest:
    metrics = Retrieval.model_validate(manifest.metrics)
    interval = f"95% interval {metrics.low:.3f} to {metrics.high:.3f}"
    logger.info("%s: MRR@10 %.3f (%s), recall@50 %.3f", manifest.key, metrics.mrr, interval, metrics.recall)
    return manifest


def _read_result(run: Run) -> TrainedRetriever:
    chosen = run.require(CHOSEN)
    bundle, known = chosen.bundles[FILES], ("dual", "self-distillation", TEACHER, "cascade")
    measured = {key: Retrieval.model_validate(each.metrics) for key in known if (each := run.find(key)) is not None}
    return TrainedRetriever.model_validate(
        {
            **chosen.detail,
            "name": run.name,
            "path": run.store.locate(f"{bundle.key}/bundle.json").rpartition("/")[0],
            "digest": bundle.digest,
            "measured": measured,
        }
    )


def _store_of(config: RetrieverConfig) -> str:
    return f"{config.store.rstrip('/')}/{RETRIEVERS}"


def _find_existing(config: RetrieverConfig) -> Run | None:
    """Return the stored results of a retriever as a run, or None if there are none. Raises RunChanged if they were made
    with another configuration."""
    if config.name not in list_runs(_store_of(config)):
        return None
    run = open_run(_store_of(config), config.name)
    if not has_results(run.store):
        return None
    run.check_identity(adopt_recorded(config, run.record.config))
    return run
