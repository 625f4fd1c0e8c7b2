"""The worker that generates: prompts in by reference, one shard of completions out."""

import logging
import time

import pyarrow as pa
import torch

from infra.bundles import fetch_bundle
from infra.errors import BadInput
from infra.shards import read_shard, write_shard
from infra.storage import open_store
from models.config import EngineConfig
from models.engines import Completion, Engine, Request
from models.engines.build import build_engine
from models.records import PROMPT_SCHEMA, ROLLOUT_SCHEMA, FinishReason, Outcome, PolicyVersion
from models.seeds import sample_seed
from models.work import RolloutWork

logger = logging.getLogger(__name__)


class RolloutWorker:
    """Generate with the policy each piece of work names, and with no weights but those it has verified.

    The same work gives a shard of the same digest in any worker process with as many threads on the same kind of
    machine, whatever the worker did before.
    """

    def __init__(self, store_uri: str, run: str, engine: EngineConfig, threads: int) -> None:
        torch.set_num_threads(threads)
        self._store = open_store(f"{store_uri}/{run}")
        self._run = run
        self._engine: Engine = build_engine(engine)
        self._loaded = ""

    def progress(self) -> int:
        """Return a count that moves with every decoding step and every load."""
        return self._engine.progress

    def generate(self, work: RolloutWork) -> Outcome:
        """Write the completions of the work's prompts as one shard."""
        clock = time.perf_counter
        started = clock()
        self._take(work.policy)
        loaded = clock()
        rows = _ascending(work)
        prompts = read_shard(self._store, work.prompts, PROMPT_SCHEMA.names).take(pa.array(rows, pa.int64()))
        requests = _requests(work, rows, prompts)
        groups = self._engine.generate(requests, work.sampling)
        generated = clock()
        table = _table(requests, prompts, groups)
        ref = write_shard(self._store, table, kind="rollouts", metadata=_metadata(work, run=self._run))
        return Outcome(
            shards=(ref,),
            metrics=_metrics(requests, groups),
            timings={"load": loaded - started, "generate": generated - loaded, "write": clock() - generated},
        )

    def _take(self, policy: PolicyVersion) -> None:
        weights = policy.weights
        if self._loaded == weights.digest:
            return
        self._loaded = ""
        self._engine.load(fetch_bundle(self._store, weights), policy)
        self._loaded = weights.digest
        logger.info("loaded policy %s", weights.digest)


def _ascending(work: RolloutWork) -> list[int]:
    """Return the work's prompt rows in the order of the shard; a row named twice would get the same seeds twice."""
    rows = sorted(set(work.rows))
    if not rows or len(rows) < len(work.rows):
        raise BadInput(f"rollout work: expected one or more different prompt rows, found {work.rows}")
    if not 0 <= rows[0] <= rows[-1] < work.prompts.rows:
        raise BadInput(
            f"rollout work: expected rows of {work.prompts.key} below {work.prompts.rows}, found {work.rows}"
        )
    return rows


def _requests(work: RolloutWork, rows: list[int], prompts: pa.Table) -> list[Request]:
    samples = range(work.group_size)
    return [
        Request(
            row=row,
            tokens=tuple(tokens),
            seeds=tuple(sample_seed(work.seed, work.iteration, prompt_row=row, sample=sample) for sample in samples),
        )
        for row, tokens in zip(rows, prompts["tokens"].to_pylist(), strict=True)
    ]


def _table(requests: list[Request], prompts: pa.Table, groups: list[list[Completion]]) -> pa.Table:
    completions = [completion for group in groups for completion in group]
    repeated = prompts.take(pa.array([index for index, group in enumerate(groups) for _ in group], pa.int64()))
    columns = {
        "prompt_row": [request.row for request in requests for _ in request.seeds],
        "sample": [sample for request in requests for sample in range(len(request.seeds))],
        "prompt_id": repeated["prompt_id"],
        "prompt": repeated["text"],
        "completion": [completion.text for completion in completions],
        "answer": repeated["answer"],
        "prompt_tokens": repeated["tokens"],
        "completion_tokens": [completion.tokens for completion in completions],
        "logprobs": [completion.logprobs for completion in completions],
        "finish_reason": [completion.finish_reason.value for completion in completions],
        "seed": [seed for request in requests for seed in request.seeds],
    }
    return pa.table(columns, schema=ROLLOUT_SCHEMA)


def _metadata(work: RolloutWork, *, run: str) -> dict[str, str]:
    """Say what the completions came from; seeds follow from `seed`, iteration, prompt row and sample."""
    return {
        "run": run,
        "iteration": str(work.iteration),
        "policy_version": str(work.policy.version),
        "weights_digest": work.policy.weights.digest,
        "producer": "transformers",
        "sampling": work.sampling.model_dump_json(),
        "prompts_digest": work.prompts.digest,
        "seed": str(work.seed),
        "seed_prompt_rows": f"{min(work.rows)}..{max(work.rows)}",
        "seed_samples": f"0..{work.group_size - 1}",
    }


def _metrics(requests: list[Request], groups: list[list[Completion]]) -> dict[str, float]:
    completions = [completion for group in groups for completion in group]
    return {
        "completions": len(completions),
        "tokens": sum(len(completion.tokens) for completion in completions),
        "truncated": sum(completion.finish_reason is FinishReason.LENGTH for completion in completions),
        "prompt_tokens": sum(len(request.tokens) for request in requests),
    }
