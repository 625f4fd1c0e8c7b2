"""Rollout shards written by hand."""

import pyarrow as pa

from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, write_shard
from rheostat.models.records.schemas import ROLLOUT_SCHEMA


def rollout(prompt_row: int, sample: int, completion: str, **columns: object) -> dict[str, object]:
    """Make a rollout row: the prompt has as many tokens as its row number, the completion one per character."""
    row = {
        "prompt_row": prompt_row,
        "sample": sample,
        "prompt_id": f"{prompt_row:016x}",
        "prompt": f"prompt {prompt_row}",
        "completion": completion,
        "answer": "1",
        "prompt_tokens": [100 + position for position in range(prompt_row)],
        "images": [],
        "completion_tokens": [10 * sample + position for position in range(len(completion))],
        "logprobs": [-0.5 * position for position in range(len(completion))],
        "finish_reason": "stop",
        "seed": 2**64 - 1,
        **columns,
    }
    return {"segments": [{"policy_version": 2, "tokens": len(row["completion_tokens"])}], **row}


def write_rollouts(store: Store, *rows: dict[str, object]) -> ShardRef:
    table = pa.Table.from_pylist(list(rows), schema=ROLLOUT_SCHEMA)
    return write_shard(store, table, kind="rollouts", metadata={})
