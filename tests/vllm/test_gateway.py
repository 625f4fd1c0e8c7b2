"""The routes inside vLLM's server: who may ask, what is loaded and proven, and what completions and scores are."""

import json
import shutil
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from models.modeling.policy import save_policy
from tests.support.engines import EOS, SHAPE, Published, publish, publish_adapter, publish_directory
from tests.support.policies import CONTEXT, DECODER, VOCABULARY, small_tokenizer
from tests.vllm.servers import PLAIN, Asked, asked, collect, meddling_server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
"""Of log-probs in float32 between vLLM and a plain forward pass."""
LONG = tuple(np.random.default_rng(1).integers(2, VOCABULARY, 170).tolist())
"""A prompt of more than one block of the prefix cache, which has 128 tokens on a CPU."""
SHORT = (5, 6, 7, 8)


def publish_tied(path: Path, *, seed: int) -> Published:
    """Publish a random qwen3 whose head is its embedding."""
    tokenizer = small_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = Qwen3Config(
            **{**DECODER, **SHAPE},
            vocab_size=VOCABULARY,
            eos_token_id=EOS,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            tie_word_embeddings=True,
            initializer_range=0.1,
        )
        save_policy(AutoModelForCausalLM.from_config(shape), tokenizer, path / "written")
    return publish_directory(path)


def changed(path: Path, policy: Published, change) -> Published:
    """Publish a policy's files after a change to a copy of them."""
    shutil.copytree(policy.directory, path / "written", ignore=shutil.ignore_patterns("bundle.json"))
    change(path / "written")
    return publish_directory(path)


