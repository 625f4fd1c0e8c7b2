"""The door of a rollout worker, used by real HTTP clients on a real port, with a scripted policy."""

import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import httpx
import pytest

import rheostat.infra.http_guard
import rheostat.models.agents.door
from rheostat.models.agents.replies import MIN_LOGPROB, encode_scores
from rheostat.models.agents.routes import AgentRoutes
from rheostat.models.agents.sampler import OpenEpisode, TurnLimits
from rheostat.models.agents.wire import ChatRequest, RefusedRequest, TextRequest, TokenRequest, read_request
from rheostat.models.engines.protocol import SequenceScores
from tests.support.doors import CALL, LIMITS, letters, open_door, user

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
RESULT = {"role": "tool", "tool_call_id": "t00000000", "content": "answer.txt\n", "name": "bash"}


def events_of(response):
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]


def limits(**changes):
    return TurnLimits(**{name: changes.get(name, getattr(LIMITS, name)) for name in LIMITS.__slots__})


def error_of(response):
    return response.status_code, response.json()["error"]["code"]


def wait_until(claim):
    end = time.monotonic() + 20
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.01)


def guest_of(opened):
    return next(iter(opened.door._guests.values()))


# ---- answers
def test_a_harness_calls_a_tool_and_its_result_continues_the_sampled_tokens():
    """The requests are those of verifiers' bash harness, which drops the content and adds an index to the call."""
    with open_door(CALL, "There is one file.") as opened:
        fields = {"tools": [BASH], "stream": True, "stream_options": {"include_usage": True}, "temperature": 1.0}
        first = opened.chat(user("Which files?"), **fields)
        chunks = [json.loads(event) for event in events_of(first)[:-1]]
        assert first.headers["content-type"].startswith("text/event-stream")
        assert events_of(first)[-1] == "[DONE]"
        [call] = chunks[0]["choices"][0]["delta"]["tool_calls"]
        function = {"name": "bash", "arguments": '{"command": "ls"}'}
        assert call == {"index": 0, "id": "t00000000", "type": "function", "function": function}
        assert chunks[1]["choices"] == [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
        assert chunks[2]["choices"] == []
        assert chunks[2]["usage"]["completion_tokens"] == len(letters(opened.form, CALL))
        second = opened.chat(user("Which files?"), {"role": "assistant", "tool_calls": [call]}, RESULT, **fields)
        delta = json.loads(events_of(second)[0])["choices"][0]["delta"]
        assert (delta["role"], delta["content"]) == ("assistant", "There is one file.")
        record = opened.episode.record
        [[turn, following]] = record.branches()
        assert (turn.calls, turn.errors, following.parent) == (1, 0, 0)
        assert turn.tokens == letters(opened.form, CALL)
        assert [segment.policy_version for segment in turn.segments] == [3]
        prompt = opened.policy.requests[1].inputs[0].tokens.tolist()
        assert prompt == record.context_of(1).tolist() == [*record.tokens_of(0).tolist(), *following.context]


def test_an_answer_without_a_stream_has_the_fields_of_openai():
    with open_door("Hello there.") as opened:
        answer = opened.chat(user("Hi."), logprobs=True, return_token_ids=True).json()
        [choice] = answer["choices"]
        message = {"role": "assistant", "content": "Hello there."}
        assert (choice["message"], choice["finish_reason"]) == (message, "stop")
        assert choice["token_ids"] == [*letters(opened.form, "Hello there.")]
        assert len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == len(choice["token_ids"])
        assert (answer["object"], answer["model"]) == ("chat.completion", "policy")


def test_the_sampling_of_the_run_is_used_and_only_length_and_stop_texts_of_the_request():
    with open_door("Hello there.") as opened:
        opened.chat(user("Hi."), temperature=0, top_p=0.1, seed=3, max_tokens=7, stop=["x"], tool_choice="required")
        [([request], sampling)] = opened.policy.batches
        assert (sampling.temperature, sampling.top_p, sampling.stop, request.max_tokens) == (0.7, 1.0, ("x",), 7)


@pytest.mark.parametrize(
    ("text", "content", "calls", "errors"),
    [
        ('<tool_call>\n{"name": "bash", "arguments": 3}\n</tool_call>', "", 1, 1),
        ("<tool_call>\nls\n</tool_call>", "<tool_call>\nls\n</tool_call>", 0, 1),
        (f"I look.{CALL}{CALL}", "I look.", 2, 0),
    ],
    ids=["no object of arguments", "no JSON", "two calls"],
)
def test_malformed_calls_are_counted_and_passed_on_if_they_have_a_name(text, content, calls, errors):
    with open_door(text) as opened:
        message = opened.chat(user("Hi."), tools=[BASH]).json()["choices"][0]["message"]
        assert (message["content"] or "") == content
        assert len(message.get("tool_calls", [])) == calls
        assert opened.episode.record.turn(0).errors == errors


def test_a_stop_text_is_not_part_of_the_answer_but_of_the_record():
    with open_door("so. Observation:") as opened:
        answer = opened.chat(user("Hi."), stop=["Observation:"]).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == ("so. ", "stop")
        assert opened.episode.record.turn(0).tokens == letters(opened.form, "so. Observation:")[:-1]


def test_tokens_in_give_tokens_out_with_both_names_of_a_token():
    """vLLM writes `token_id`, and the package renderers reads `token`."""
    with open_door("ab", "c") as opened:
        sampling = {
            "max_tokens": 9,
            "logprobs": 1,
            "stop_token_ids": [opened.form.ends[0]],
            "skip_special_tokens": False,
        }
        body = {"model": "policy", "token_ids": [5, 6, 7], "sampling_params": sampling}
        answer = opened.client.post(f"{opened.root}/inference/v1/generate", json=body).json()
        [choice] = answer["choices"]
        expected = letters(opened.form, "ab")
        assert choice["token_ids"] == [*expected]
        assert [each["token"] for each in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in expected]
        assert [each["token_id"] for each in choice["logprobs"]["content"]] == [*expected]
        assert (answer["output_mode"], choice["finish_reason"]) == ("tokens", "stop")
        opened.client.post(f"{opened.root}/inference/v1/generate", json={"token_ids": [5, 6, 7, *expected, 8]})
        assert opened.episode.record.turn(1).parent == 0
        assert opened.episode.record.turn(1).context == (8,)


def test_texts_and_token_sequences_are_continued_in_one_batch():
    with open_door("ab", "c", "d") as opened:
        answer = opened.client.post("/completions", json={"prompt": [[5, 6], [7]], "max_tokens": 8}).json()
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "ab"), (1, "c")]
        assert [len(batch) for batch, _ in opened.policy.batches] == [2]
        streamed = opened.client.post("/completions", json={"prompt": "Ana has", "stream": True})
        assert json.loads(events_of(streamed)[0])["choices"][0]["text"] == "d"


