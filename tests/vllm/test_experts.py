"""The experts that the routers of a mixture chose in vLLM, as servers report them and as training uses them.

The cache of the servers holds few sequences, so vLLM preempts requests and computes them again.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rheostat.infra.store.runs import open_run
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.vllm.engine import ServedEngine
from rheostat.models.modeling.experts import record_chosen_experts
from rheostat.models.records.schemas import EXPERTS, FinishReason
from tests.support.engines import (
    MIXED,
    SAMPLING,
    SHAPE,
    Published,
    find_readable_completion,
    list_tokens,
    publish,
    request,
    require_plain_logprobs,
)
from tests.support.in_process import InProcessJob
from tests.support.inputs import request_continuations
from tests.support.jobs import wait_for
from tests.support.policies import small_tokenizer, write_policy
from tests.vllm.servers import (
    CONFIG,
    PYTHON_SETTING,
    build_request,
    guest_of,
    in_the_middle,
    meddling_server,
    server_of,
)

pytestmark = pytest.mark.vllm

NARROW = CONFIG.model_copy(update={"cache_gib": 0.006})
LONG = [request(row, 10 + row, group=8) for row in range(4)]
LONG_SAMPLING = SamplingConfig(max_new_tokens=200)
LAYERS, CHOSEN = 3, 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Published:
    return publish(tmp_path_factory.mktemp("mixture"), "qwen3_moe", eos_share=0.005)


@pytest.fixture(scope="module")
def engine(policy) -> Iterator[ServedEngine]:
    engine = ServedEngine(NARROW)
    engine.record_experts(True)
    engine.load(policy.directory, policy.version)
    yield engine
    engine.close()


def require_own_choices(policy: Published, requests, groups) -> None:
    """Compare with a forward pass over each sequence alone. The order of the three experts does not matter."""
    model, found, alike = policy.model(), 0, 0
    for each, group in zip(requests, groups, strict=True):
        for given, completion in zip(each.inputs, group, strict=True):
            read = given.append_completion(completion.tokens).tokens[:-1]
            with torch.no_grad(), record_chosen_experts(model) as choices:
                model(torch.from_numpy(read)[None].long())
            own, reported = (
                np.sort(chosen.reshape(-1, LAYERS, CHOSEN)) for chosen in (choices.pop_choices(), completion.experts)
            )
            assert completion.experts.dtype == np.uint8 and reported.shape == own.shape
            found, alike = found + own[..., 0].size, alike + int((reported == own).all(axis=-1).sum())
    assert alike / found > 0.999, (alike, found)


def test_the_experts_of_every_token_equal_those_of_a_forward_pass_over_the_sequence(engine, policy):
    require_own_choices(policy, MIXED, engine.generate(MIXED, SAMPLING))
    groups = engine.generate(LONG, LONG_SAMPLING)
    assert sum(len(completion.tokens) for group in groups for completion in group) > 32 * 100
    require_own_choices(policy, LONG, groups)


def test_a_completion_that_continues_has_the_experts_of_its_prefix(engine, policy):
    begun = [[completion.tokens[:5] for completion in group] for group in engine.generate(MIXED, SAMPLING)]
    on = [request_continuations(each, prefixes) for each, prefixes in zip(MIXED, begun, strict=True)]
    require_own_choices(policy, on, engine.generate(on, SAMPLING))


def test_a_completion_that_a_stop_text_ends_has_the_experts_up_to_its_last_token(engine, policy):
    once, whole = find_readable_completion(engine, request(5, 12, group=16))
    text = small_tokenizer().decode(whole.tokens[:5])
    [[cut]] = engine.generate([once], SAMPLING.model_copy(update={"stop": (text[-2:],)}))
    assert cut.finish_reason is FinishReason.STOP and len(cut.tokens) < len(whole.tokens)
    require_own_choices(policy, [once], [[cut]])


def test_experts_are_reported_only_on_request(engine):
    engine.record_experts(False)
    try:
        assert all(each.experts is None for group in engine.generate(MIXED, SAMPLING) for each in group)
    finally:
        engine.record_experts(True)


def test_completions_that_continue_after_other_weights_were_loaded_have_all_experts(
    engine, policy, tmp_path, monkeypatch
):
    other = publish(tmp_path, "qwen3_moe", seed=5)
    guest = guest_of(engine, monkeypatch, NARROW)
    guest.record_experts(True)
    guest.load(policy.directory, policy.version)
    undisturbed = engine.generate(LONG, LONG_SAMPLING)
    with in_the_middle(engine, lambda: guest.load(other.directory, other.version)):
        groups = engine.generate(LONG, LONG_SAMPLING)
    assert list_tokens(groups) != list_tokens(undisturbed)
    require_own_choices(policy, LONG, groups)


def test_a_server_that_restarts_during_the_work_reports_experts(engine, policy):
    with in_the_middle(engine, server_of(engine).kill):
        groups = engine.generate(LONG, LONG_SAMPLING)
    require_own_choices(policy, LONG, groups)


def test_a_mixture_computes_with_the_weights_loaded_last(engine, policy, tmp_path):
    other = publish(tmp_path, "qwen3_moe", seed=5)
    for one in (policy, other, policy):
        engine.load(one.directory, one.version)
        require_plain_logprobs(one, MIXED, engine.generate(MIXED, SAMPLING), 1.0)


def test_experts_of_abandoned_completions_are_dropped(policy):
    with meddling_server(policy.directory, report_experts=True) as server:
        server.load(policy)

        def noted() -> int:
            return int(server.get("/rheostat/noted").text)

        many = [build_request(row, [5, 6, 7], seed=row, max_tokens=200, experts=True) for row in range(8)]
        with server.slowed():
            with server.generating(policy.version.digest, many) as lines:
                next(lines)
                assert noted() == 8
            assert wait_for(lambda: noted() == 0, seconds=60)
        server.generate(policy.version.digest, [*many, build_request(8, [5], max_tokens=200)])
        assert noted() == 0


RUN = (
    *(f"policy.{name}=" for name in ("heads", "kv_heads", "layers", "hidden_size", "intermediate_size")),
    "policy.kind=directory",
    "warmup=",
    f"rollout.engine={{kind='vllm', cache_gib=0.05{PYTHON_SETTING}}}",
    "rollout.sampling.max_new_tokens=24",
    "rollout.prompts=4",
    "rollout.shard_prompts=2",
    """scoring.rewards=[{kind="target", target="tests.support.rewards:length"}]""",
    "pools.workers=1",
    "iterations=2",
    "evaluation.problems=2",
    "algorithm.kind=grpo",
    "update.router_replay=rollout",
)


@pytest.mark.timeout(600)
def test_a_run_trains_with_the_experts_that_its_servers_chose(tmp_path, prefect_api):
    write_policy(tmp_path / "mixture", "qwen3_moe", eos_share=0.15, changes=SHAPE)
    job = InProcessJob(tmp_path / "job", prefect_api)
    job.train(*RUN, f"policy.path={tmp_path / 'mixture'}")
    run, num_samples = open_run(str(job.store), "tiny"), 0
    for number in (1, 2):
        manifests = {stage: [] for stage in ("rollout", "credit")}
        for manifest in run.manifests(f"it-{number:04d}"):
            for stage, tables in manifests.items():
                if f"/{stage}" in manifest.key:
                    tables += [read_shard(run.store, shard) for shard in manifest.shards]
        rolled = {
            (row["prompt_row"], row["sample"]): row[EXPERTS]
            for table in manifests["rollout"]
            for row in table.to_pylist()
        }
        for row in (row for table in manifests["credit"] for row in table.to_pylist()):
            assert row[EXPERTS] == rolled[row["prompt_row"], row["sample"]][: len(row["tokens"]) - 1]
            assert np.array(row[EXPERTS]).shape == (len(row["tokens"]) - 1, LAYERS * CHOSEN)
            num_samples += 1
        assert run.require(f"it-{number:04d}/update").metrics["mismatch_difference_max"] < 1e-3
    assert num_samples > 0
    [evaluated, *_] = [each for each in run.manifests("eval-0000") if "/rollout" in each.key]
    assert EXPERTS not in read_shard(run.store, evaluated.shards[0]).column_names
