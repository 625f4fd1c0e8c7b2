"""The vLLM engine with running servers that return valid or invalid answers."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bench.drawn import DrawnLengths
from bench.drawn_engine import drawn_length
from rheostat.infra.errors import BadInput, EndpointDown, Quarantined, WorkerFailed, WorkerLost
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.vllm.engine import MAX_LOADS
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.seeds import derive_seed
from tests.support.batch_server import ABOUT, BatchServer, Line, batch_server, chunk, experts, experts_of, tokens_of
from tests.support.engines import list_tokens, request
from tests.support.inputs import request_completions, request_continuations
from tests.support.policies import small_tokenizer

SAMPLING = SamplingConfig(max_new_tokens=12)
WORK = [request(row, 9) for row in range(3)]
EXPECTED = [[tuple(tokens_of(seed % 2**63, 12)) for seed in each.seeds] for each in WORK]
"""Tokens that the server generates for the seeds of the work."""

Lines = list[Line]


def spoil_first(change: Callable[[Lines], Lines]) -> Callable[[int, Lines], Lines]:
    """Return a function that changes the first answer of a server and no other answer."""
    return lambda number, lines: change(lines) if number == 0 else lines


def test_completions_are_those_that_the_server_generates_for_the_seeds(serve):
    engine, [server] = serve()
    groups = engine.generate(WORK, SAMPLING)
    assert list_tokens(groups) == EXPECTED
    for completion in (one for group in groups for one in group):
        assert completion.logprobs == (-0.5,) * 12
        assert completion.text == small_tokenizer().decode(completion.tokens, skip_special_tokens=True)
        assert completion.finish_reason is FinishReason.LENGTH
    assert server.asked[0]["sampling"]["stop_token_ids"] == [small_tokenizer().eos_token_id]


def test_seeds_fit_the_signed_64_bits_in_which_vllm_stores_them_on_gpus(serve):
    engine, [server] = serve()
    engine.generate([request_completions(0, (5, 6), (2**63 - 1, 2**63, 2**64 - 1, 7))], SAMPLING)
    assert [body["seed"] for body in server.asked[0]["requests"]] == [2**63 - 1, 0, 2**63 - 1, 7]


def test_an_engine_uses_a_server_only_if_the_server_proves_its_policy(serve, policy):
    engine, [server] = serve()
    assert engine.loaded_digest() == policy.version.digest
    server.proofs = [""]
    assert engine.loaded_digest() == ""
    server.digest = "another"
    assert engine.loaded_digest() == ""


def test_whole_groups_are_spread_over_servers(serve):
    engine, servers = serve(2)
    assert list_tokens(engine.generate(WORK, SAMPLING)) == EXPECTED
    prompts = [[tuple(one["tokens"]) for one in server.asked[0]["requests"]] for server in servers]
    first, second, third = (tuple(each.inputs[0].tokens.tolist()) for each in WORK)
    assert prompts == [[first] * 4 + [third] * 4, [second] * 4]


# ---- likelihoods


def test_likelihoods_have_the_order_of_the_prompts(serve):
    engine, _ = serve(2, settings={"max_batch_rows": 1})
    before = engine.progress
    prompts = [ModelInput.from_prompt([5] * length) for length in range(1, 12)]
    assert engine.score_continuations(prompts, [[1], [1, 2]]) == [
        (-length - 1.0, -length - 2.0) for length in range(1, 12)
    ]
    assert engine.progress == before + 3  # four prompts each time


def test_likelihoods_that_are_not_finite_are_refused_with_the_policys_digest(serve, policy):
    engine, _ = serve(token_logprob=float("nan"))
    with pytest.raises(Quarantined, match=f"policy {policy.version.digest}.*NaN or infinite"):
        engine.score_continuations([ModelInput.from_prompt([5])], [[1]])


def test_likelihoods_are_requested_again_if_the_policy_is_not_proven_afterwards(serve):
    engine, [server] = serve()
    server.proofs, before = [""], engine.progress
    assert engine.score_continuations([ModelInput.from_prompt([5])], [[1]]) == [(-2.0,)]
    assert (server.loads, engine.progress - before) == (2, 3)


# ---- a server that serves another policy


@pytest.mark.parametrize(
    ("state", "spoil", "num_requests"),
    [
        pytest.param({"digest": "another"}, lambda lines: lines, [12], id="replaced before the work"),
        pytest.param({"proofs": [""]}, lambda lines: lines, [12, 12], id="not proven after the work"),
        pytest.param(
            {},
            lambda lines: [{"id": 0, "error": "tokens of two policies", "digest": "another"}, *lines],
            [12, 12],
            id="replaced during the work",
        ),
    ],
)
def test_work_for_a_policy_that_was_replaced_is_done_again(serve, state, spoil, num_requests):
    engine, [server] = serve(spoil=spoil_first(spoil))
    for name, value in state.items():
        setattr(server, name, value)
    assert list_tokens(engine.generate(WORK, SAMPLING)) == EXPECTED
    assert server.loads == 2
    assert [len(body["requests"]) for body in server.asked] == num_requests


def test_a_server_that_never_proves_its_policy_loses_the_worker(serve):
    engine, [server] = serve()
    server.proofs = [""] * 100
    with pytest.raises(WorkerLost, match=r"must serve .* 3 times"):
        engine.generate(WORK, SAMPLING)
    assert len(server.asked) == MAX_LOADS + 1


def test_a_server_that_loads_another_policy_loses_the_worker(serve, policy):
    engine, [server] = serve()
    server.digest_of = lambda directory: "another"
    with pytest.raises(WorkerLost, match=f"{policy.version.digest}.*'another'"):
        engine.load(policy.directory, policy.version)
    assert engine.loaded_digest() == ""


def test_threads_share_the_servers_and_one_of_them_reloads_the_policy_for_all(serve):
    engine, [server] = serve()
    server.digest, server.proofs = "another", [""]
    loads, began = server.loads, []

    def work(generate):
        began.append(len(server.asked))
        with ThreadPoolExecutor(8) as threads:
            return [*threads.map(lambda each: generate([each], SAMPLING), WORK * 4)]

    groups = engine.run_interleaved(work)
    assert [list_tokens(group) for group in groups] == [[each] for each in EXPECTED] * 4
    assert len(began) == 2  # since the first proof failed
    assert server.loads - loads == 2
    assert engine.step_sums().steps <= server.steps


# ---- bad answers

UNEVEN = dict(chunk(0, [5, 6], finish=None)) | {"tokens": chunk(0, [5], finish=None)["tokens"]}
NAN = chunk(1, [5] * 12, finish="stop", logprob=float("nan"))
WHOLE = chunk(0, [5] * 12, finish="length")
TWO_BYTES = {"experts": experts(1, 20)["experts"] | {"dtype": "<u2"}}
ABORTED = chunk(0, [7, 8, 9], finish="abort")


@pytest.mark.parametrize(
    ("error", "message", "spoil"),
    [
        (EndpointDown, "broke off.*`rheostat engine serve vllm`", lambda lines: [*lines[:9], None]),
        (EndpointDown, '\'{"id": 2, "tok\'', lambda lines: [*lines[:4], b'{"id": 2, "tok\n', *lines[4:]]),
        (EndpointDown, "before its response was complete", lambda lines: lines[:9]),
        (EndpointDown, "1 tokens .*2 log-prob", lambda lines: [UNEVEN, *lines]),
        (WorkerFailed, "1 completion did not end", lambda lines: [*lines[:-2], lines[-1]]),
        (WorkerFailed, "completion 99", lambda lines: [chunk(99, [5], finish="length"), *lines]),
        (WorkerFailed, "at 2 tokens .* at 12 tokens", lambda lines: [chunk(0, [5, 6], finish="length"), *lines[2:]]),
        (Quarantined, "policy .*prompt row 0, sample 1", lambda lines: [*lines[:2], NAN, *lines[4:]]),
    ],
)
def test_a_bad_answer_is_refused_and_the_server_is_not_queried_again(serve, policy, error, message, spoil):
    engine, [server] = serve(spoil=spoil_first(spoil))
    with pytest.raises(error, match=message) as refused:
        engine.generate(WORK, SAMPLING)
    assert len(server.asked) == 1
    assert error is not Quarantined or policy.version.digest in str(refused.value)
    assert list_tokens(engine.generate(WORK, SAMPLING)) == EXPECTED


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("experts of 20 tokens, but it returned none", WHOLE),
        ("experts of 20 tokens, but it returned 38 bytes", WHOLE | experts(1, 19)),
        ("returned 40 bytes", WHOLE | TWO_BYTES),
        ("2 experts per token, but 3 for earlier tokens", ABORTED | experts(1, 11, width=3)),
    ],
)
def test_experts_of_other_tokens_or_layers_are_a_failure_of_the_server(serve, message, line):
    engine, _ = serve(spoil=spoil_first(lambda lines: [line, *lines[2:]]))
    engine.record_experts(True)
    with pytest.raises(WorkerFailed, match=message):
        engine.generate(WORK, SAMPLING)


def test_a_failure_belongs_to_the_work_if_the_server_is_healthy_and_else_to_the_server(serve):
    engine, [server] = serve(spoil=lambda _, lines: [*lines[:9], {"error": "RuntimeError: out of memory"}])
    with pytest.raises(WorkerFailed, match="RuntimeError: out of memory"):
        engine.generate(WORK, SAMPLING)
    server.healthy = False
    with pytest.raises(EndpointDown, match="out of memory"):
        engine.generate(WORK, SAMPLING)


def test_a_server_that_does_not_answer_is_down(serve):
    _, [server] = serve()
    with batch_server(BatchServer(lambda directory: "")) as other:
        gone = other.url
    with pytest.raises(EndpointDown, match=f"{gone} .*ConnectError: .*refused"):
        serve(settings={"base_urls": (server.url, gone)})


# ---- interrupted completions


def test_an_aborted_completion_continues_from_its_tokens_with_another_seed(serve):
    engine, [server] = serve(spoil=spoil_first(lambda lines: [ABORTED, *lines[2:]]))
    [[first, *others], *rest] = engine.generate(WORK, SAMPLING)
    assert list_tokens([others, *rest]) == [EXPECTED[0][1:], *EXPECTED[1:]]
    seed = derive_seed("continued", WORK[0].seeds[0], 3) % 2**63
    assert first.tokens == (7, 8, 9, *tokens_of(seed, 9))
    [again] = server.asked[1]["requests"]
    assert (again["tokens"], again["seed"], again["max_tokens"]) == ([*WORK[0].inputs[0].tokens, 7, 8, 9], seed, 9)


def test_a_completion_that_is_always_interrupted_loses_the_worker(serve):
    engine, [server] = serve(spoil=lambda _, lines: [chunk(0, [], finish="abort"), *lines[2:]])
    with pytest.raises(WorkerLost, match="9 times"):
        engine.generate(WORK, SAMPLING)
    assert [len(body["requests"]) for body in server.asked] == [12] + [1] * 8


@pytest.mark.parametrize("records_experts", [False, True])
def test_a_stop_text_across_an_interruption_ends_a_completion_and_its_experts(serve, records_experts):
    begun, rest = (small_tokenizer()(text)["input_ids"] for text in ("Ana has ", "pens and more"))

    def in_two_parts(number: int, lines: Lines) -> Lines:
        part = chunk(0, rest, finish="stop") if number else chunk(0, begun, finish="abort")
        if records_experts:
            part |= experts(1 + number, 9 + len(begun) - 1 + number * len(rest))
        return [part, lines[-1]]

    engine, _ = serve(spoil=in_two_parts)
    engine.record_experts(records_experts)
    sampling = SamplingConfig(max_new_tokens=40, stop=("has pens",))
    [[completion]] = engine.generate([request(0, 9, group=1)], sampling)
    assert completion.text == "Ana has pens"
    assert completion.finish_reason is FinishReason.STOP
    assert len(completion.logprobs) == len(completion.tokens) < len(begun + rest)
    if records_experts:
        assert len(completion.experts) == 9 + len(completion.tokens) - 1


def test_a_prefix_is_part_of_the_prompt_and_changes_the_seed(serve):
    engine, [server] = serve()
    [[one, two]] = engine.generate(
        [request_continuations(request_completions(0, (5, 6), (1, 2)), ((7,), (8, 9)), budget=3)], SAMPLING
    )
    requests = [(tuple(body["tokens"]), body["seed"], body["max_tokens"]) for body in server.asked[0]["requests"]]
    seeds = derive_seed("continued", 1, 1) % 2**63, derive_seed("continued", 2, 2) % 2**63
    assert requests == [((5, 6, 7), seeds[0], 3), ((5, 6, 8, 9), seeds[1], 3)]
    assert one.text == small_tokenizer().decode((7, *tokens_of(seeds[0], 3)), skip_special_tokens=True)
    assert {one.finish_reason, two.finish_reason} == {FinishReason.CUT}


# ---- experts


def test_experts_of_all_tokens_but_the_last_are_reported_on_request(serve):
    engine, [server] = serve()
    assert all(each.experts is None for group in engine.generate(WORK, SAMPLING) for each in group)
    engine.record_experts(True)
    groups = engine.generate(WORK, SAMPLING)
    assert [{one["experts"] for one in body["requests"]} for body in server.asked] == [{False}, {True}]
    for each, group in zip(WORK, groups, strict=True):
        for seed, completion in zip(each.seeds, group, strict=True):
            np.testing.assert_array_equal(completion.experts, experts_of(seed % 2**63, 9 + 11))
            assert completion.experts.dtype == np.uint8


def test_tokens_keep_the_experts_of_the_request_that_generated_them(serve):
    def abort_twice(number: int, lines: Lines) -> Lines:
        parts = {0: ABORTED | experts(100, 9 + 2), 1: chunk(0, [], finish="abort")}
        return [parts[number], lines[-1]] if number in parts else lines

    engine, _ = serve(spoil=abort_twice)
    engine.record_experts(True)
    [[completion]] = engine.generate([request(0, 9, group=1)], SAMPLING)
    seed = derive_seed("continued", request(0, 9, group=1).seeds[0], 3) % 2**63
    assert completion.tokens == (7, 8, 9, *tokens_of(seed, 9))
    np.testing.assert_array_equal(completion.experts[:11], experts_of(100, 11))
    np.testing.assert_array_equal(completion.experts[11:], experts_of(seed, 9 + 11)[11:])


def test_router_replay_refuses_a_server_that_does_not_report_experts(serve):
    engine, [server] = serve(about=ABOUT | {"tells_experts": False})
    engine.generate(WORK, SAMPLING)
    engine.record_experts(True)
    with pytest.raises(BadInput, match=r"update\.router_replay"):
        engine.generate(WORK, SAMPLING)
    assert len(server.asked) == 1


# ---- lengths, steps and settings


def test_sampled_lengths_replace_the_end_of_sequence_of_the_policy(serve):
    lengths = DrawnLengths(median_tokens=6, sigma=0.8)
    engine, [server] = serve(settings={"lengths": lengths.model_dump()})
    prompt = request(0, 9, group=64)
    [group] = engine.generate([prompt], SAMPLING.model_copy(update={"stop": ("x",)}))
    sampled = [drawn_length(lengths, seed) for seed in prompt.seeds]
    assert 4 < np.median(sampled) < 9
    assert [len(one.tokens) for one in group] == [min(length, 12) for length in sampled]
    ends = [FinishReason.STOP if length <= 12 else FinishReason.LENGTH for length in sampled]
    assert [one.finish_reason for one in group] == ends
    sampling = server.asked[0]["sampling"]
    assert (sampling["ignore_eos"], sampling["stop"], sampling["stop_token_ids"]) == (True, [], [])


def test_steps_count_from_the_start_of_the_engine_even_if_the_server_restarts(serve):
    engine, [server] = serve()
    assert engine.step_sums().steps == 0
    engine.generate(WORK, SAMPLING)
    assert (engine.step_sums().steps, engine.step_sums().seconds) == (12, 6.0)
    engine.score_continuations([ModelInput.from_prompt([5])], [[1]])
    assert engine.step_sums().steps == 13
    server.steps, server.digest = 0, ""
    engine.generate(WORK, SAMPLING)
    assert engine.step_sums().steps == 25


def test_a_wrong_or_empty_key_is_refused_with_its_setting(serve, monkeypatch):
    with pytest.raises(BadInput, match=r"key in engine\.api_key_variable"):
        serve(settings={"api_key_variable": None})
    monkeypatch.setenv("SERVERS_KEY", "")
    with pytest.raises(BadInput, match=r"engine\.api_key_variable.* SERVERS_KEY, but this variable is not set"):
        serve()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "engine.dtype is 'float32', .*'bfloat16'"),
        ({"logprobs": "raw"}, "engine.logprobs is 'processed', .*'raw'"),
    ],
)
def test_a_server_with_other_settings_than_the_engine_is_refused(serve, changes, message):
    with pytest.raises(BadInput, match=message):
        serve(about=ABOUT | changes)


def test_a_prompt_must_fit_the_context_of_the_server(serve):
    engine, _ = serve(about=ABOUT | {"max_model_len": 20})
    with pytest.raises(BadInput, match=r"prompt row 0: 9 prompt tokens .* 21 tokens.* the server is only 20"):
        engine.generate(WORK, SAMPLING)


def test_a_server_that_would_use_the_long_factors_of_a_longrope_model_is_refused(serve, policy, tmp_path):
    engine, _ = serve()
    directory = shutil.copytree(policy.directory, tmp_path / "longrope")
    config = json.loads((directory / "config.json").read_text())
    factors = {f"{kind}_factor": [1.0] * (config["head_dim"] // 2) for kind in ("short", "long")}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    (directory / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    with pytest.raises(BadInput, match=r"longrope.*--max-model-len 16"):
        engine.load(directory, policy.version)


def test_servers_at_given_addresses_are_neither_put_to_sleep_nor_ended(serve, policy):
    engine, [server] = serve()
    engine.sleep()
    assert engine.loaded_digest() == ""
    engine.load(policy.directory, policy.version)
    engine.close()
    assert server.digest == policy.version.digest