def test_a_request_without_tokens_to_sample_receives_its_prompt():
    with open_door("ab") as opened:
        answer = opened.client.post("/completions", json={"prompt": ["Ana ", "has"], "echo": True, "max_tokens": 0})
        assert [choice["text"] for choice in answer.json()["choices"]] == ["Ana ", "has"]
        assert (answer.json()["usage"]["completion_tokens"], opened.policy.requests) == (0, [])
        echoed = opened.client.post("/completions", json={"prompt": "Ana ", "echo": True, "max_tokens": 8})
        assert echoed.json()["choices"][0]["text"] == "Ana ab"


def test_the_most_probable_of_several_tokens_with_the_same_text_is_returned():
    texts = {1: "a", 2: "?", 3: "?"}
    scores = SequenceScores((-2.0, -math.inf), (((2, -0.5), (1, -1.5)), ((1, 0.0),)))
    encoded = encode_scores([1, 3, 2], scores, first=0, decode=texts.__getitem__)
    assert encoded["top_logprobs"] == [None, {"?": -0.5, "a": -1.5}, {"a": 0.0, "?": MIN_LOGPROB}]
    assert encoded["token_logprobs"] == [None, -2.0, MIN_LOGPROB]
    assert encoded["text_offset"] == [0, 1, 2]
    assert encode_scores([1, 3, 2], scores, first=2, decode=texts.__getitem__)["tokens"] == ["?"]