def change_tensors(change):
    def apply(directory):
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return apply


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def untied(home) -> list[Published]:
    return [publish(home / f"llama{seed}", seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def tied(home) -> list[Published]:
    return [publish_tied(home / f"qwen{seed}", seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def server(untied):
    with meddling_server(untied[0].directory, adapter_rank=8) as server:
        yield server


@pytest.fixture(scope="module")
def tied_server(tied):
    with meddling_server(tied[0].directory) as server:
        yield server


def plain(model, prompt, tokens) -> list[float]:
    with torch.inference_mode():
        logits_TV = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()


def require_served(server: Asked, policy: Published, *, prompt=SHORT) -> list[int]:
    """Check that completions come from this policy, to the last log-prob."""
    completions, _ = server.generate(policy.version.digest, [asked(0, prompt)])
    [one] = completions.values()
    assert len(one.tokens) == len(one.logprobs) == 24
    np.testing.assert_allclose(one.logprobs, plain(policy.model(), prompt, one.tokens), atol=TOLERANCE)
    return one.tokens


# ---- who may ask


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


def test_a_server_says_what_it_is(server):
    about = server.get("/rheostat/about").json()
    assert (about["platform"], about["dtype"], about["logprobs"]) == ("cpu", "float32", "processed")
    assert (about["max_model_len"], about["lora_rank"], about["tensor_parallel"]) == (CONTEXT, 8, 1)
    assert about["vllm"].startswith("0.32.0")


def test_vllms_own_routes_are_shut_while_nothing_is_served(server, untied):
    server.post("/rheostat/sleep")
    question = {"model": "policy", "prompt": list(SHORT), "max_tokens": 2}
    assert server.post("/v1/completions", **question).status_code == 409
    server.load(untied[0])
    assert server.post("/v1/completions", **question).status_code == 200


# ---- what is loaded, and proven


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_log_probs_are_those_of_the_weights_loaded_last(kind, request):
    server = request.getfixturevalue("server" if kind == "untied" else "tied_server")
    policies = request.getfixturevalue(kind)
    server.load(policies[0])
    for policy in (policies[1], policies[0], policies[1]):
        told = server.load(policy)
        assert (told["digest"], told["bytes"]) == (policy.version.digest, policy.version.weights.bytes)
        assert server.proof() == policy.version.digest
        require_served(server, policy)
        require_served(server, policy, prompt=LONG)  # of the old weights' cache nothing may be left
    first, second = (plain(policy.model(), SHORT, [9, 30, 31]) for policy in policies)
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 100 * TOLERANCE


def test_what_is_served_is_not_loaded_again(server, untied):
    server.load(untied[0])
    assert server.load(untied[0])["bytes"] == 0


def test_a_damaged_file_is_refused_and_nothing_is_served(server, untied, tmp_path):
    damaged = changed(tmp_path, untied[1], lambda directory: None)
    with (damaged.directory / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        last = file.read(1)
        file.seek(-3, 2)
        file.write(bytes([last[0] ^ 1]))
    server.load(untied[0])
    answer = server.try_load(damaged)
    assert answer.status_code == 400
    assert "model.safetensors: expected digest" in answer.json()["error"]
    assert server.proof() == ""
    refused = server.post("/rheostat/generate", digest=untied[0].version.digest, sampling={}, requests=[])
    assert refused.status_code in (400, 409)
    server.load(untied[0])
    require_served(server, untied[0])


def test_weights_of_another_model_are_refused(server, untied, tmp_path):
    def widen(directory):
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))

    answer = server.try_load(changed(tmp_path, untied[1], widen))
    assert answer.status_code == 400
    assert "rms_norm_eps" in answer.json()["error"]
    assert server.proof() == ""


def test_a_policy_from_elsewhere_leaves_defaults_out_and_may_store_a_tied_head_twice(tied_server, tied, tmp_path):
    def spell_as_others_do(directory):
        config = json.loads((directory / "config.json").read_text())
        for left_out in (
            "attention_bias",
            "attention_dropout",
            "hidden_act",
            "use_cache",
            "transformers_version",
            "dtype",
        ):
            del config[left_out]
        (directory / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
        change_tensors(
            lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
        )(directory)

    policy = changed(tmp_path, tied[1], spell_as_others_do)
    tied_server.load(tied[0])
    tied_server.load(policy)
    require_served(tied_server, policy)


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_weights_that_miss_a_tensor_are_not_served(server, untied, tmp_path, lost):
    server.load(untied[0])
    answer = server.try_load(changed(tmp_path, untied[1], change_tensors(lambda tensors: tensors.pop(lost))))
    assert answer.status_code == 400
    assert answer.json()["error"].endswith(f"{lost} differ")
    assert server.proof() == ""
    server.load(untied[1])
    require_served(server, untied[1])


def test_a_tensor_of_another_size_is_not_served_and_does_no_lasting_harm(server, untied, tmp_path):
    def shrink(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1].clone()

    answer = server.try_load(changed(tmp_path, untied[1], change_tensors(shrink)))
    assert answer.status_code == 400
    assert answer.json()["error"].endswith("up_proj.weight differ")
    assert server.proof() == ""
    server.load(untied[1])
    require_served(server, untied[1])


@pytest.mark.parametrize("which", ["norm", "packed"])
def test_parameters_changed_behind_its_back_are_noticed(tied_server, tied, which):
    tied_server.load(tied[0])
    assert tied_server.proof() == tied[0].version.digest
    assert tied_server.post("/rheostat/meddle", which=which).status_code == 200
    assert tied_server.proof() == ""
    assert tied_server.load(tied[0])["bytes"] == tied[0].version.weights.bytes
    require_served(tied_server, tied[0])


def test_a_server_that_sleeps_proves_nothing_until_it_is_loaded_again(server, untied):
    server.load(untied[0])
    assert server.post("/rheostat/sleep").json() == {"slept": False}  # a CPU has no memory to give back
    assert server.proof() == ""
    assert server.load(untied[0])["bytes"] == 0
    assert server.proof() == untied[0].version.digest


@pytest.mark.parametrize("rank", [4, 8])
def test_an_adapter_is_served_on_its_base(server, untied, tmp_path, rank):
    base = untied[0]
    adapted = publish_adapter(tmp_path, base, rank=rank)
    server.load(base)
    told = server.load(adapted)
    assert (told["digest"], told["bytes"]) == (adapted.version.digest, adapted.version.adapter.bytes)
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


# ---- what is generated


@pytest.mark.parametrize("route", ["generate", "likelihoods"])
def test_work_for_other_weights_is_refused(server, untied, route):
    server.load(untied[0])
    bodies = {
        "generate": {"sampling": PLAIN, "requests": [asked(0, SHORT)]},
        "likelihoods": {"prompts": [{"tokens": list(SHORT)}], "continuations": [[3]], "banned": []},
    }
    answer = server.post(f"/rheostat/{route}", digest=untied[1].version.digest, **bodies[route])
    assert answer.status_code == 409
    assert answer.json()["digest"] == untied[0].version.digest


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (asked(1, LONG, max_tokens=CONTEXT), f"more than max_model_len {CONTEXT}"),
        (asked(1, [VOCABULARY + 5]), "vocabulary"),
        (asked(1, []), "prompt"),
        (asked(1, SHORT, max_tokens=0), "max_tokens"),
        ({"id": 1, "tokens": list(SHORT), "seed": 1}, "max_tokens: expected int"),
    ],
)
def test_one_wrong_request_refuses_the_work_in_one_line(server, untied, wrong, told):
    server.load(untied[0])
    requests = [asked(0, SHORT), wrong]
    answer = server.post("/rheostat/generate", digest=untied[0].version.digest, sampling=PLAIN, requests=requests)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_completions_end_with_their_eos_and_only_there(server, untied):
    server.load(untied[0])
    requests = [asked(name, SHORT, seed=name, max_tokens=60) for name in range(24)]
    completions, _ = server.generate(untied[0].version.digest, requests, stop_token_ids=[EOS])
    assert {one.finish for one in completions.values()} == {"stop", "length"}
    for one in completions.values():
        assert EOS not in one.tokens[:-1]
        assert (one.tokens[-1] == EOS) == (one.finish == "stop")
        assert len(one.tokens) == len(one.logprobs)


def test_the_token_that_completes_a_stop_text_is_the_last(server, untied):
    server.load(untied[0])
    tokenizer = small_tokenizer()
    requests = [asked(name, SHORT, seed=name, max_tokens=150) for name in range(24)]
    completions, _ = server.generate(untied[0].version.digest, requests, stop=["a", "12"])
    stopped = [one for one in completions.values() if one.finish == "stop"]
    assert len(stopped) > 5
    for one in completions.values():
        before, whole = (tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (one.tokens[:-1], one.tokens))
        assert "a" not in before
        assert "12" not in before
        assert ("a" in whole or "12" in whole) == (one.finish == "stop")
        assert len(one.tokens) == len(one.logprobs)


def test_chunks_show_progress_before_the_end(server, untied):
    server.load(untied[0])
    with server.generating(untied[0].version.digest, [asked(0, SHORT, max_tokens=200)]) as lines:
        parts = [json.loads(line) for line in lines]
    assert [part.get("finish") for part in parts[:-2]] == [None] * (len(parts) - 2)
    assert len(parts) >= 200 // 32
    assert parts[-2]["finish"] == "length"
    assert parts[-1]["done"]


def test_a_load_aborts_what_is_under_way_and_the_rest_can_follow(server, untied):
    old, new = untied
    server.load(old)
    requests = [asked(name, SHORT, seed=name, max_tokens=240) for name in range(16)]
    with server.generating(old.version.digest, requests) as lines:
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


def test_a_caller_that_leaves_ends_its_work(server, untied):
    server.load(untied[0])
    digest = untied[0].version.digest
    requests = [asked(name, SHORT, seed=name, max_tokens=250) for name in range(64)]
    _, before = server.generate(digest, [asked(0, SHORT)])
    with server.generating(digest, requests) as lines:
        next(lines)
    _, after = server.generate(digest, [asked(0, SHORT, max_tokens=240)])
    assert after["sequences"] - before["sequences"] < 64 * 250 / 2  # it does not run beside other work


def test_log_probs_that_are_no_numbers_are_told_as_such(server, untied, tmp_path):
    def spoil(tensors):
        tensors["model.norm.weight"][:] = float("nan")

    spoilt = changed(tmp_path, untied[1], change_tensors(spoil))
    server.load(spoilt)
    assert server.proof() == spoilt.version.digest
    completions, _ = server.generate(spoilt.version.digest, [asked(0, SHORT)])
    assert np.isnan(completions[0].logprobs).all()


def test_step_sums_are_those_of_the_tokens_and_of_no_idle_time(server, untied):
    server.load(untied[0])
    digest = untied[0].version.digest
    _, before = server.generate(digest, [asked(0, SHORT)])
    time.sleep(2)
    start = time.monotonic()
    server.likelihoods(digest, [list(SHORT)], [[3]])
    requests = [asked(name, SHORT, seed=name, max_tokens=80) for name in range(16)]
    _, after = server.generate(digest, requests)
    took = time.monotonic() - start
    steps, sequences, squared, seconds = (
        after[name] - before[name] for name in ("steps", "sequences", "sequences_squared", "seconds")
    )
    assert 0 < seconds <= took
    assert 16 * 70 < sequences <= 16 * 79 + 1  # of a completion the first token is the prefill's
    assert steps > 70
    assert sequences**2 <= steps * squared * (1 + 1e-9)


# ---- what is scored


def test_likelihoods_are_transformers_sums(server, untied):
    server.load(untied[0])
    prompts = [list(SHORT), list(LONG), [9]]
    continuations = [[3], [4], [3, 4, 5], [3, 4, 9], [7] * (CONTEXT - len(LONG))]  # the last fills the context
    found = server.likelihoods(untied[0].version.digest, prompts, continuations)
    model = untied[0].model()
    expected = [[sum(plain(model, prompt, tokens)) for tokens in continuations] for prompt in prompts]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=1e-5)


def test_more_tokens_are_scored_than_vllm_takes_at_once(server, untied):
    server.load(untied[0])
    found = server.likelihoods(untied[0].version.digest, [list(SHORT)], [[token] for token in range(VOCABULARY)])
    assert np.exp(found).sum() == pytest.approx(1, abs=1e-4)
