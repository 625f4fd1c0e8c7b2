"""Tokens per second through the whole path to a vLLM server, compared with `vllm.LLM.generate` on the same machine.

The path: a pool with one rollout worker on a Ray cluster receives a work unit. The worker reads the prompts by
reference, sends requests over HTTP to the server that it owns, and writes the shard with digest and fsync.
`LLM.generate` runs in vLLM's environment with the same model, prompts, lengths, seeds, log-probs of the sampled tokens,
and options of vLLM. Both are warm when measured, and rounds alternate, so that a busy machine affects both.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa

from bench.decoders import MIDDLE, TINY, Decoder, write_decoder
from bench.drawn import DrawnLengths, DrawnVllm
from bench.tables import Table
from bench.vllm_raw import RawProcess, RawRound, RawWorkload, start_raw
from rheostat.infra.environments.find import find_python
from rheostat.infra.pools.cluster import RayCluster
from rheostat.infra.pools.pool import Pool
from rheostat.infra.pools.worker import PoolSpec
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.records.model_input import rollout_inputs
from rheostat.models.records.schemas import PROMPT_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import RolloutWork
from rheostat.models.text.tokenizer import load_tokenizer

VLLM_VARIABLE = "VLLM_PYTHON"
"""Name of the environment variable that contains the path of the Python interpreter of vLLM's environment.

If the variable is not set, the installed environment of vLLM is used.
"""
PROMPTS, GROUP = 32, 8
THREADS = 1  # the other core runs the processes around the engine, as on a machine with a GPU engine
DTYPE = "float32"
CACHE_GIB = 0.5
LENGTHS, LONGEST = DrawnLengths(median_tokens=16, sigma=0.5), 64


@dataclass(frozen=True, slots=True)
class Size:
    """Model, batch size and number of measured rounds of one comparison with `LLM.generate`."""

    decoder: Decoder
    max_batch_rows: int
    rounds: int


SIZES = (Size(decoder=MIDDLE, max_batch_rows=32, rounds=3), Size(decoder=TINY, max_batch_rows=256, rounds=9))


@dataclass(frozen=True, slots=True)
class Round:
    """Speed of Rheostat (`ours`) and of `LLM.generate` (`raw`) in tokens per second, measured one after the other."""

    ours: float
    raw: float
    cpu: float
    """CPU seconds of Rheostat's rollout worker and its vLLM server in this round."""
    raw_cpu: float
    worker: float
    """Seconds of Rheostat's rollout worker outside generation and writing: weight verification, prompts, texts."""
    write: float
    """Seconds in which Rheostat's rollout worker writes the shard of completions."""
    seconds: float

    @property
    def ratio(self) -> float:
        return self.ours / self.raw


def measure() -> Iterator[Table]:
    """Measure tokens per second of a Rheostat rollout worker and of vLLM's `LLM.generate`.

    Yield one table per model size.
    """
    configured = os.environ.get(VLLM_VARIABLE)
    python = find_python("vllm", Path(configured) if configured else None)
    for size in SIZES:
        yield asyncio.run(_compare(size, python))


async def _compare(size: Size, python: Path) -> Table:
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
        directory = Path(name)
        write_decoder(directory / "policy", size.decoder, dtype=DTYPE)
        store = open_store(f"{directory}/store/bench")
        work = _work(store, directory / "policy", size)
        async with _pool(directory / "store", size, python) as pool:
            made = (await pool.run("generate", work, returns=Outcome)).result  # starts the server and loads the weights
            raw = _raw_workload(store, made.shards[0], directory / "policy", size)
            with start_raw(python, raw, directory / "raw.json", threads=THREADS) as beside:
                beside.run_round("same")
                ours = (*pool.pids, *_servers(directory))
                rounds = [
                    await _round(pool, work, beside, ours=ours, raw_first=bool(turn % 2)) for turn in range(size.rounds)
                ]
                plain = beside.run_round("plain")
    return _table(size, rounds, tokens=sum(raw.lengths), plain=plain.tokens / plain.seconds)


@asynccontextmanager
async def _pool(home: Path, size: Size, python: Path):
    engine = DrawnVllm(
        python=python,
        dtype=DTYPE,
        max_batch_rows=size.max_batch_rows,
        cache_gib=CACHE_GIB,
        lengths=LENGTHS,
    )
    async with RayCluster.open("bench") as cluster:
        spec = PoolSpec(
            role="rollout",
            target="rheostat.models.workers.rollout:RolloutWorker",
            options={"store_uri": str(home), "run": "bench", "engine": engine, "threads": THREADS},
            size=1,
            threads=THREADS,
            start_seconds=120,
            stall_seconds=300,
            max_restarts=0,
        )
        yield await cluster.pool(spec)