def test_the_model_list_states_the_context_length():
    with open_door() as opened:
        [model] = opened.client.get("/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("policy", LIMITS.context)


# ---- programs
TASK = [{"role": "user", "content": "What is 40+2?"}]
FINAL = {**BASH, "function": {**BASH["function"], "name": "final_answer"}}
RECORDED = {
    "smolagents": (
        "chat/completions",
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "You are an expert assistant."}]},
                {"role": "user", "content": [{"type": "text", "text": "New task:\nWhat is 40+2?"}]},
            ],
            "stop": ["Observation:", "Calling tools:"],
            "tool_choice": "required",
            "tools": [FINAL],
        },
    ),
    "openai-agents": (
        "chat/completions",
        {"messages": [{"content": "Use it.", "role": "system"}, *TASK], "tools": [BASH], "stream": False},
    ),
    "inspect": (
        "chat/completions",
        {"messages": TASK, "seed": 5, "temperature": 0.0, "tool_choice": "auto", "tools": [BASH]},
    ),
    "lm-eval chat": (
        "chat/completions",
        {"messages": TASK, "max_tokens": 8, "temperature": 0, "stop": ["\n"], "seed": 1234},
    ),
    "lm-eval": (
        "completions",
        {"prompt": [[18, 12], [19]], "max_tokens": 8, "temperature": 0, "stop": ["\n"], "seed": 1234},
    ),
    "verifiers with tokens": (
        "../inference/v1/generate",
        {
            "token_ids": [85, 80],
            "sampling_params": {"temperature": 1.0, "max_tokens": 64, "seed": 7, "skip_special_tokens": False},
        },
    ),
}


@pytest.mark.parametrize("program", RECORDED)
def test_first_requests_of_programs_are_answered(program):
    """The requests were recorded, except their long texts."""
    path, body = RECORDED[program]
    with open_door("a", "b") as opened:
        answer = opened.client.post(f"/{path}", json={"model": "policy", **body})
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "stop"


# ---- repeats
def test_equal_requests_are_new_samples():
    with open_door("a", "b") as opened:
        answers = [opened.chat(user("Hi.")).json() for _ in range(2)]
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == ["a", "b"]
        seeds = {request.seeds for request in opened.policy.requests}
        assert len(seeds) == 2


def test_a_repeat_takes_over_the_answer_of_a_closed_connection():
    with open_door("a", "b") as opened:
        opened.policy.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            opened.client.post("/chat/completions", json={"messages": [user("Hi.")]}, timeout=0.3)
        wait_until(lambda: guest_of(opened).num_open == 0)
        opened.policy.gate.set()
        answers = [opened.client.post("/chat/completions", json={"messages": [user("Hi.")]}) for _ in range(2)]
        assert [each.json()["choices"][0]["message"]["content"] for each in answers] == ["a", "b"]


