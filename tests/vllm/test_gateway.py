"""The routes inside vLLM's server: access, loading and proof of weights, completions and likelihoods."""

import json
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from rheostat.models.records.model_input import ModelInput
from tests.support.engines import EOS, TOLERANCE, Published, plain_logprobs, publish, publish_adapter, publish_changed
from tests.support.policies import CONTEXT, VOCABULARY, small_tokenizer
from tests.vllm.servers import PLAIN, GenerateAnswer, build_request, collect, meddling_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LONG = tuple(np.random.default_rng(1).integers(2, VOCABULARY, 170).tolist())
"""Prompt of more than one block of the prefix cache, which has 128 tokens on a CPU."""
SHORT = (5, 6, 7, 8)


def change_tensors(change):
    def apply(directory):
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return apply


def edit_config(directory, *removed, **settings):
    config = json.loads((directory / "config.json").read_text()) | settings
    text = json.dumps({name: value for name, value in config.items() if name not in removed})
    (directory / "config.json").write_text(text)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def untied(home) -> list[Published]:
    return [publish(home / f"llama{seed}", seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def tied(home) -> list[Published]:
    changes = {"tie_word_embeddings": True, "initializer_range": 0.1}
    return [publish(home / f"qwen{seed}", "qwen3", seed=seed, changes=changes) for seed in (1, 2)]


@pytest.fixture(scope="module")
def server(untied):
    with meddling_server(untied[0].directory, adapter_rank=8) as server:
        yield server


@pytest.fixture(scope="module")
def tied_server(tied):
    with meddling_server(tied[0].directory) as server:
        yield server


@pytest.fixture
def loaded(server, untied):
    """Server that serves the first policy."""
    server.load(untied[0])
    return server


@pytest.fixture
def digest(untied) -> str:
    """Digest of the first policy."""
    return untied[0].version.digest


def plain(model, prompt, tokens) -> list[float]:
    return plain_logprobs(model, ModelInput.from_prompt(prompt), tokens, 1.0)


def require_served(server: GenerateAnswer, policy: Published, *, prompt=SHORT) -> list[int]:
    """Check that the log-probs of a completion are those of this policy, and return its tokens."""
    completions, _ = server.generate(policy.version.digest, [build_request(0, prompt)])
    [one] = completions.values()
    assert len(one.tokens) == len(one.logprobs) == 24
    np.testing.assert_allclose(one.logprobs, plain(policy.model(), prompt, one.tokens), atol=TOLERANCE)
    return one.tokens


# ---- access


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/rheostat/about"),
        ("GET", "/rheostat/proof"),
        ("POST", "/rheostat/load"),
        ("POST", "/rheostat/generate"),
        ("POST", "/rheostat/likelihoods"),
        ("POST", "/rheostat/sleep"),
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("POST", "/health"),
        ("GET", "/no/such/path"),
    ],
)
def test_no_path_answers_without_the_key(server, method, path):
    for key in ("?", "a key for test", "a key for testss", "a key for nobody"):
        with server.http(key) as http:
            assert http.request(method, path, json={}).status_code == 401
            assert http.request(method, path, json={}, headers={"Authorization": server.key}).status_code == 401


def test_health_alone_needs_no_key(server):
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
    assert httpx.get(f"{server.url}/rheostat/proof", trust_env=False).status_code == 401


def test_the_routes_of_vllm_are_closed_while_no_policy_is_served(server, untied):
    server.post("/rheostat/sleep")
    question = {"model": "policy", "prompt": list(SHORT), "max_tokens": 2}
    assert server.post("/v1/completions", **question).status_code == 409
    server.load(untied[0])
    assert server.post("/v1/completions", **question).status_code == 200


# ---- loading and proof


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_log_probs_are_those_of_the_weights_loaded_last(kind, request):
    server = request.getfixturevalue("server" if kind == "untied" else "tied_server")
    policies = request.getfixturevalue(kind)
    server.load(policies[0])
    for policy in (policies[1], policies[0], policies[1]):
        answer = server.load(policy)
        assert (answer["digest"], answer["bytes"]) == (policy.version.digest, policy.version.weights.bytes)
        assert server.proof() == policy.version.digest
        require_served(server, policy)
        require_served(server, policy, prompt=LONG)  # the cache of the old weights may not be used
    first, second = (plain(policy.model(), SHORT, [9, 30, 31]) for policy in policies)
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 100 * TOLERANCE


def test_a_policy_that_is_served_is_not_loaded_again(loaded, untied):
    assert loaded.load(untied[0])["bytes"] == 0


