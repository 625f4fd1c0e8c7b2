"""Agents and public suites on vLLM's server: tokens and log-probs of turns, and log-probs of prompts."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from rheostat.infra.errors import BadInput
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.vllm.engine import ServedEngine
from rheostat.models.workers.rollout import RolloutWorker
from tests.support.engines import (
    CONTEXT,
    RANK,
    SHAPE,
    TOLERANCE,
    VOCABULARY,
    Published,
    publish,
    publish_changed,
    request,
)
from tests.support.episodes import agent, chat_episodes, forward_logprobs
from tests.vllm.servers import CONFIG, in_the_middle, server_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOP = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Published:
    return publish(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def engine(policy) -> Iterator[ServedEngine]:
    engine = ServedEngine(CONFIG)
    engine.load(policy.directory, policy.version)
    yield engine
    engine.close()


def require_scores(engine, policy, sequences, suppressed=()):
    """Check the log-probs of sequences, and the most probable tokens, against a forward pass."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda tokens: engine.score_tokens(tokens, TOP), sequences))
    model = policy.model()
    for tokens, scores in zip(sequences, found, strict=True):
        with torch.inference_mode():
            logits_TV = model(torch.tensor([tokens])).logits[0, :-1]
            logits_TV[:, list(suppressed)] = -torch.inf
            expected_TV = logits_TV.log_softmax(dim=-1)
        expected = expected_TV.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
        np.testing.assert_allclose(scores.logprobs, expected, atol=TOLERANCE)
        best = expected_TV.topk(TOP, dim=1)
        assert [[token for token, _ in place] for place in scores.best] == best.indices.tolist()
        np.testing.assert_allclose(
            [[logprob for _, logprob in place] for place in scores.best], best.values, atol=TOLERANCE
        )


def sequence(length):
    return np.random.default_rng(length).integers(2, 60, length).tolist()


def test_log_probs_of_prompts_are_those_of_a_forward_pass_up_to_the_end_of_the_context(engine, policy):
    require_scores(engine, policy, [sequence(length) for length in (2, 9, 40, CONTEXT - 1)])
    assert [len(place) for place in engine.score_tokens([5, 6, 7], 0).best] == [0, 0]
    assert engine.score_tokens([5], TOP).logprobs == ()
    with pytest.raises(BadInput, match=f"{CONTEXT}"):
        engine.score_tokens([5] * CONTEXT, TOP)


def test_suppressed_tokens_have_probability_0_in_log_probs_of_prompts(engine, policy, tmp_path):
    suppressed = range(100, VOCABULARY)
    suppress = {"suppress_tokens": [*suppressed]}
    changed = publish_changed(
        tmp_path, policy, lambda folder: (folder / "generation_config.json").write_text(json.dumps(suppress))
    )
    requests, sampling = [request(row, 4, group=4) for row in range(4)], SamplingConfig(max_new_tokens=8)
    before = engine.generate(requests, sampling)
    engine.load(changed.directory, changed.version)
    require_scores(engine, changed, [sequence(9), [5, 6, suppressed[0], 7]], suppressed)
    engine.load(policy.directory, policy.version)
    assert engine.generate(requests, sampling) == before, "the next policy may generate all tokens"
    require_scores(engine, policy, [sequence(9)])


def test_an_abandoned_request_ends_early(engine):
    begun, abandoned = time.monotonic(), threading.Event()
    threading.Timer(0.5, abandoned.set).start()
    requests = [replace(request(row, 10, group=8), abandoned=abandoned) for row in range(8)]
    with pytest.raises(CancelledError):
        while time.monotonic() - begun < 60:
            engine.generate(requests, SamplingConfig(max_new_tokens=200))


def test_a_killed_server_is_started_again_for_the_log_probs_of_a_prompt(engine):
    before = engine.score_tokens([5, 6, 7, 8], TOP)
    server_of(engine).kill()
    assert engine.score_tokens([5, 6, 7, 8], TOP) == before


def test_log_probs_of_prompts_with_adapters_are_refused_on_a_cpu(policy):
    engine = ServedEngine(CONFIG, adapter_rank=RANK)
    try:
        engine.load(policy.directory, policy.version)
        with pytest.raises(BadInput, match="with adapters on a CPU"):
            engine.score_tokens([5, 6, 7], TOP)
    finally:
        engine.close()


def test_turns_of_agents_have_the_trainers_log_probs_also_after_the_server_was_killed(tmp_path):
    episodes = chat_episodes(tmp_path, max_new_tokens=900, **SHAPE)
    worker = RolloutWorker(str(tmp_path), "run", CONFIG, 1, environment=agent(agent_seconds=300))
    try:
        tables = [read_shard(episodes.store, worker.generate(episodes.work).shards[0])]
        with in_the_middle(worker._engine, server_of(worker._engine).kill, after=20):
            tables.append(read_shard(episodes.store, worker.generate(episodes.work).shards[0]))
    finally:
        worker.close()
    for table in tables:
        for row in table.to_pylist():
            assert [turn["error"] for turn in row["turns"]] == [None] * 3
            assert [turn["parent"] for turn in row["turns"]] == [None, 0, 1]
            last = row["messages"][-1]
            assert [turn["reward"] for turn in row["turns"]] == [0.5, None, len(last["content"])]
        for computed, recorded in forward_logprobs(episodes.policy, table):
            np.testing.assert_allclose(computed, recorded, atol=1e-3)
