"""Stages that train a retriever: pairs, a student (dual encoder), its teacher (cross-encoder), and the choice of the
final student."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from infra.config import adopt_recorded
from infra.pools.cluster import RayCluster
from infra.pools.pool import Pool
from infra.pools.threads import ThreadCluster
from infra.pools.worker import PoolSpec
from infra.store.manifests import Manifest, provenance_here
from infra.store.run_record import has_results
from infra.store.runs import Run, create_run, list_runs, open_run
from models.config.retriever import RETRIEVERS, RetrieverConfig, Terms
from models.records.retrievals import CrossEncoderWork, MadeRetriever, Retrieval, StudentWork
from models.records.versions import Outcome
from tasks.run.stages import decided_here, stage

logger = logging.getLogger(__name__)

FILES: Final = "files"
PAIRS, TEACHER, CHOSEN = "pairs", "cross-encoder", "chosen"
"""Keys of manifests. The key of a student is the name of its training method."""


@dataclass(frozen=True, slots=True)
class Making:
    """Retriever that this process has locked, with the worker that trains it."""

    config: RetrieverConfig
    run: Run
    pool: Pool


@asynccontextmanager
async def hold_retriever(config: RetrieverConfig) -> AsyncIterator[Making]:
    """Create or reopen the retriever's part of the store, lock it during the block, and start its worker.

    Raises BadInput before anything is written, RunHeld if another process has locked it, and RunChanged if it was made
    with another configuration.
    """
    store, pools, begun = _folder(config), config.pools, _begun(config)
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
        target="models.workers.retriever:RetrieverWorker",
        options=options,
        threads=pools.threads,
        gpus=pools.gpus_per_update_rank,
        start_seconds=pools.start_seconds,
        stall_seconds=pools.stall_seconds,
        max_restarts=pools.max_restarts,
    )
    async with opening as cluster:
        pool = await cluster.pool(spec)
        if begun is None:
            await pool.run("check_pairs", config, returns=Outcome)
        run = begun or create_run(store, config.name, config.identity())
        with run.hold():
            yield Making(config, run, pool)


def with_recorded_defaults(config: RetrieverConfig) -> RetrieverConfig:
    """Return the configuration with the values that mean "as before" for keys that are younger than its results."""
    begun = _begun(config)
    return config if begun is None else adopt_recorded(config, begun.record.config)


def made_before(config: RetrieverConfig) -> MadeRetriever | None:
    """Return the retriever if it is complete in the store, otherwise None. Raises RunChanged if its configuration
    differs."""
    begun = _begun(config)
    return None if begun is None or not begun.has(CHOSEN) else _made(begun)


def first_terms(config: RetrieverConfig) -> Terms:
    """Return the training method of the first student."""
    return "dual" if config.method == "dual" else "self-distillation"


def asks_teacher(config: RetrieverConfig) -> bool:
    """Return whether a cross-encoder is trained."""
    return config.method in ("checked", "cascade")


@stage("pairs", retries=2)
async def make_pairs(making: Making) -> Manifest:
    """Create or read the training pairs."""
    return await _once(making, PAIRS, "make_pairs", making.config)


@stage("dual encoder, {terms}", retries=2)
async def train_student(making: Making, pairs: Manifest, terms: Terms, teacher: Manifest | None = None) -> Manifest:
    """Train a dual encoder by the training method `terms`, and evaluate it."""
    told = () if teacher is None else (teacher,)
    work = StudentWork(pairs.bundles[FILES], terms, *(each.bundles[FILES] for each in told))
    return _tell(await _once(making, terms, "train_student", work, parents=[pairs, *told]))


@stage("cross-encoder", retries=2)
async def train_cross_encoder(making: Making, pairs: Manifest, student: Manifest) -> Manifest:
    """Train the cross-encoder of a cascade, and evaluate it on the top results of the student."""
    work = CrossEncoderWork(pairs.bundles[FILES], student.bundles[FILES])
    return _tell(await _once(making, TEACHER, "train_cross_encoder", work, parents=[pairs, student]))


def teaches(config: RetrieverConfig, student: Manifest, teacher: Manifest) -> bool:
    """Return whether the cross-encoder should teach a student: if its held-out MRR is higher, or if the method is
    "cascade"."""
    return config.method == "cascade" or teacher.metrics["mrr"] > student.metrics["mrr"]


@stage("choice")
async def choose(making: Making, students: Sequence[Manifest], teacher: Manifest | None = None) -> MadeRetriever:
    """Record the last student as the retriever, with the reason for the choice."""
    chosen, run = students[-1], making.run
    asked, others = making.config.method, () if teacher is None else (teacher,)
    why = f"method {asked!r}"
    if teacher is not None:
        found, student = (each.metrics["mrr"] for each in (teacher, students[0]))
        than = "higher than" if found > student else "not higher than"
        why += f": the cross-encoder's MRR {found:.3f} is {than} the student's {student:.3f}"
    if not run.has(CHOSEN):
        manifest = Manifest(
            key=CHOSEN,
            bundles={FILES: chosen.bundles[FILES]},
            parents=tuple(each.digest for each in (*students, *others)),
            metrics=chosen.metrics,
            detail={"method": chosen.key, "decision": why},
            provenance=decided_here(),
        )
        run.commit(manifest)
    return _made(run)


async def _once(making: Making, key: str, method: str, work: object, *, parents: Sequence[Manifest] = ()) -> Manifest:
    """Return the manifest under `key` if it exists. Otherwise let the worker do the work and commit its result."""
    if (done_before := making.run.find(key)) is not None:
        return done_before
    done = await making.pool.run(method, work, returns=Outcome)
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
    return making.run.commit(manifest)


def _tell(manifest: Manifest) -> Manifest:
    found = Retrieval.model_validate(manifest.metrics)
    interval = f"95% interval {found.low:.3f} to {found.high:.3f}"
    logger.info("%s: MRR@10 %.3f (%s), recall@50 %.3f", manifest.key, found.mrr, interval, found.recall)
    return manifest


def _made(run: Run) -> MadeRetriever:
    chosen = run.require(CHOSEN)
    bundle, known = chosen.bundles[FILES], ("dual", "self-distillation", TEACHER, "cascade")
    found = {key: Retrieval.model_validate(each.metrics) for key in known if (each := run.find(key)) is not None}
    return MadeRetriever.model_validate(
        {
            **chosen.detail,
            "name": run.name,
            "path": run.store.locate(f"{bundle.key}/bundle.json").rpartition("/")[0],
            "digest": bundle.digest,
            "measured": found,
        }
    )


def _folder(config: RetrieverConfig) -> str:
    return f"{config.store.rstrip('/')}/{RETRIEVERS}"


def _begun(config: RetrieverConfig) -> Run | None:
    """Return the run of a retriever that has results, or None. Raises RunChanged if its configuration differs."""
    if config.name not in list_runs(_folder(config)):
        return None
    run = open_run(_folder(config), config.name)
    if not has_results(run.store):
        return None
    run.check_identity(adopt_recorded(config, run.record.config))
    return run