def test_a_damaged_file_is_refused_and_nothing_is_served(loaded, untied, digest, tmp_path):
    damaged = publish_changed(tmp_path, untied[1], lambda directory: None)
    with (damaged.directory / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        last = file.read(1)
        file.seek(-3, 2)
        file.write(bytes([last[0] ^ 1]))
    answer = loaded.try_load(damaged)
    assert answer.status_code == 400
    assert "model.safetensors is damaged: its digest must be" in answer.json()["error"]
    assert loaded.proof() == ""
    refused = loaded.post("/rheostat/generate", digest=digest, sampling={}, requests=[])
    assert refused.status_code in (400, 409)
    loaded.load(untied[0])
    require_served(loaded, untied[0])


def shrink(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda directory: edit_config(directory, rms_norm_eps=1e-3), "rms_norm_eps"),
        (change_tensors(lambda tensors: tensors.pop("model.norm.weight")), "model.norm.weight"),
        (
            change_tensors(lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")),
            "model.layers.1.mlp.up_proj.weight",
        ),
        (change_tensors(lambda tensors: tensors.pop("lm_head.weight")), "lm_head.weight"),
        (change_tensors(shrink), "up_proj.weight"),
    ],
)
def test_weights_of_another_architecture_are_not_served_and_do_no_lasting_harm(
    loaded, untied, tmp_path, change, reason
):
    answer = loaded.try_load(publish_changed(tmp_path, untied[1], change))
    assert answer.status_code == 400
    assert reason in answer.json()["error"]
    assert loaded.proof() == ""
    loaded.load(untied[1])
    require_served(loaded, untied[1])


def test_a_tensor_that_is_also_missing_in_the_directory_of_the_server_is_named(untied, tmp_path):
    lacking = publish_changed(tmp_path, untied[0], change_tensors(lambda tensors: tensors.pop("model.norm.weight")))
    with meddling_server(lacking.directory) as server:
        answer = server.try_load(lacking)
        assert answer.status_code == 500
        assert "does not contain the tensors of model.norm.weight" in answer.json()["error"]
        assert server.proof() == ""


def test_an_external_policy_may_omit_defaults_and_store_a_tied_head_twice(tied_server, tied, tmp_path):
    defaults = ("attention_bias", "attention_dropout", "hidden_act", "use_cache", "transformers_version", "dtype")

    def rewrite(directory):
        edit_config(directory, *defaults, torch_dtype="float32")
        change_tensors(
            lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
        )(directory)

    policy = publish_changed(tmp_path, tied[1], rewrite)
    tied_server.load(tied[0])
    tied_server.load(policy)
    require_served(tied_server, policy)


@pytest.mark.parametrize("which", ["norm", "packed"])
def test_parameters_that_were_changed_without_a_load_are_noticed(tied_server, tied, which):
    tied_server.load(tied[0])
    assert tied_server.proof() == tied[0].version.digest
    assert tied_server.post("/rheostat/meddle", which=which).status_code == 200
    assert tied_server.proof() == ""
    assert tied_server.load(tied[0])["bytes"] == tied[0].version.weights.bytes
    require_served(tied_server, tied[0])


def test_a_sleeping_server_proves_no_policy_until_a_policy_is_loaded_again(loaded, untied, digest):
    assert loaded.post("/rheostat/sleep").json() == {"slept": False}  # a CPU has no GPU memory to release
    assert loaded.proof() == ""
    assert loaded.load(untied[0])["bytes"] == 0
    assert loaded.proof() == digest


@pytest.mark.parametrize("rank", [4, 8])
def test_an_adapter_is_served_on_its_base(server, untied, tmp_path, rank):
    base = untied[0]
    adapted = publish_adapter(tmp_path, base, rank=rank)
    server.load(base)
    answer = server.load(adapted)
    assert (answer["digest"], answer["bytes"]) == (adapted.version.digest, adapted.version.adapter.bytes)
    tokens = require_served(server, adapted)
    apart = np.subtract(plain(adapted.model(), SHORT, tokens), plain(base.model(), SHORT, tokens))
    assert np.abs(apart).max() > 100 * TOLERANCE
    server.load(base)
    require_served(server, base)
    server.load(adapted)
    require_served(server, adapted, prompt=LONG)


def test_an_adapter_of_too_high_a_rank_is_refused(server, untied, tmp_path):
    answer = server.try_load(publish_adapter(tmp_path, untied[0], rank=12))
    assert answer.status_code != 200
    assert "rank" in answer.json()["error"]
    assert server.proof() == ""


# ---- completions


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("generate", {"sampling": PLAIN, "requests": [build_request(0, SHORT)]}),
        ("likelihoods", {"prompts": [{"tokens": list(SHORT)}], "continuations": [[3]], "banned": []}),
    ],
)
def test_work_for_other_weights_is_refused(loaded, untied, digest, route, body):
    answer = loaded.post(f"/rheostat/{route}", digest=untied[1].version.digest, **body)
    assert answer.status_code == 409
    assert answer.json()["digest"] == digest


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (build_request(1, LONG, max_tokens=CONTEXT), f"max_model_len, which is {CONTEXT}"),
        (build_request(1, [VOCABULARY + 5]), "vocabulary"),
        (build_request(1, []), "tokens: List should have at least 1 item"),
        (build_request(1, SHORT, max_tokens=0), "max_tokens"),
        ({"id": 1, "tokens": list(SHORT), "seed": 1}, "max_tokens: Field required"),
    ],
)
def test_one_invalid_request_refuses_the_work_in_one_line(loaded, digest, wrong, reason):
    answer = loaded.try_generate(digest, [build_request(0, SHORT), wrong])
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_completions_end_with_their_eos_and_only_there(loaded, digest):
    requests = [build_request(name, SHORT, seed=name, max_tokens=60) for name in range(24)]
    completions, _ = loaded.generate(digest, requests, stop_token_ids=[EOS])
    assert {one.finish for one in completions.values()} == {"stop", "length"}
    for one in completions.values():
        assert EOS not in one.tokens[:-1]
        assert (one.tokens[-1] == EOS) == (one.finish == "stop")
        assert len(one.tokens) == len(one.logprobs)


