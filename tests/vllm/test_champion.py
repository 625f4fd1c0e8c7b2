"""`rheostat serve`: vLLM serves the champion, and promotions and rollbacks replace its weights in place."""

import os
import signal
import subprocess
import threading

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rheostat.infra.processes.server import free_ports
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.registry import POLICIES, RegistryRecord, open_registry
from tests.support.jobs import RHEOSTAT, wait_for
from tests.support.policies import write_policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

KEY = "a key for tests"
PROMPT = [5, 6, 7, 8]


def append_promotion(registry, directory):
    """Append the record of the promotion of a policy."""
    bundle = publish_bundle(registry.store, directory, prefix=POLICIES)
    facts = {"policy": bundle.digest, "bundle": bundle, "run": directory.name, "iteration": 1}
    texts = dict.fromkeys(("reason", "who", "when", "version"), "")
    return registry.append(
        lambda number, champion: RegistryRecord(
            number=number, kind="promote", previous=champion.number if champion else 0, **facts, **texts
        )
    )


class Served:
    """A server under test."""

    def __init__(self, store, port, log):
        self.url, self.log, self.store = f"http://127.0.0.1:{port}", log, store
        words = [RHEOSTAT, "serve", "assistant", "cache_gib=0.1", "max_batch_rows=8", "--port", str(port)]
        environment = {**os.environ, "RHEOSTAT_SERVE_KEY": KEY}
        self.process = subprocess.Popen(
            [*words, "--every", "0.5", "--store", str(store)],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def asked(self, path, **body):
        headers = {"Authorization": f"Bearer {KEY}"}
        method = "POST" if body else "GET"
        return httpx.request(method, self.url + path, json=body or None, headers=headers, timeout=120, trust_env=False)

    def completion(self, tokens=8):
        asked = {"model": "assistant", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.asked("/v1/completions", return_token_ids=True, **asked)

    def greedy(self):
        return self.completion().json()["choices"][0]["token_ids"]

    def wait_for_log(self, text, count=1):
        assert wait_for(
            lambda: self.log.read_text().count(text) >= count or self.process.poll() is not None, every=0.1
        ), self.log.read_text()
        assert self.log.read_text().count(text) >= count, self.log.read_text()


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    return open_registry(str(tmp_path_factory.mktemp("champions") / "store"), "assistant")


@pytest.fixture(scope="module")
def served(registry, tmp_path_factory):
    home = tmp_path_factory.mktemp("written")
    for seed, name in enumerate(("first", "second")):
        write_policy(home / name, seed=seed, changes={"head_dim": 32, "initializer_range": 0.3})
    append_promotion(registry, home / "first")
    server = Served(
        registry.store.uri.removeprefix("file://").partition("/registry/")[0], next(free_ports()), home / "log"
    )
    server.wait_for_log("record 1 as model 'assistant'")
    yield server, home
    children = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert not psutil.wait_procs(children, timeout=30)[1], "nothing of the server outlives the command"


def greedy(directory, tokens=8):
    """Return the greedy completion by transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    return ids[0, len(PROMPT) :].tolist()


def test_promotions_and_rollbacks_replace_weights_in_place_and_running_requests_are_completed(registry, served):
    server, home = served
    [model] = server.asked("/v1/models").json()["data"]
    assert model["id"] == "assistant"
    first = server.greedy()
    assert first == greedy(home / "first")

    long: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: long.append(server.completion(40)))
    asking.start()
    record = append_promotion(registry, home / "second")
    answers = []
    while "record 2 as model" not in server.log.read_text():
        answers.append(server.completion(2).status_code)
    asking.join()
    assert set(answers) <= {200}, "a request that comes while weights are loaded waits for them"
    assert long[0].json()["choices"][0]["finish_reason"] == "length"
    assert server.asked("/rheostat/proof").json() == {"digest": record.bundle.digest}
    assert server.greedy() == greedy(home / "second") != first

    words = [RHEOSTAT, "rollback", "assistant", "--reason", "it refuses too often", "--store", server.store]
    subprocess.run(words, check=True, timeout=120)
    server.wait_for_log("record 3 as model 'assistant'")
    assert server.greedy() == first
    assert server.asked("/rheostat/proof").json() == {"digest": registry.records()[0].bundle.digest}


def test_a_server_that_died_is_started_again_with_the_champion(registry, served):
    server, _ = served
    before = server.log.read_text().count("as model 'assistant'")
    port = int(server.url.rpartition(":")[2])
    connections = psutil.net_connections("tcp")
    [vllm] = {one.pid for one in connections if one.laddr.port == port and one.status == psutil.CONN_LISTEN}
    os.kill(vllm, signal.SIGKILL)
    server.wait_for_log("as model 'assistant'", count=before + 1)
    assert "The vLLM server has ended and is restarted" in server.log.read_text()
    digest = registry.champion().bundle.digest
    assert server.asked("/rheostat/proof").json() == {"digest": digest}
