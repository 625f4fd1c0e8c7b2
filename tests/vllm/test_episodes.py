"""Episodes on vLLM's server: they do not wait for each other, and a killed server changes no episode."""

from dataclasses import replace

import numpy as np
import pytest

from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.workers.rollout import RolloutWorker
from tests.support.engines import SHAPE
from tests.support.episodes import STOPS, forward_logprobs, target_environment
from tests.support.rollout_workers import example
from tests.vllm.servers import CONFIG, in_the_middle, server_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def worker(tmp_path):
    settings = target_environment(turn_tokens=20)
    worker = RolloutWorker(str(tmp_path), "run", CONFIG, 1, environment=settings)
    yield worker
    worker.close()


def test_episodes_have_the_trainers_log_probs_also_after_the_server_was_killed(worker, tmp_path):
    store = open_store(f"{tmp_path}/run")
    sampling = STOPS.model_copy(update={"max_new_tokens": 60})
    work = replace(example(store, tmp_path / "policy", **SHAPE), sampling=sampling)
    tables = [read_shard(store, worker.generate(work).shards[0])]
    with in_the_middle(worker._engine, server_of(worker._engine).kill, after=20):
        tables.append(read_shard(store, worker.generate(work).shards[0]))
    undisturbed, killed = (table.drop_columns(["logprobs"]).to_pylist() for table in tables)
    assert undisturbed == killed
    assert sum(len(row["turns"]) > 1 for row in undisturbed) > 5
    for table in tables:
        for computed, recorded in forward_logprobs(tmp_path / "policy", table):
            np.testing.assert_allclose(computed, recorded, atol=1e-4)