def test_a_request_waits_for_answers_whose_connection_was_closed():
    with open_door("a", "b", limits=limits(concurrent=1)) as opened:
        opened.policy.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            opened.client.post("/chat/completions", json={"messages": [user("Hi.")]}, timeout=0.3)
        wait_until(lambda: guest_of(opened).num_open == 0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(opened.chat, user("More."))
            wait_until(lambda: guest_of(opened).num_open == 1)
            assert opened.episode.record.num_requests == 1
            opened.policy.gate.set()
            assert waiting.result(20).json()["choices"][0]["message"]["content"] == "b"


def test_an_error_is_not_kept_for_a_repeat():
    with open_door("a") as opened:
        texts, opened.policy.texts = opened.policy.texts, iter(())
        opened.policy.gate.clear()
        body = {"messages": [user("Hi.")]}
        with pytest.raises(httpx.ReadTimeout):
            opened.client.post("/chat/completions", json=body, timeout=0.3)
        wait_until(lambda: guest_of(opened).num_open == 0)
        opened.policy.gate.set()
        wait_until(lambda: not guest_of(opened).unfinished)
        opened.policy.texts = texts
        assert opened.client.post("/chat/completions", json=body).status_code == 200
        assert guest_of(opened).abandoned == []


def test_a_stream_that_waits_for_a_turn_contains_comments(monkeypatch):
    monkeypatch.setattr(rheostat.models.agents.door, "WAIT_SECONDS", 0.05)
    with open_door("a") as opened:
        opened.policy.gate.clear()
        threading.Timer(0.3, opened.policy.gate.set).start()
        answer = opened.chat(user("Hi."), stream=True)
        assert answer.text.startswith(": wait\n\n")
        assert json.loads(events_of(answer)[0])["choices"][0]["delta"]["content"] == "a"


# ---- limits
def test_limits_of_an_episode_are_errors_with_a_code():
    with open_door(*"abcd", limits=limits(requests=2)) as opened:
        assert [opened.chat(user("Hi.")).status_code for _ in range(2)] == [200, 200]
        assert error_of(opened.chat(user("Hi."))) == (400, "episode_limit")
    with open_door("abc", "abc", limits=limits(episode_tokens=3)) as opened:
        assert opened.chat(user("Hi.")).json()["choices"][0]["finish_reason"] == "length"
        assert error_of(opened.chat(user("Hi."))) == (400, "episode_limit")
    with open_door("abc", limits=limits(context=4)) as opened:
        refused = opened.chat(user("Hi."))
        assert error_of(refused) == (400, "context_length_exceeded")
        assert "maximum context length is 4 tokens" in refused.json()["error"]["message"]


def test_more_requests_than_are_answered_at_the_same_time_wait(monkeypatch):
    monkeypatch.setattr(rheostat.models.agents.door, "MAX_OPEN", 6)
    with open_door(*"abcdef", limits=limits(concurrent=2)) as opened, ThreadPoolExecutor(6) as pool:
        opened.policy.gate.clear()
        answers = [pool.submit(opened.chat, user(f"Hi {number}.")) for number in range(6)]
        wait_until(lambda: guest_of(opened).num_open == 6 and opened.episode.record.num_requests == 2)
        refused = opened.chat(user("More."))
        assert error_of(refused) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        opened.policy.gate.set()
        found = {answer.result(20).json()["choices"][0]["message"]["content"] for answer in answers}
        assert found == {*"abcdef"}


def test_a_request_whose_client_gave_up_while_it_waited_is_answered_to_the_repeated_request():
    with open_door(*"ab", limits=limits(concurrent=1)) as opened, ThreadPoolExecutor(1) as pool:
        opened.policy.gate.clear()
        first = pool.submit(opened.chat, user("Hi."))
        wait_until(lambda: opened.episode.record.num_requests == 1)
        body = {"messages": [user("More.")]}
        with pytest.raises(httpx.ReadTimeout):
            opened.client.post("/chat/completions", json=body, timeout=0.3)
        wait_until(lambda: guest_of(opened).num_open == 1)
        opened.policy.gate.set()
        assert first.result(20).status_code == 200
        answer = opened.client.post("/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "b"
        assert (opened.episode.record.num_requests, guest_of(opened).num_refused) == (2, 0)


def test_a_stream_whose_request_waits_contains_comments(monkeypatch):
    monkeypatch.setattr(rheostat.models.agents.door, "WAIT_SECONDS", 0.05)
    with open_door(*"ab", limits=limits(concurrent=1)) as opened, ThreadPoolExecutor(1) as pool:
        opened.policy.gate.clear()
        first = pool.submit(opened.chat, user("Hi."))
        wait_until(lambda: opened.episode.record.num_requests == 1)
        threading.Timer(0.3, opened.policy.gate.set).start()
        assert opened.chat(user("More."), stream=True).text.startswith(": wait\n\n")
        assert first.result(20).status_code == 200


def test_bodies_of_open_requests_are_limited_together(monkeypatch):
    monkeypatch.setattr(rheostat.models.agents.door, "MAX_OPEN_BYTES", 1500)
    with open_door(*"abc", limits=limits(concurrent=1)) as opened, ThreadPoolExecutor(1) as pool:
        opened.policy.gate.clear()
        first = pool.submit(opened.chat, user("x" * 1000))
        wait_until(lambda: guest_of(opened).num_bytes > 1000)
        assert error_of(opened.chat(user("y" * 1000))) == (429, "rate_limit_exceeded")
        opened.policy.gate.set()
        assert first.result(20).status_code == 200
        wait_until(lambda: guest_of(opened).num_bytes == 0)
        assert opened.chat(user("y" * 1000)).status_code == 200


def test_prompts_without_sampling_are_limited_like_turns():
    episode = OpenEpisode(seed=1, limits=limits(requests=3))
    episode.count_scored(2)
    episode.count_scored(1)
    with pytest.raises(RefusedRequest, match="may send 3 prompts without sampling"):
        episode.count_scored(1)
    cut = OpenEpisode(seed=1, limits=limits(requests=3))
    cut.cut()
    with pytest.raises(RefusedRequest, match="continues in a later iteration"):
        cut.count_scored(1)


def test_requests_that_wait_end_with_their_episode():
    with open_door(*"ab", limits=limits(concurrent=1)) as opened, ThreadPoolExecutor(2) as pool:
        opened.policy.gate.clear()
        answers = [pool.submit(opened.chat, user(f"Hi {number}.")) for number in range(2)]
        wait_until(lambda: guest_of(opened).num_open == 2 and opened.episode.record.num_requests == 1)
        opened.door.dismiss(opened.key)
        assert [error_of(answer.result(20)) for answer in answers] == [(409, "episode_ended")] * 2
        assert opened.episode.record.num_requests == 1
        opened.policy.gate.set()


def test_the_end_of_an_episode_ends_its_open_requests():
    with open_door("a") as opened:
        opened.policy.gate.clear()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(opened.chat(user("Hi."))))
        thread.start()
        wait_until(lambda: opened.episode.record.num_requests == 1)
        assert not opened.episode.abandoned.is_set()
        opened.door.dismiss(opened.key)
        assert opened.episode.abandoned.is_set()
        thread.join(20)
        assert error_of(answers[0]) == (409, "episode_ended")
        assert error_of(opened.chat(user("Hi."))) == (401, "invalid_api_key")


def test_after_an_error_of_the_engine_an_equal_request_is_sampled():
    with open_door("a") as opened:
        texts, opened.policy.texts = opened.policy.texts, iter(())
        assert error_of(opened.chat(user("Hi."))) == (500, "engine_failed")
        assert opened.episode.record.num_requests == 0
        opened.policy.texts = texts
        assert opened.chat(user("Hi.")).status_code == 200


# ---- attacks
FOREIGN = ["", "Bearer", "Bearer x", "Basic x", "bearer \xe4", "Bearer " + "x" * 4000]


@pytest.mark.parametrize("header", FOREIGN, ids=lambda header: header[:9] or "none")
def test_a_foreign_key_is_refused_on_every_route(header):
    with open_door("a") as opened:
        headers = {"authorization": header.encode("latin-1")} if header else {}
        with httpx.Client(trust_env=False, headers=headers) as client:
            for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate", "/v1/responses"):
                assert error_of(client.post(f"{opened.root}{path}", json={})) == (401, "invalid_api_key")
            assert client.get(f"{opened.root}/v1/models").status_code == 401
        assert opened.policy.requests == []


def test_a_key_reaches_only_the_record_of_one_episode():
    with open_door("a", "b") as opened:
        other = OpenEpisode(seed=9, limits=LIMITS)
        with opened.client_of(opened.door.admit(other)) as client:
            opened.chat(user("Hi."))
            repeated = client.post("/chat/completions", json={"model": "policy", "messages": [user("Hi.")]})
        assert repeated.json()["choices"][0]["message"]["content"] == "b"
        assert [opened.episode.record.num_requests, other.record.num_requests] == [1, 1]


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"host": "evil.example"}, 400), ({"origin": "http://evil.example"}, 403), ({"host": "localhost:1"}, 200)],
    ids=["another host", "another origin", "this machine"],
)
def test_web_pages_and_other_host_names_are_refused(headers, status):
    with open_door("a") as opened:
        assert opened.client.get("/models", headers=headers).status_code == status


