"""Speed of writing and reading shards of rollouts, including hashing and fsync."""

import statistics
import tempfile
import time

import numpy as np
import pyarrow as pa

from bench.tables import Table
from rheostat.infra.store.shards import ShardRef, read_shard, verify_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.records.schemas import ROLLOUT_SCHEMA

ROUNDS = 5
PROMPT_TOKENS, COMPLETION_TOKENS = 200, 800
ROWS = 5700  # about 64 MB


def rollouts(seed: int) -> pa.Table:
    """Build a random table of rollouts with the size of a real shard: token IDs, log-probs and text.

    Each row has 200 prompt tokens and 800 completion tokens, with about 4 bytes of text per token.
    """
    random = np.random.default_rng(seed)
    text = random.integers(97, 123, 4 * COMPLETION_TOKENS, dtype=np.uint8).tobytes().decode()
    columns = {
        "prompt_row": np.arange(ROWS, dtype=np.int32) // 8,
        "sample": (np.arange(ROWS) % 8).astype(np.int16),
        "prompt_id": [f"{row // 8:016x}" for row in range(ROWS)],
        "prompt": [text[: 4 * PROMPT_TOKENS]] * ROWS,
        "completion": [text[row % 64 :] + str(row) for row in range(ROWS)],
        "answer": [str(row) for row in range(ROWS)],
        "prompt_tokens": list(random.integers(0, 150_000, (ROWS, PROMPT_TOKENS), dtype=np.int32)),
        "images": [[]] * ROWS,
        "completion_tokens": list(random.integers(0, 150_000, (ROWS, COMPLETION_TOKENS), dtype=np.int32)),
        "logprobs": list(-random.random((ROWS, COMPLETION_TOKENS), dtype=np.float32)),
        "finish_reason": ["stop"] * ROWS,
        "seed": random.integers(0, 2**63, ROWS).astype(np.uint64),
        "segments": [[{"policy_version": 1, "tokens": COMPLETION_TOKENS}]] * ROWS,
        "turns": [None] * ROWS,
        "messages": [None] * ROWS,
    }
    return pa.table(columns, schema=ROLLOUT_SCHEMA)


def measure() -> list[Table]:
    """Measure the seconds and MB/s of writing, verifying and reading a shard of rollouts.

    Every byte is read, from files that the kernel has cached.
    """
    durations: dict[str, list[float]] = {"write": [], "verify": [], "read, first": [], "read, again": []}
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as directory:
        store = open_store(directory)
        for seed in range(ROUNDS):
            table = rollouts(seed)
            started = time.perf_counter()
            ref = write_shard(store, table, kind="rollouts", metadata={})
            marks = [started, time.perf_counter()]
            verify_shard(store, ref)
            marks.append(time.perf_counter())
            for _ in range(2):
                _touch(read_shard(store, ref))
                marks.append(time.perf_counter())
            for seconds, begin, end in zip(durations.values(), marks[:-1], marks[1:], strict=True):
                seconds.append(end - begin)
            store.delete(ref.key)
    return [_table(ref, durations)]


def _touch(table: pa.Table) -> None:
    """Read one byte of every memory page of a table, so that the whole file is loaded."""
    for column in table.columns:
        for chunk in column.chunks:
            for buffer in chunk.buffers():
                if buffer is not None:
                    np.frombuffer(buffer, np.uint8)[::4096].sum()


def _table(ref: ShardRef, durations: dict[str, list[float]]) -> Table:
    megabytes = ref.bytes / 1e6
    what = {
        "write": "encode, BLAKE3, write, fsync",
        "verify": "BLAKE3 and decode",
        "read, first": "map, BLAKE3, decode, touch every page",
        "read, again": "map, decode, touch every page",
    }
    return Table(
        title=f"Shards of {megabytes:.0f} MB, {ref.rows} rollouts: median of {ROUNDS}",
        columns=("", "seconds", "MB/s", "slowest MB/s"),
        rows=tuple(
            (
                f"{name}: {what[name]}",
                statistics.median(seconds),
                megabytes / statistics.median(seconds),
                megabytes / max(seconds),
            )
            for name, seconds in durations.items()
        ),
        notes=("one process on a local disk; files are read from the page cache",),
    )
