"""Judges behind endpoints, and rollouts for judge workers."""

import pyarrow as pa

from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, write_shard
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.judges import EndpointJudge as EndpointConfig
from rheostat.models.config.verdicts import ScoreVerdict
from rheostat.models.judges.endpoint import ChatJudge
from rheostat.models.judges.verdicts import Question
from rheostat.models.records.schemas import ROLLOUT_SCHEMA
from rheostat.models.records.seeds import derive_seed

CANARY = "sk-canary-5f1b9c"


def endpoint_at(url, **changes) -> EndpointConfig:
    """Return the configuration of a judge on this machine that hardly waits between attempts."""
    usual = {"allowed_hosts": ("127.0.0.1",), "allow_private": True, "model": "judge", "backoff_seconds": 0.02}
    return EndpointConfig(base_url=url, **{**usual, **changes})


def judge_at(url, *, verdict=None, sampling=None, **changes):
    return ChatJudge(
        endpoint_at(url, **{"timeout_seconds": 5, **changes}),
        sampling=sampling or SamplingConfig(),
        verdict=verdict or ScoreVerdict(),
    )


def questions(count):
    return [Question(text=f"question {number}", seed=derive_seed("test", number)) for number in range(count)]


def write_rollouts(store: Store, *completions: str) -> ShardRef:
    """Write a shard with one completion for each of the prompts 0+1, 1+1, …, whose answers are 1, 2, …."""
    empty = {"prompt_tokens": [1], "completion_tokens": [1], "logprobs": [0.0], "finish_reason": "stop", "seed": 0}
    rows = [
        {"prompt_row": row, "sample": 0, "prompt": f"{row}+1", "completion": text, "answer": str(row + 1), **empty}
        for row, text in enumerate(completions)
    ]
    return write_shard(store, pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA), kind="rollouts", metadata={})
