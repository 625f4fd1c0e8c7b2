"""Small real policies and training samples for tests of the update."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import ShardRef, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.data.problems import load_problems
from rheostat.models.modeling.policy import build_scratch, save_policy
from rheostat.models.records.schemas import SAMPLE_SCHEMA
from rheostat.models.records.versions import ModelVersion
from rheostat.models.text.tokenizer import scratch_tokenizer
from tests.support.demos import ArithmeticData

TINY = ScratchPolicy(hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2)
DATA = ArithmeticData(train_problems=64, heldout_problems=8)


def publish_scratch(store_uri: str, directory: Path, *, policy: ScratchPolicy = TINY, seed: int = 0) -> ModelVersion:
    """Build a policy and publish it as version 0."""
    tokenizer = scratch_tokenizer(policy, load_problems(DATA, "train", 0))
    save_policy(build_scratch(policy, tokenizer, seed=seed), tokenizer, directory)
    return ModelVersion(version=0, weights=publish_bundle(open_store(store_uri), directory, prefix="policies"))


def write_samples(
    store_uri: str,
    *,
    prompts: int = 6,
    group: int = 4,
    seed: int = 0,
    advantages: list[float] | None = None,
    filling: int = 0,
    critic: bool = False,
    stalest: int = 0,
) -> ShardRef:
    """Write random samples of random lengths; `advantages` replaces those of the first completions.

    `filling` more groups follow that have no token in the loss. With a critic, samples have values and returns.
    Tokens are up to `stalest` versions old.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for prompt in range(prompts):
        shared = rng.integers(2, 300, rng.integers(3, 12)).tolist()
        for sample in range(group):
            length = int(rng.integers(1, 20))
            advantage = rng.normal() if advantages is None or len(rows) >= len(advantages) else advantages[len(rows)]
            rows.append(
                {
                    "prompt_row": prompt,
                    "sample": sample,
                    "tokens": shared + rng.integers(2, 300, length).tolist(),
                    "num_prompt_tokens": len(shared),
                    "logprobs": (-5.8 + 0.1 * rng.normal(size=length)).tolist(),
                    "advantages": [advantage] * length,
                    "staleness": rng.integers(0, stalest + 1, length).tolist() if stalest else [0] * length,
                }
            )
    for prompt in range(prompts, prompts + filling):
        empty = {"tokens": [5, 6, 7], "num_prompt_tokens": 3, "logprobs": [], "advantages": [], "staleness": []}
        rows += [{"prompt_row": prompt, "sample": sample} | empty for sample in range(group)]
    if critic:
        for row in rows:
            length = len(row["logprobs"])
            row |= {name: rng.normal(size=length).astype(np.float32).tolist() for name in ("values", "returns")}
    return write_shard(open_store(store_uri), pa.Table.from_pylist(rows, SAMPLE_SCHEMA), kind="samples", metadata={})
