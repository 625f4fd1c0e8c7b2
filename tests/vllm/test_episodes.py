"""Episodes on vLLM's real server: each at its own pace, tokens in, tokens out, and a server that is killed."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from infra.store.shards import read_shard
from infra.store.storage import open_store
from models.config.engines import SamplingConfig, VllmEngine
from models.config.environments import TargetEnvironment
from models.modeling.layout import lay_out
from models.modeling.logprobs import ForwardInput, TokenLogprobs
from models.modeling.policy import load_policy
from models.records.model_input import rollout_inputs
from models.workers.rollout import RolloutWorker
from tests.support.engines import SHAPE
from tests.support.rollout_workers import example
from tests.vllm.servers import in_the_middle, server_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CONFIG = VllmEngine.model_validate({"cache_gib": 0.1, "python": os.environ.get("VLLM_PYTHON")})
STOPS = SamplingConfig(max_new_tokens=60, stop=("a", "e", "o", " ", "1", "0"))
"""A random policy seldom ends a turn of itself."""


@pytest.fixture
def worker(tmp_path):
    settings = TargetEnvironment(
        target="tests.support.games:Echo", prompts="text", parser="none", turn_tokens=20, processes=2
    )
    worker = RolloutWorker(str(tmp_path), "run", CONFIG, 1, environment=settings)
    yield worker
    worker.close()


def test_episodes_at_their_own_pace_have_the_trainers_log_probs_also_after_a_kill(worker, tmp_path):
    store = open_store(f"{tmp_path}/run")
    work = replace(example(store, tmp_path / "policy", **SHAPE), sampling=STOPS)
    rows = [read_shard(store, worker.generate(work).shards[0])]

    with in_the_middle(worker._engine, server_of(worker._engine).kill, after=20):
        rows.append(read_shard(store, worker.generate(work).shards[0]))
    ones, others = (table.drop_columns(["logprobs"]).to_pylist() for table in rows)
    assert ones == others
    assert sum(len(row["turns"]) > 1 for row in ones) > 5
    forward = TokenLogprobs(load_policy(tmp_path / "policy", device="cpu", dtype=torch.float32).eval(), temperature=1.0)
    for table in rows:
        for read, row in zip(rollout_inputs(table), table.to_pylist(), strict=True):
            with torch.no_grad():
                found = forward(ForwardInput.of(lay_out([read]), torch.device("cpu"), shares=False)).numpy()
            written = np.array(row["logprobs"])[read.written - read.num_prompt_tokens]
            np.testing.assert_allclose(found, written, atol=1e-4)
