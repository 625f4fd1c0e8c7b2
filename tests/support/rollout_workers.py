"""Rollout workers and their work."""

import json
from pathlib import Path

import pyarrow as pa

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import write_shard
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.records.schemas import PROMPT_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import RolloutWork
from rheostat.models.workers.rollout import RolloutWorker
from tests.support.policies import small_tokenizer, write_policy

ENGINE = TransformersEngine()

TEXTS = [f"Ana has {n} pens, buys {n + 4}." + " How many?" * (n % 3) for n in range(12)]


def example(store: Store, folder: Path, **shape: object) -> RolloutWork:
    """Work on a random policy and twelve prompts. The work names five of them."""
    columns = {
        "prompt_id": [f"{row:016x}" for row in range(len(TEXTS))],
        "text": TEXTS,
        "tokens": [small_tokenizer().encode(text) for text in TEXTS],
        "images": [[]] * len(TEXTS),
        "answer": [str(row) for row in range(len(TEXTS))],
        "messages": [None] * len(TEXTS),
        "columns": [json.dumps({"number": row}) for row in range(len(TEXTS))],
    }
    return RolloutWork(
        iteration=3,
        policy=publish(store, folder, seed=0, **shape),
        prompts=write_shard(store, pa.table(columns, schema=PROMPT_SCHEMA), kind="prompts", metadata={}),
        rows=(7, 2, 11, 3, 8),
        group_size=4,
        sampling=SamplingConfig(max_new_tokens=16),
        seed=5,
    )


def publish(store: Store, folder: Path, *, seed: int, **shape: object) -> ModelVersion:
    write_policy(folder, seed=seed, changes=shape)
    return ModelVersion(version=seed, weights=publish_bundle(store, folder, prefix="policies"))


def worker(tmp_path: Path) -> RolloutWorker:
    return RolloutWorker(str(tmp_path), "run", ENGINE, 1)


def digest(outcome: Outcome) -> str:
    [ref] = outcome.shards
    return ref.digest