@pytest.mark.parametrize(
    "path",
    ["/v1/../v1/chat/completions", "/v1//chat/completions", "/V1/chat/completions", "/v1/chat/completions/", "/", "//"],
)
def test_only_exact_paths_are_routes(path):
    with open_door("a") as opened:
        target = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {opened.key}\r\n"
        assert send_raw(opened, f"{target}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()).startswith(
            b"HTTP/1.1 404"
        )


def test_other_apis_are_refused_with_a_remedy():
    with open_door() as opened:
        refused = opened.client.post("/responses", json={})
        assert refused.status_code == 404
        assert "set_default_openai_api('chat_completions')" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "messages"),
        ({"tools": [{"type": "function"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_that_cannot_be_followed_are_refused_by_name(fields, param):
    with open_door("a") as opened:
        refused = opened.client.post("/chat/completions", json={"messages": [user("Hi.")], **fields})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith(param)
        assert "\n" not in refused.json()["error"]["message"]
        assert opened.policy.requests == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [[1], [1 << 20]]}, "prompt"),
        ("/v1/completions", {"prompt": [[1, -1]]}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "logprobs": 1}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1 << 40]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [5], "stream": True}, "stream"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"n": 2}}, "n"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"stop_token_ids": [7]}}, "sampling_params"),
    ],
    ids=str,
)
def test_prompts_that_the_policy_cannot_read_are_refused_by_name(path, body, param):
    with open_door("a") as opened:
        refused = opened.client.post(f"{opened.root}{path}", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith(param)


@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "\xff", "[" * 100_000, '"\\ud800"', "9" * 5000, "", "1}{"],
    ids=["NaN", "infinity", "no UTF-8", "nested", "half a character", "long number", "nothing", "two values"],
)
def test_a_body_that_is_no_object_of_json_is_refused(value):
    body = b'{"messages": [{"role": "user", "content": "Hi."}], "a": ' + value.encode("latin-1") + b"}"
    with open_door("a") as opened:
        assert opened.client.post("/chat/completions", content=body).status_code == 400


