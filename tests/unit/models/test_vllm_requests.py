"""Requests to the plugin inside vLLM's server, and its answers with errors. vLLM is not needed for these files."""

import asyncio
import importlib
import json
from pathlib import Path

import pytest

from rheostat.models.engines.vllm.server import PLUGIN

SAMPLING = {
    "temperature": 1,
    "top_p": 0.5,
    "top_k": 0,
    "stop": [],
    "stop_token_ids": [2],
    "ignore_eos": False,
    "banned": [],
}
REQUEST = {"id": 1, "tokens": [5, 6], "seed": 2**63 - 1, "max_tokens": 3}


@pytest.fixture
def plugin(monkeypatch):
    """Function that imports a file of the plugin by its name."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    return importlib.import_module


@pytest.fixture
def requests(plugin):
    return plugin("rheostat_requests")


def work(*requests, **sampling) -> bytes:
    return json.dumps({"digest": "d", "sampling": SAMPLING | sampling, "requests": requests}).encode()


def test_a_request_for_completions_is_read(requests):
    image = {"digest": "d", "path": "p", "offset": 7, "length": 3, "width": 4}
    with_image = REQUEST | {"id": 2, "images": [image], "collapsed": [5], "settings": {"size": 3}, "experts": True}
    read = requests.read_request(requests.Work, work(REQUEST, with_image))
    assert (read.sampling.temperature, read.sampling.stop_token_ids) == (1.0, [2])
    plain, pictured = read.requests
    assert (plain.tokens, plain.seed, plain.images, plain.experts) == ([5, 6], 2**63 - 1, [], False)
    assert pictured.images == [requests.Picture("d", "p", 7, 3)]
    assert (pictured.settings, pictured.experts) == ({"size": 3}, True)
    longer = pictured.append_completion([9])
    assert (longer.tokens, longer.collapsed, longer.images) == ([5, 6, 9], [5, 9], pictured.images)


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("Work", b"no JSON", "Invalid JSON"),
        ("Work", b"[]", "Input should be an object"),
        ("Work", work({}), "requests.0.tokens: Field required"),
        ("Work", work(REQUEST, REQUEST | {"id": 2, "seed": "3"}), "requests.1.seed: Input should be a valid integer"),
        ("Work", work(REQUEST | {"tokens": [5, 6.5]}), "requests.0.tokens.1: Input should be a valid integer"),
        ("Work", work(REQUEST, REQUEST), "`requests` contains an id twice"),
        ("Work", work(REQUEST, ignore_eos=1), "sampling.ignore_eos: Input should be a valid boolean"),
        ("Load", b'{"directory": "a", "adapter": 3}', "adapter: Input should be a valid string"),
        (
            "Questions",
            b'{"digest": "", "prompts": [{"tokens": [1]}], "continuations": [[1], []], "banned": []}',
            "continuations.1: List should have at least 1 item",
        ),
    ],
)
def test_a_request_of_another_form_is_refused_in_one_line(requests, kind, body, reason):
    with pytest.raises(requests.Refused) as caught:
        requests.read_request(getattr(requests, kind), body)
    assert str(caught.value).startswith(reason)
    assert "\n" not in str(caught.value)
    assert caught.value.status == 400


def test_a_request_to_load_a_policy_is_read(requests):
    read = requests.read_request(requests.Load, b'{"directory": "/a", "adapter": null}')
    assert read == requests.Load(Path("/a"), None, drain=False)


@pytest.mark.parametrize("has_started", [False, True])
def test_a_refusal_is_the_status_of_a_response_or_the_last_line_of_one_that_has_started(plugin, requests, has_started):
    http, messages = plugin("rheostat_http"), []

    async def send(message):
        messages.append(message)

    async def answer(send):
        if has_started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise requests.Refused("other weights", status=409, digest="d")

    asyncio.run(http.answer_errors(answer, send))
    [start, body] = messages
    assert (start["type"], start["status"]) == ("http.response.start", 200 if has_started else 409)
    assert json.loads(body["body"]) == {"error": "other weights", "digest": "d"}
    assert not body.get("more_body")
