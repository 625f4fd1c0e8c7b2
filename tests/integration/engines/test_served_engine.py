"""The vLLM engine before servers that run already, and speak well or badly."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from bench.drawn import DrawnLengths, DrawnVllm
from bench.drawn_engine import drawn_length
from infra.errors import BadInput, EndpointDown, Quarantined, WorkerFailed, WorkerLost
from models.config.engines import SamplingConfig, VllmEngine
from models.engines.protocol import build_engine
from models.engines.vllm.engine import MAX_LOADS, ServedEngine
from models.records.model_input import ModelInput
from models.records.schemas import FinishReason
from models.records.seeds import derive_seed
from tests.support.batch_server import (
    ABOUT,
    KEY,
    BatchServer,
    Line,
    batch_server,
    chunk,
    experts,
    experts_of,
    tokens_of,
)
from tests.support.engines import Published, policy, request, written_by  # noqa: F401
from tests.support.inputs import asking, going_on
from tests.support.policies import small_tokenizer

SAMPLING = SamplingConfig(max_new_tokens=12)
WORK = [request(row, 9) for row in range(3)]
FOR_THEIR_SEEDS = [[tuple(tokens_of(seed, 12)) for seed in asked.seeds] for asked in WORK]

Serve = Callable[..., tuple[ServedEngine, list[BatchServer]]]


@pytest.fixture
def serve(policy: Published, monkeypatch) -> Iterator[Serve]:  # noqa: F811
    monkeypatch.setenv("SERVERS_KEY", KEY)
    with ExitStack() as stack:

        def start(count: int = 1, *, settings: dict[str, object] | None = None, **server: object):
            servers = [
                stack.enter_context(batch_server(BatchServer(lambda directory: policy.version.digest, **server)))
                for _ in range(count)
            ]
            urls = tuple(server.url for server in servers)
            given = {"base_urls": urls, "api_key_variable": "SERVERS_KEY"} | (settings or {})
            settings_class = DrawnVllm if "lengths" in given else VllmEngine
            engine = build_engine(settings_class.model_validate(given))
            engine.load(policy.directory, policy.version)
            return engine, servers

        yield start


def spoil_first(change: Callable[[list[Line]], list[Line]]) -> Callable[[int, list[Line]], list[Line]]:
    """Change the first answer alone."""
    return lambda number, lines: change(lines) if number == 0 else lines


def test_completions_are_what_the_server_wrote_for_their_seeds(serve):
    engine, [server] = serve()
    groups = engine.generate(WORK, SAMPLING)
    assert written_by(groups) == FOR_THEIR_SEEDS
    for completion in (one for group in groups for one in group):
        assert completion.logprobs == (-0.5,) * 12
        assert completion.text == small_tokenizer().decode(completion.tokens, skip_special_tokens=True)
        assert completion.finish_reason is FinishReason.LENGTH
    assert server.asked[0]["sampling"]["stop_token_ids"] == [small_tokenizer().eos_token_id]


def test_a_served_policy_is_proven_not_believed(serve, policy):  # noqa: F811
    engine, [server] = serve()
    assert engine.serves() == policy.version.digest
    server.proofs = [""]
    assert engine.serves() == ""
    server.digest = "another"
    assert engine.serves() == ""


def test_groups_are_spread_over_servers_and_stay_together(serve):
    engine, servers = serve(2)
    assert written_by(engine.generate(WORK, SAMPLING)) == FOR_THEIR_SEEDS
    prompts = [[tuple(one["tokens"]) for one in server.asked[0]["requests"]] for server in servers]
    first, second, third = (tuple(asked.inputs[0].tokens.tolist()) for asked in WORK)
    assert prompts == [[first] * 4 + [third] * 4, [second] * 4]


def test_likelihoods_come_in_the_order_of_the_prompts(serve):
    engine, _ = serve(2, settings={"max_batch_rows": 1})
    before = engine.progress
    prompts = [ModelInput.given([5] * length) for length in range(1, 12)]
    assert engine.likelihoods(prompts, [[1], [1, 2]]) == [(-length - 1.0, -length - 2.0) for length in range(1, 12)]
    assert engine.progress == before + 3  # four prompts each time


def test_likelihoods_that_are_not_numbers_are_refused_by_the_policys_name(serve, policy):  # noqa: F811
    engine, _ = serve(token_logprob=float("nan"))
    with pytest.raises(
        Quarantined, match=f"policy {policy.version.digest}.*continuations with log-probabilities that are not finite"
    ):
        engine.likelihoods([ModelInput.given([5])], [[1]])


def test_likelihoods_are_asked_for_again_where_the_policy_is_not_proven_afterwards(serve):
    engine, [server] = serve()
    server.proofs, before = [""], engine.progress
    assert engine.likelihoods([ModelInput.given([5])], [[1]]) == [(-2.0,)]
    assert (server.loads, engine.progress - before) == (2, 3)


def test_a_policy_that_was_replaced_under_the_work_is_loaded_again(serve, policy):  # noqa: F811
    engine, [server] = serve()
    server.digest = "another"
    assert written_by(engine.generate(WORK, SAMPLING)) == FOR_THEIR_SEEDS
    assert server.loads == 2


def test_tokens_of_other_weights_are_made_again(serve):
    mixed = {"id": 0, "error": "tokens of two policies", "digest": "another"}
    engine, [server] = serve(spoil=spoil_first(lambda lines: [mixed, *lines]))
    assert written_by(engine.generate(WORK, SAMPLING)) == FOR_THEIR_SEEDS
    assert len(server.asked) == 2


def test_work_whose_policy_is_not_proven_afterwards_is_done_again_from_its_beginning(serve):
    engine, [server] = serve()
    server.proofs = [""]
    assert written_by(engine.generate(WORK, SAMPLING)) == FOR_THEIR_SEEDS
    assert [len(body["requests"]) for body in server.asked] == [12, 12]


def test_a_server_that_never_proves_its_policy_loses_the_worker(serve):
    engine, [server] = serve()
    server.proofs = [""] * 100
    with pytest.raises(WorkerLost, match=r"expected proof of .* loaded 3 times in vain"):
        engine.generate(WORK, SAMPLING)
    assert len(server.asked) == MAX_LOADS + 1


def test_a_server_that_loads_something_else_loses_the_worker(serve, policy):  # noqa: F811
    engine, [server] = serve()
    server.digest_of = lambda directory: "another"
    with pytest.raises(
        WorkerLost, match=f"expected it to serve {policy.version.digest} once loaded, it says 'another'"
    ):
        engine.load(policy.directory, policy.version)
    assert engine.serves() == ""


def broken_off(lines: list[Line]) -> list[Line]:
    return [*lines[:9], None]


def torn(lines: list[Line]) -> list[Line]:
    return [*lines[:4], b'{"id": 2, "tok\n', *lines[4:]]


def ended_early(lines: list[Line]) -> list[Line]:
    return lines[:9]


def uneven(lines: list[Line]) -> list[Line]:
    spoilt = dict(chunk(0, [5, 6], finish=None)) | {"tokens": chunk(0, [5], finish=None)["tokens"]}
    return [spoilt, *lines]


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (broken_off, "its answer broke off"),
        (torn, 'a line of its answer is torn: \'{"id": 2, "tok\''),
        (ended_early, "its answer ended before it was done"),
        (uneven, "1 tokens came with 2 log-probabilities"),
    ],
)
def test_half_an_answer_is_none_and_a_server_of_others_is_not_asked_again(serve, spoilt, message):
    engine, [server] = serve(spoil=spoil_first(spoilt))
    with pytest.raises(EndpointDown, match=f"{message}.*`rheostat engine serve vllm` starts it"):
        engine.generate(WORK, SAMPLING)
    assert len(server.asked) == 1
    assert written_by(engine.generate(WORK, SAMPLING)) == FOR_THEIR_SEEDS


def failed(lines: list[Line]) -> list[Line]:
    return [*lines[:9], {"error": "RuntimeError: out of memory"}]


def test_a_failure_is_the_works_where_the_server_is_well_and_the_servers_where_it_is_not(serve):
    engine, [server] = serve(spoil=lambda number, lines: failed(lines))
    with pytest.raises(WorkerFailed, match="failed in the middle of its answer: RuntimeError: out of memory"):
        engine.generate(WORK, SAMPLING)
    server.healthy = False
    with pytest.raises(EndpointDown, match="out of memory; its engine is dead"):
        engine.generate(WORK, SAMPLING)


def test_a_server_that_is_gone_is_down(serve):
    _, [server] = serve()
    with batch_server(BatchServer(lambda directory: "")) as other:
        gone = other.url
    with pytest.raises(EndpointDown, match=f"{gone} does not answer: ConnectError: .*refused"):
        serve(settings={"base_urls": (server.url, gone)})


def without_the_last_completion(lines: list[Line]) -> list[Line]:
    return [*lines[:-2], lines[-1]]


def of_nobody(lines: list[Line]) -> list[Line]:
    return [chunk(99, [5], finish="length"), *lines]


def too_short(lines: list[Line]) -> list[Line]:
    return [chunk(0, [5, 6], finish="length"), *lines[2:]]


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (without_the_last_completion, "its answer is done, but 1 completions have no end"),
        (of_nobody, "tokens of completion 99, which is not under way"),
        (too_short, r"expected a completion of 12 tokens, found 2 \(length\)"),
    ],
)
def test_an_answer_to_another_question_is_a_failure_of_the_server(serve, spoilt, message):
    engine, _ = serve(spoil=spoil_first(spoilt))
    with pytest.raises(WorkerFailed, match=message):
        engine.generate(WORK, SAMPLING)


def test_log_probs_that_are_not_numbers_are_refused_by_name(serve, policy):  # noqa: F811
    def with_nan(lines: list[Line]) -> list[Line]:
        return [*lines[:2], chunk(1, [5] * 12, finish="stop", logprob=float("nan")), *lines[4:]]

    engine, _ = serve(spoil=spoil_first(with_nan))
    with pytest.raises(Quarantined, match=f"policy {policy.version.digest}.*prompt row 0, sample 1"):
        engine.generate(WORK, SAMPLING)


def test_an_aborted_completion_goes_on_from_what_it_has_with_other_draws(serve):
    def aborted(lines: list[Line]) -> list[Line]:
        return [chunk(0, [7, 8, 9], finish="abort"), *lines[2:]]

    engine, [server] = serve(spoil=spoil_first(aborted))
    [[first, *others], *rest] = engine.generate(WORK, SAMPLING)
    assert written_by([others, *rest]) == [FOR_THEIR_SEEDS[0][1:], *FOR_THEIR_SEEDS[1:]]
    seed = derive_seed("continued", WORK[0].seeds[0], 3)
    assert first.tokens == (7, 8, 9, *tokens_of(seed, 9))
    [again] = server.asked[1]["requests"]
    assert (again["tokens"], again["seed"], again["max_tokens"]) == ([*WORK[0].inputs[0].tokens, 7, 8, 9], seed, 9)


def test_a_completion_that_is_always_interrupted_loses_the_worker(serve):
    def aborted(number: int, lines: list[Line]) -> list[Line]:
        return [chunk(0, [], finish="abort"), *lines[2:]]

    engine, [server] = serve(spoil=aborted)
    with pytest.raises(WorkerLost, match="was interrupted 9 times"):
        engine.generate(WORK, SAMPLING)
    assert [len(body["requests"]) for body in server.asked] == [12] + [1] * 8


def test_a_stop_text_over_the_seam_of_an_interruption_ends_a_completion(serve):
    begun, rest = (small_tokenizer()(text)["input_ids"] for text in ("Ana has ", "pens and more"))

    def in_two_parts(number: int, lines: list[Line]) -> list[Line]:
        part = chunk(0, begun, finish="abort") if number == 0 else chunk(0, rest, finish="stop")
        return [part, lines[-1]]

    engine, _ = serve(spoil=in_two_parts)
    [[found]] = engine.generate([request(0, 9, group=1)], SamplingConfig(max_new_tokens=40, stop=("has pens",)))
    assert found.text == "Ana has pens"
    assert found.finish_reason is FinishReason.STOP
    assert len(found.logprobs) == len(found.tokens) < len(begun + rest)


def test_experts_are_told_of_all_that_is_read_and_only_to_who_asks(serve):
    engine, [server] = serve()
    assert all(each.experts is None for group in engine.generate(WORK, SAMPLING) for each in group)
    engine.note_experts(True)
    groups = engine.generate(WORK, SAMPLING)
    assert [{one["experts"] for one in body["requests"]} for body in server.asked] == [{False}, {True}]
    for asked, group in zip(WORK, groups, strict=True):
        for seed, found in zip(asked.seeds, group, strict=True):
            np.testing.assert_array_equal(found.experts, experts_of(seed, 9 + 11))
            assert found.experts.dtype == np.uint8


def test_tokens_keep_the_experts_of_the_request_that_wrote_them_when_another_goes_on(serve):
    def aborted(number: int, lines: list[Line]) -> list[Line]:
        parts = {0: chunk(0, [7, 8, 9], finish="abort") | experts(100, 9 + 2), 1: chunk(0, [], finish="abort")}
        return [parts[number], lines[-1]] if number in parts else lines

    engine, _ = serve(spoil=aborted)
    engine.note_experts(True)
    [[found]] = engine.generate([request(0, 9, group=1)], SAMPLING)
    seed = derive_seed("continued", request(0, 9, group=1).seeds[0], 3)
    assert found.tokens == (7, 8, 9, *tokens_of(seed, 9))
    np.testing.assert_array_equal(found.experts[:11], experts_of(100, 11))
    np.testing.assert_array_equal(found.experts[11:], experts_of(seed, 9 + 11)[11:])


def test_a_stop_text_over_a_seam_cuts_the_experts_too(serve):
    begun, rest = (small_tokenizer()(text)["input_ids"] for text in ("Ana has ", "pens and more"))

    def in_two_parts(number: int, lines: list[Line]) -> list[Line]:
        read = 9 + len(begun) - 1
        part = chunk(0, begun, finish="abort") | experts(1, read)
        if number:
            part = chunk(0, rest, finish="stop") | experts(2, read + len(rest))
        return [part, lines[-1]]

    engine, _ = serve(spoil=in_two_parts)
    engine.note_experts(True)
    [[found]] = engine.generate([request(0, 9, group=1)], SamplingConfig(max_new_tokens=40, stop=("has pens",)))
    assert len(found.experts) == 9 + len(found.tokens) - 1 < 9 + len(begun + rest) - 1


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({}, "expected the experts of 20 tokens, found none"),
        (experts(1, 19), "expected the experts of 20 tokens, found 38 bytes for 2 of each"),
        ({"experts": experts(1, 20)["experts"] | {"dtype": "<u2"}}, "found 40 bytes for 2 of each"),
    ],
)
def test_experts_of_other_tokens_are_a_failure_of_the_server(serve, told, message):
    def spoilt(lines: list[Line]) -> list[Line]:
        return [chunk(0, [5] * 12, finish="length") | told, *lines[2:]]

    engine, _ = serve(spoil=spoil_first(spoilt))
    engine.note_experts(True)
    with pytest.raises(WorkerFailed, match=message):
        engine.generate(WORK, SAMPLING)


def test_experts_of_other_layers_than_before_are_a_failure_of_the_server(serve):
    def spoilt(lines: list[Line]) -> list[Line]:
        return [chunk(0, [7, 8, 9], finish="abort") | experts(1, 11, width=3), *lines[2:]]

    engine, _ = serve(spoil=spoil_first(spoilt))
    engine.note_experts(True)
    with pytest.raises(WorkerFailed, match="expected 3 experts of a token, found 2"):
        engine.generate(WORK, SAMPLING)


def test_a_server_that_does_not_tell_experts_is_refused_where_they_are_wanted(serve):
    engine, [server] = serve(about=ABOUT | {"tells_experts": False})
    engine.generate(WORK, SAMPLING)
    engine.note_experts(True)
    with pytest.raises(BadInput, match=r"update\.router_replay: vLLM server .* does not tell which experts it chose"):
        engine.generate(WORK, SAMPLING)
    assert len(server.asked) == 1


def test_a_prefix_is_part_of_the_prompt_and_moves_the_seed(serve):
    engine, [server] = serve()
    goes_on = going_on(asking(0, (5, 6), (1, 2)), ((7,), (8, 9)), budget=3)
    [[one, two]] = engine.generate([goes_on], SAMPLING)
    asked = [(tuple(body["tokens"]), body["seed"], body["max_tokens"]) for body in server.asked[0]["requests"]]
    seeds = derive_seed("continued", 1, 1), derive_seed("continued", 2, 2)
    assert asked == [((5, 6, 7), seeds[0], 3), ((5, 6, 8, 9), seeds[1], 3)]
    assert one.text == small_tokenizer().decode((7, *tokens_of(seeds[0], 3)), skip_special_tokens=True)
    assert {one.finish_reason, two.finish_reason} == {FinishReason.CUT}


def test_drawn_lengths_replace_the_policys_own_end(serve):
    lengths = DrawnLengths(median_tokens=6, sigma=0.8)
    engine, [server] = serve(settings={"lengths": lengths.model_dump()})
    asked = request(0, 9, group=64)
    [group] = engine.generate([asked], SAMPLING.model_copy(update={"stop": ("x",)}))
    drawn = [drawn_length(lengths, seed) for seed in asked.seeds]
    assert 4 < np.median(drawn) < 9
    assert [len(one.tokens) for one in group] == [min(length, 12) for length in drawn]
    ends = [FinishReason.STOP if length <= 12 else FinishReason.LENGTH for length in drawn]
    assert [one.finish_reason for one in group] == ends
    told = server.asked[0]["sampling"]
    assert (told["ignore_eos"], told["stop"], told["stop_token_ids"]) == (True, [], [])


def test_steps_are_those_since_the_engine_came_also_over_a_restart(serve):
    engine, [server] = serve()
    assert engine.steps().steps == 0
    engine.generate(WORK, SAMPLING)
    assert (engine.steps().steps, engine.steps().seconds) == (12, 6.0)
    engine.likelihoods([ModelInput.given([5])], [[1]])
    assert engine.steps().steps == 13
    server.steps, server.digest = 0, ""
    engine.generate(WORK, SAMPLING)
    assert engine.steps().steps == 25


def test_a_wrong_key_is_bad_input_that_names_its_field(serve, monkeypatch):
    with pytest.raises(BadInput, match=r"refuses the key: .* engine\.api_key_variable"):
        serve(settings={"api_key_variable": None})
    monkeypatch.setenv("SERVERS_KEY", "")
    with pytest.raises(BadInput, match="expected the servers' key in SERVERS_KEY, found nothing"):
        serve()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "engine.dtype: expected 'float32', but .* was started with 'bfloat16'"),
        ({"logprobs": "raw"}, "engine.logprobs: expected 'processed', but .* was started with 'raw'"),
    ],
)
def test_a_server_that_computes_otherwise_than_configured_is_bad_input(serve, changes, message):
    with pytest.raises(BadInput, match=message):
        serve(about=ABOUT | changes)


def test_a_server_with_less_context_than_the_policy_decides_what_fits(serve):
    engine, _ = serve(about=ABOUT | {"max_model_len": 20})
    with pytest.raises(BadInput, match=r"prompt row 0: 9 prompt tokens .* more than the server's context of 20"):
        engine.generate(WORK, SAMPLING)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://"])
def test_an_address_that_is_none_is_bad_input(url):
    with pytest.raises(BadInput, match=f"expected addresses such as .*, found '{url}'"):
        ServedEngine(VllmEngine(base_urls=(url,)))


def test_servers_of_others_are_neither_put_to_sleep_nor_ended(serve, policy):  # noqa: F811
    engine, [server] = serve()
    engine.sleep()
    assert engine.serves() == ""
    engine.load(policy.directory, policy.version)
    engine.close()
    assert server.digest == policy.version.digest


def test_threads_share_the_servers_and_one_of_them_mends_what_fails_for_all(serve):
    engine, [server] = serve()
    server.digest, server.proofs = "another", [""]
    loads, began = server.loads, []

    def work(generate):
        began.append(len(server.asked))
        with ThreadPoolExecutor(8) as threads:
            return [*threads.map(lambda asked: generate([asked], SAMPLING), WORK * 4)]

    groups = engine.interleaved(work)
    assert [written_by(group) for group in groups] == [[each] for each in FOR_THEIR_SEEDS] * 4
    assert len(began) == 2  # since the proof failed once
    assert server.loads - loads == 2
    assert engine.steps().steps <= server.steps