async def _round(pool: Pool, work: RolloutWork, beside: RawProcess, *, ours: Sequence[int], raw_first: bool) -> Round:
    def take_raw() -> tuple[RawRound, float]:
        before = _cpu_seconds([beside.pid])
        return beside.run_round("same"), _cpu_seconds([beside.pid]) - before

    early = take_raw() if raw_first else None
    before, started = _cpu_seconds(ours), time.perf_counter()
    done = await pool.run("generate", work, returns=Outcome)
    seconds, cpu = time.perf_counter() - started, _cpu_seconds(ours) - before
    raw, raw_cpu = early or take_raw()
    outcome = done.result
    assert outcome.metrics["tokens"] == raw.tokens, "both must generate the same number of tokens"
    return Round(
        ours=raw.tokens / seconds,
        raw=raw.tokens / raw.seconds,
        cpu=cpu,
        raw_cpu=raw_cpu,
        worker=done.seconds - outcome.timings["generate"] - outcome.timings["write"],
        write=outcome.timings["write"],
        seconds=seconds,
    )


def _servers(directory: Path) -> list[int]:
    """Return the process IDs of the vLLM server of Rheostat's worker.

    The server is found by the policy directory on its command line, because it is not a child process of the worker.
    """
    commands = ((process.pid, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [
        pid
        for pid, words in commands
        if "vllm.entrypoints.openai.api_server" in words and any(word.startswith(str(directory)) for word in words)
    ]


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU seconds that the processes and all their descendants have used so far.

    Other load on the machine affects CPU seconds less than wall-clock time.
    """
    roots = [psutil.Process(pid) for pid in pids]
    each = {process for root in roots for process in (root, *root.children(recursive=True))}
    return sum(sum(process.cpu_times()[:2]) for process in each)


def _work(store: Store, policy: Path, size: Size) -> RolloutWork:
    texts = [f"Ana has {row} pens, buys {row % 7} and sells {row % 5}. How many? " for row in range(PROMPTS)]
    tokenizer = load_tokenizer(policy)
    columns = {
        "prompt_id": [f"{row:016x}" for row in range(PROMPTS)],
        "text": texts,
        "tokens": [tokenizer.encode(text) for text in texts],
        "images": [[]] * PROMPTS,
        "answer": [""] * PROMPTS,
        "columns": ["{}"] * PROMPTS,
        "messages": [None] * PROMPTS,
    }
    return RolloutWork(
        iteration=1,
        policy=ModelVersion(version=0, weights=publish_bundle(store, policy, prefix="policies")),
        prompts=write_shard(store, pa.table(columns, schema=PROMPT_SCHEMA), kind="prompts", metadata={}),
        rows=tuple(range(PROMPTS)),
        group_size=GROUP,
        sampling=SamplingConfig(max_new_tokens=LONGEST),
        seed=0,
    )


def _raw_workload(store: Store, shard: ShardRef, policy: Path, size: Size) -> RawWorkload:
    """Build the workload that makes `LLM.generate` repeat the completions of a Rheostat shard.

    The workload has the same prompts, lengths and seeds.
    """
    table = read_shard(store, shard)
    inputs = rollout_inputs(table)
    return RawWorkload(
        model=policy,
        dtype=DTYPE,
        max_num_seqs=size.max_batch_rows,
        cache_bytes=int(CACHE_GIB * 2**30),
        prompts=tuple(tuple(each.prompt.tolist()) for each in inputs),
        lengths=tuple(each.num_completion_tokens for each in inputs),
        seeds=tuple(table["seed"].to_pylist()),
    )


def _table(size: Size, rounds: list[Round], *, tokens: int, plain: float) -> Table:
    def median(name: str) -> float:
        return statistics.median(getattr(one, name) for one in rounds)

    def spread(name: str) -> tuple[float, float]:
        values = [getattr(one, name) for one in rounds]
        return min(values), max(values)

    decoder = size.decoder
    rows = (
        ("Rheostat, whole path, tokens/s", median("ours"), *spread("ours")),
        ("LLM.generate, tokens/s", median("raw"), *spread("raw")),
        ("ratio, round by round", median("ratio"), *spread("ratio")),
        ("CPU seconds per round, worker and server", median("cpu"), *spread("cpu")),
        ("CPU seconds per round, LLM.generate", median("raw_cpu"), *spread("raw_cpu")),
        ("one round of Rheostat, seconds", median("seconds"), *spread("seconds")),
        ("of which writing the shard", median("write"), *spread("write")),
        ("of which verifying weights, prompts, texts", median("worker"), *spread("worker")),
    )
    return Table(
        title=f"vLLM, {decoder.name} ({decoder.parameters:,} weights), {DTYPE}: {PROMPTS} prompts × {GROUP}, "
        f"{tokens:,} tokens, batches of {size.max_batch_rows}, {THREADS} thread of {os.cpu_count()} cores",
        columns=("", "median", "least", "most"),
        rows=rows,
        notes=(
            f"{size.rounds} rounds of each, alternating, after a warm-up round; the target is a ratio of 0.95",
            f"LLM.generate without seeds and log-probs, measured once: {plain:,.0f} tokens/s",
        ),
    )
