"""Mixtures of experts in a store, and samples whose rollouts recorded the experts."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.records.model_input import expert_lists
from rheostat.models.records.schemas import EXPERTS, SAMPLE_SCHEMA
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import UpdateWork
from tests.support.policies import write_policy
from tests.support.update_workers import update_work

KINDS = ("mixtral", "qwen3_moe")


def publish_mixture(uri: str, kind: str = "mixtral", *, seed: int = 0) -> ModelVersion:
    """Publish a random mixture of experts as the version with the number of its seed."""
    directory = Path(uri, f"{kind}-{seed}")
    write_policy(directory, kind, seed=seed)
    weights = publish_bundle(open_store(f"{uri}/run"), directory, prefix="policies")
    return ModelVersion(version=seed, weights=weights)


def replayed_work(uri: str, policy: ModelVersion, *, layers: int = 3, top: int = 2) -> UpdateWork:
    """Return the work of an update on samples with `top` random experts for each token and layer."""
    work = update_work(uri, policy)
    return replace(work, samples=(_route_samples(uri, work.samples[0], layers, top),))


def _route_samples(uri: str, plain: ShardRef, layers: int, top: int) -> ShardRef:
    """Add random experts to samples; the prompt of a group is routed in two ways."""
    store = open_store(f"{uri}/run")
    table, rng = read_shard(store, plain, SAMPLE_SCHEMA.names).replace_schema_metadata(None), np.random.default_rng(3)

    def route(tokens: int) -> np.ndarray:
        return rng.permuted(np.tile(np.arange(6), (tokens, layers, 1)), axis=2)[:, :, :top].reshape(tokens, -1)

    prompts, rows = {}, []
    for row in table.select(["prompt_row", "sample", "num_prompt_tokens", "tokens"]).to_pylist():
        begin = prompts.setdefault((row["prompt_row"], row["sample"] % 2), route(row["num_prompt_tokens"]))
        rows.append(np.concatenate([begin, route(len(row["tokens"]) - len(begin))])[: len(row["tokens"]) - 1])
    column = expert_lists(np.concatenate(rows).astype(np.uint8), np.array([len(each) for each in rows]))
    return write_shard(store, table.append_column(EXPERTS, column), kind="samples", metadata={})
