"""The vLLM engine with a real server: what every engine keeps, and what a server of one's own must survive."""

import os
from collections.abc import Iterator

import pytest

from bench.drawn import DrawnLengths, DrawnVllm
from bench.drawn_engine import DrawnEngine, drawn_length
from infra.errors import WorkerLost
from models.config.engines import SamplingConfig, VllmEngine
from models.engines.vllm.engine import ServedEngine
from models.records.schemas import FinishReason
from tests.support.engines import *  # noqa: F403  # every claim there is one here
from tests.support.engines import (
    MIXED,
    RANK,
    SAMPLING,
    Loaded,
    Published,
    publish,
    request,
    require_plain_logprobs,
    written_by,
)
from tests.vllm.servers import in_the_middle, server_of

pytestmark = pytest.mark.vllm

CONFIG = VllmEngine.model_validate({"cache_gib": 0.1, "python": os.environ.get("VLLM_PYTHON")})
LONG = [request(row, 10, group=8) for row in range(8)]
LONG_SAMPLING = SamplingConfig(max_new_tokens=200)


@pytest.fixture(scope="module")
def engine() -> Iterator[ServedEngine]:
    engine = ServedEngine(CONFIG, adapter_rank=RANK)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def loaded(engine) -> Loaded:
    def load(policy: Published) -> ServedEngine:
        if engine.serves() != policy.version.digest:
            engine.load(policy.directory, policy.version, adapter=policy.adapter)
        return engine

    return load


def test_the_producer_names_versions_and_precision(loaded, policy):
    assert loaded(policy).producer().startswith("vllm 0.32.0, torch 2.13.0")
    assert "float32, processed log-probs" in loaded(policy).producer()


def test_loading_tells_the_bytes_that_were_moved(loaded, policy, tmp_path):
    other = publish(tmp_path, seed=3)
    engine = loaded(policy)
    assert engine.load(policy.directory, policy.version) == 0
    moved = engine.load(other.directory, other.version)
    assert moved == pytest.approx(other.version.weights.bytes, rel=0.2)


@pytest.fixture
def guest(loaded, policy, monkeypatch) -> ServedEngine:
    """Another engine, which asks the same server by its address."""
    [client] = loaded(policy)._servers.running()
    monkeypatch.setenv("SERVERS_KEY", client.key)
    given = {"base_urls": (client.url,), "api_key_variable": "SERVERS_KEY"}
    guest = ServedEngine(VllmEngine.model_validate(given))
    assert guest.load(policy.directory, policy.version) == 0
    return guest


def test_servers_that_run_already_are_asked_by_their_addresses(loaded, policy, guest):
    assert written_by(guest.generate(MIXED, SAMPLING)) == written_by(loaded(policy).generate(MIXED, SAMPLING))


def test_a_policy_that_another_replaced_is_loaded_again_before_the_work(loaded, policy, guest, tmp_path):
    engine, other = loaded(policy), publish(tmp_path, seed=4)
    guest.load(other.directory, other.version)
    require_plain_logprobs(policy, MIXED, engine.generate(MIXED, SAMPLING), 1.0)


def test_no_token_is_of_a_policy_that_another_loaded_in_the_middle_of_the_work(loaded, policy, guest, tmp_path):
    engine, other = loaded(policy), publish(tmp_path, seed=5)
    undisturbed = engine.generate(LONG, LONG_SAMPLING)
    with in_the_middle(engine, lambda: guest.load(other.directory, other.version)):
        groups = engine.generate(LONG, LONG_SAMPLING)
    require_plain_logprobs(policy, LONG, groups, 1.0)
    found_before = zip(written_by(groups), written_by(undisturbed), strict=True)
    pairs = [pair for found, before in found_before for pair in zip(found, before, strict=True)]
    assert any(found == before for found, before in pairs)  # what had ended was kept
    # What was interrupted went on from what it had, with other draws.
    assert any(found != before and found[:4] == before[:4] for found, before in pairs)


def test_a_server_killed_in_the_middle_of_the_work_costs_nothing_but_time(loaded, policy):
    engine = loaded(policy)
    undisturbed = engine.generate(LONG, LONG_SAMPLING)
    first = server_of(engine)
    with in_the_middle(engine, server_of(engine).kill):
        again = engine.generate(LONG, LONG_SAMPLING)
    assert not first.is_running()
    assert server_of(engine) != first
    assert written_by(again) == written_by(undisturbed)
    require_plain_logprobs(policy, LONG, again, 1.0)


def test_a_server_whose_core_is_killed_is_started_again(loaded, policy):
    engine = loaded(policy)
    undisturbed = engine.generate(LONG, LONG_SAMPLING)
    with in_the_middle(engine, server_of(engine).children(recursive=True)[-1].kill):
        again = engine.generate(LONG, LONG_SAMPLING)
    assert written_by(again) == written_by(undisturbed)


def test_a_server_that_died_while_idle_serves_nothing(loaded, policy):
    engine = loaded(policy)
    server = server_of(engine)
    server.kill()
    server.wait(10)
    assert engine.serves() == ""


def test_completions_end_at_drawn_lengths_and_a_server_that_may_not_be_restarted_loses_its_worker(policy):
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
