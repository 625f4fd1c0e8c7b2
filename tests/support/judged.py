"""A judge for whole runs, and rollouts for judges."""

from pathlib import Path

import pyarrow as pa

from infra.store.shards import ShardRef, write_shard
from infra.store.storage import open_store
from models.records.schemas import ROLLOUT_SCHEMA

JUDGE = (
    "scoring.rewards=["
    "{kind = 'target', target = 'tests.support.rewards:even', weight = 0.5},"
    "{kind = 'judge', model = {kind = 'trained', warmup = {steps = 30},"
    " shape = {kind = 'scratch', hidden_size = 16, intermediate_size = 32, context = 192}}}]"
)
"""Half of the reward is a rule's, the other half that of a judge which the run trains."""


def rollouts(home: Path, *completions: str, group: int = 2) -> ShardRef:
    rows = [
        {
            "prompt_row": 4 + index // group,
            "sample": index % group,
            "prompt_id": "",
            "prompt": f"prompt {index // group}",
            "completion": completion,
            "answer": "1",
            "prompt_tokens": [1],
            "completion_tokens": [1],
            "logprobs": [0.0],
            "finish_reason": "stop",
            "seed": 0,
            "segments": [],
        }
        for index, completion in enumerate(completions)
    ]
    table = pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA)
    return write_shard(open_store(f"{home}/run"), table, kind="rollouts", metadata={})