def test_only_the_first_wrong_element_of_a_list_is_reported():
    """The errors of all elements of a body of 8 MiB would need gigabytes of memory."""
    wrong = b"[" + b"1," * 5000 + b"1]"
    bodies = [(b'{"messages":%b}', ChatRequest), (b'{"prompt":%b}', TextRequest), (b'{"token_ids":%b}', TokenRequest)]
    for body, kind in bodies:
        content = body % (wrong if kind is ChatRequest else wrong.replace(b"1", b'{"a":1}'))
        with pytest.raises(RefusedRequest) as refused:
            read_request(content, kind)
        assert refused.value.__context__.error_count() < 6


def test_a_text_that_is_far_too_long_is_refused_before_it_is_encoded(monkeypatch):
    monkeypatch.setattr(AgentRoutes, "_read", lambda *_, **__: pytest.fail("the text was encoded"))
    with open_door("a", limits=limits(context=100)) as opened:
        text = "a " * 4000
        for refused in (opened.chat(user(text)), opened.client.post("/completions", json={"prompt": ["a", text]})):
            assert error_of(refused) == (400, "context_length_exceeded")


def send_raw(opened, request):
    """Send bytes over a socket, and return what the server answers before it closes the connection."""
    answer = b""
    with (
        suppress(ConnectionError),
        connect(opened) as connection,
    ):
        connection.sendall(request)
        while received := connection.recv(65536):
            answer += received
    return answer