def test_the_token_that_completes_a_stop_text_is_the_last_token(loaded, digest):
    tokenizer = small_tokenizer()
    requests = [build_request(name, SHORT, seed=name, max_tokens=150) for name in range(24)]
    completions, _ = loaded.generate(digest, requests, stop=["a", "12"])
    stopped = [one for one in completions.values() if one.finish == "stop"]
    assert len(stopped) > 5
    for one in completions.values():
        before, whole = (tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (one.tokens[:-1], one.tokens))
        assert "a" not in before
        assert "12" not in before
        assert ("a" in whole or "12" in whole) == (one.finish == "stop")
        assert len(one.tokens) == len(one.logprobs)


def test_chunks_show_progress_before_the_end(loaded, digest):
    with loaded.generating(digest, [build_request(0, SHORT, max_tokens=200)]) as lines:
        parts = [json.loads(line) for line in lines]
    assert [part.get("finish") for part in parts[:-2]] == [None] * (len(parts) - 2)
    assert len(parts) >= 200 // 32
    assert parts[-2]["finish"] == "length"
    assert parts[-1]["done"]


def test_a_load_aborts_running_completions_which_can_be_continued(server, untied):
    old, new = untied
    server.load(old)
    requests = [build_request(name, SHORT, seed=name, max_tokens=240) for name in range(16)]
    with server.slowed(), server.generating(old.version.digest, requests) as lines:
        first = [next(lines)]
        loading = threading.Thread(target=server.load, args=(new,))
        loading.start()
        completions, _ = collect([*first, *lines])
        loading.join()
    aborted = [one for one in completions.values() if one.finish == "abort"]
    assert aborted
    for one in completions.values():
        assert one.error is None
        np.testing.assert_allclose(one.logprobs, plain(old.model(), SHORT, one.tokens), atol=TOLERANCE)
    server.load(old)
    prefix = next(one.tokens for one in aborted if one.tokens)
    require_served(server, old, prompt=(*SHORT, *prefix[:100]))


def test_the_work_of_a_caller_that_disconnects_is_ended(loaded, digest):
    requests = [build_request(name, SHORT, seed=name, max_tokens=250) for name in range(64)]
    _, before = loaded.generate(digest, [build_request(0, SHORT)])
    with loaded.slowed():
        with loaded.generating(digest, requests) as lines:
            next(lines)
        _, after = loaded.generate(digest, [build_request(0, SHORT, max_tokens=240)])
    assert after["sequences"] - before["sequences"] < 64 * 250 / 2  # it does not run next to other work


def test_log_probs_that_are_not_numbers_are_reported_as_nan(server, untied, tmp_path):
    def spoil(tensors):
        tensors["model.norm.weight"][:] = float("nan")

    spoilt = publish_changed(tmp_path, untied[1], change_tensors(spoil))
    server.load(spoilt)
    assert server.proof() == spoilt.version.digest
    completions, _ = server.generate(spoilt.version.digest, [build_request(0, SHORT)])
    assert np.isnan(completions[0].logprobs).all()


def test_step_counts_match_the_tokens_and_exclude_idle_time(loaded, digest):
    _, before = loaded.generate(digest, [build_request(0, SHORT)])
    time.sleep(2)
    start = time.monotonic()
    loaded.likelihoods(digest, [list(SHORT)], [[3]])
    requests = [build_request(name, SHORT, seed=name, max_tokens=80) for name in range(16)]
    _, after = loaded.generate(digest, requests)
    took = time.monotonic() - start
    steps, sequences, squared, seconds = (
        after[name] - before[name] for name in ("steps", "sequences", "sequences_squared", "seconds")
    )
    assert 0 < seconds <= took
    assert 16 * 70 < sequences <= 16 * 79 + 1  # the prefill generates the first token of each completion
    assert steps > 70
    assert sequences**2 <= steps * squared * (1 + 1e-9)


# ---- likelihoods


def test_likelihoods_equal_the_sums_of_transformers(loaded, untied, digest):
    prompts = [list(SHORT), list(LONG), [9]]
    continuations = [[3], [4], [3, 4, 5], [3, 4, 9], [7] * (CONTEXT - len(LONG))]  # the last fills the context
    found = loaded.likelihoods(digest, prompts, continuations)
    model = untied[0].model()
    expected = [[sum(plain(model, prompt, tokens)) for tokens in continuations] for prompt in prompts]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=1e-5)


def test_more_continuations_are_scored_than_vllm_computes_at_once(loaded, digest):
    found = loaded.likelihoods(digest, [list(SHORT)], [[token] for token in range(VOCABULARY)])
    assert np.exp(found).sum() == pytest.approx(1, abs=1e-4)
