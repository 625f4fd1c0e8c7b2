"""The vLLM engine with its own server: the claims about every engine, and faults of the server."""

import threading
from collections.abc import Iterator

import pytest
import torch

from bench.drawn import DrawnLengths, DrawnVllm
from bench.drawn_engine import DrawnEngine, drawn_length
from rheostat.infra.errors import WorkerLost
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.vllm.engine import ServedEngine
from rheostat.models.records.schemas import FinishReason
from tests.support.engines import *  # noqa: F403  # pytest collects the claims about every engine here
from tests.support.engines import (
    MIXED,
    RANK,
    SAMPLING,
    TOLERANCE,
    Loaded,
    list_tokens,
    load_if_needed,
    publish,
    request,
    require_plain_logprobs,
)
from tests.support.jobs import wait_for
from tests.vllm.servers import CONFIG, guest_of, in_the_middle, server_of

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]  # on a GPU, `make test-gpu` runs them too

LONG = [request(row, 10, group=8) for row in range(8)]
LONG_SAMPLING = SamplingConfig(max_new_tokens=200)

ON_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def engine() -> Iterator[ServedEngine]:
    engine = ServedEngine(CONFIG, adapter_rank=0 if ON_GPU else RANK)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def adapter_engine(engine) -> Iterator[ServedEngine]:
    """Engine for adapters. On GPUs vLLM serves adapters only in 16-bit numbers, so it is another engine there."""
    if not ON_GPU:
        yield engine
        return
    half = ServedEngine(CONFIG.model_copy(update={"dtype": "bfloat16"}), adapter_rank=RANK)
    yield half
    half.close()


@pytest.fixture(scope="module")
def loaded(engine, adapter_engine) -> Loaded:
    return lambda policy: load_if_needed(engine if policy.adapter is None else adapter_engine, policy)


@pytest.fixture
def adapter_tolerance() -> float:
    """bfloat16 has 8 bits of precision: log-probs of about 5 differ from those in float32 by up to 0.02."""
    return 0.05 if ON_GPU else TOLERANCE


def test_the_producer_states_versions_and_precision(loaded, policy):
    assert loaded(policy).producer().startswith("vllm 0.32.0, torch 2.13.0")
    assert "float32, processed log-probs" in loaded(policy).producer()


def test_loading_returns_the_number_of_loaded_bytes(loaded, policy, tmp_path):
    other = publish(tmp_path, seed=3)
    engine = loaded(policy)
    assert engine.load(policy.directory, policy.version) == 0
    moved = engine.load(other.directory, other.version)
    assert moved == pytest.approx(other.version.weights.bytes, rel=0.2)


@pytest.fixture
def guest(loaded, policy, monkeypatch) -> ServedEngine:
    guest = guest_of(loaded(policy), monkeypatch)
    assert guest.load(policy.directory, policy.version) == 0
    return guest


def test_an_engine_can_use_a_running_server_by_its_address(loaded, policy, guest):
    assert list_tokens(guest.generate(MIXED, SAMPLING)) == list_tokens(loaded(policy).generate(MIXED, SAMPLING))


def test_a_policy_that_another_engine_replaced_is_loaded_again_before_the_work(loaded, policy, guest, tmp_path):
    engine, other = loaded(policy), publish(tmp_path, seed=4)
    guest.load(other.directory, other.version)
    require_plain_logprobs(policy, MIXED, engine.generate(MIXED, SAMPLING), 1.0)


def test_no_token_comes_from_a_policy_that_another_engine_loaded_during_the_work(loaded, policy, guest, tmp_path):
    engine, other = loaded(policy), publish(tmp_path, seed=5)
    undisturbed = engine.generate(LONG, LONG_SAMPLING)
    core = server_of(engine).children(recursive=True)[-1]

    def load_other() -> None:
        core.suspend()  # reading a tokenizer must not take longer than the completions
        loading = threading.Thread(target=guest.load, args=(other.directory, other.version))
        loading.start()
        assert wait_for(lambda: guest._policy is not None and guest._policy.digest == other.version.digest)
        core.resume()
        loading.join()

    with in_the_middle(engine, load_other):
        groups = engine.generate(LONG, LONG_SAMPLING)
    require_plain_logprobs(policy, LONG, groups, 1.0)
    found_before = zip(list_tokens(groups), list_tokens(undisturbed), strict=True)
    pairs = [pair for found, before in found_before for pair in zip(found, before, strict=True)]
    assert any(found == before for found, before in pairs)  # completions that had ended were kept
    # Interrupted completions continued from their tokens with other seeds.
    assert any(found != before and found[:4] == before[:4] for found, before in pairs)


def test_a_server_killed_during_the_work_changes_no_completion(loaded, policy):
    engine = loaded(policy)
    undisturbed = engine.generate(LONG, LONG_SAMPLING)
    first = server_of(engine)
    with in_the_middle(engine, server_of(engine).kill):
        again = engine.generate(LONG, LONG_SAMPLING)
    assert not first.is_running()
    assert server_of(engine) != first
    assert list_tokens(again) == list_tokens(undisturbed)
    require_plain_logprobs(policy, LONG, again, 1.0)


def test_a_server_whose_core_is_killed_is_started_again(loaded, policy):
    engine = loaded(policy)
    undisturbed = engine.generate(LONG, LONG_SAMPLING)
    with in_the_middle(engine, server_of(engine).children(recursive=True)[-1].kill):
        again = engine.generate(LONG, LONG_SAMPLING)
    assert list_tokens(again) == list_tokens(undisturbed)


def test_a_server_that_died_while_idle_serves_nothing(loaded, policy):
    engine = loaded(policy)
    server = server_of(engine)
    server.kill()
    server.wait(10)
    assert engine.loaded_digest() == ""


def test_completions_end_at_sampled_lengths_and_a_server_without_restarts_loses_its_worker(policy):
    lengths = DrawnLengths(median_tokens=8, sigma=0.8)
    engine = DrawnEngine(DrawnVllm.model_validate(CONFIG.model_dump() | {"lengths": lengths, "max_restarts": 0}))
    try:
        engine.load(policy.directory, policy.version)
        asked = request(1, 9, group=64)
        [group] = engine.generate([asked], SAMPLING)
        drawn = [drawn_length(lengths, seed) for seed in asked.seeds]
        assert [len(completion.tokens) for completion in group] == [min(length, 24) for length in drawn]
        ends = [FinishReason.STOP if length <= 24 else FinishReason.LENGTH for length in drawn]
        assert [completion.finish_reason for completion in group] == ends
        server = server_of(engine)
        family = [server, *server.children(recursive=True)]
        with (
            in_the_middle(engine, server.kill),
            pytest.raises(WorkerLost, match="after 0 restarts"),
        ):
            engine.generate(LONG * 8, LONG_SAMPLING)
        assert len(family) > 1
        assert not any(process.is_running() for process in family)
    finally:
        engine.close()