def head_of(opened, *lines):
    first = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    return (first + f"Authorization: Bearer {opened.key}\r\n" + "".join(f"{line}\r\n" for line in lines)).encode()


def test_large_bodies_are_refused_with_and_without_their_length(monkeypatch):
    monkeypatch.setattr(rheostat.models.agents.door, "MAX_BODY_BYTES", 1000)
    with open_door("a") as opened:
        stated = opened.client.post("/chat/completions", content=b"x" * 1001)
        assert stated.status_code == 413
        chunk = b"3e9\r\n" + b"x" * 1001 + b"\r\n"
        chunked = send_raw(opened, head_of(opened, "Transfer-Encoding: chunked") + b"\r\n" + chunk)
        assert chunked.startswith(b"HTTP/1.1 413")
        assert opened.chat(user("Hi.")).status_code == 200


def test_slow_bodies_are_refused(monkeypatch):
    monkeypatch.setattr(rheostat.models.agents.door, "BODY_SECONDS", 0.2)
    with open_door("a") as opened, connect(opened) as connection:
        connection.sendall(head_of(opened, "Content-Length: 100") + b"\r\n{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
        wait_until(lambda: guest_of(opened).num_open == 0)


def connect(opened):
    return socket.create_connection(("127.0.0.1", opened.door.port), timeout=20)


def test_if_too_many_connections_wait_the_oldest_are_closed_and_requests_are_answered(monkeypatch):
    monkeypatch.setattr(rheostat.infra.http_guard, "MAX_WAITING", 3)
    with open_door("a", "b") as opened, ExitStack() as stack:
        opened.policy.gate.clear()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(opened.chat(user("Hi."))))
        thread.start()
        wait_until(lambda: opened.episode.record.num_requests == 1)
        opened.door._loop.call_soon_threadsafe(time.sleep, 0.5)  # then many connections are accepted at once
        silent = [stack.enter_context(connect(opened)) for _ in range(40)]
        for connection in silent[-3:]:
            connection.sendall(head_of(opened)[:40])
        for connection in silent[:-3]:
            assert connection.recv(1) == b""
        assert len(opened.door._server.server_state.connections) == 4
        opened.policy.gate.set()
        thread.join(20)
        assert answers[0].status_code == 200
        assert opened.chat(user("More.")).status_code == 200


def test_large_and_malformed_headers_are_refused():
    with open_door("a") as opened:
        for lines in (["X y: z"], ["Content-Length: 1", "Content-Length: 2"]):
            assert send_raw(opened, head_of(opened, *lines) + b"\r\n").startswith(b"HTTP/1.1 400")
        large = send_raw(opened, head_of(opened, "X: " + "x" * (2 << 20)) + b"\r\n")
        assert large == b"" or large.startswith(b"HTTP/1.1 400")  # the connection may be closed while it is written
        assert opened.chat(user("Hi.")).status_code == 200


def test_text_of_a_request_cannot_add_headers_to_an_answer():
    with open_door("a") as opened:
        answer = opened.client.post("/x%0d%0aset-cookie: a", json={}, headers={"idempotency-key": "a\tb"})
        assert "set-cookie" not in answer.headers
        assert answer.status_code == 404


def test_another_episode_can_use_the_same_key_later():
    with open_door("a", "b") as opened:
        opened.chat(user("Hi."))
        following = OpenEpisode(seed=6, limits=LIMITS)
        assert opened.door.admit(following, key=opened.key) == opened.key
        opened.chat(user("Hi."))
        assert [opened.episode.record.num_requests, following.record.num_requests] == [1, 1]
