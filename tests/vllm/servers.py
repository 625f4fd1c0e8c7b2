"""Servers for tests, and their answers, read without the client of the engine."""

import base64
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest

from rheostat.infra.environments.find import find_python
from rheostat.infra.processes.server import LOOPBACK, Launch, free_ports, start
from rheostat.models.config.engines import VllmEngine
from rheostat.models.engines.vllm.engine import ServedEngine
from rheostat.models.engines.vllm.server import PLUGIN, Address, command, environment, lora_rank, platform_of

PYTHON = os.environ.get("VLLM_PYTHON")
"""Python of vLLM's environment; None for the one that Rheostat finds."""
PYTHON_SETTING = f", python = '{PYTHON}'" if PYTHON else ""
CONFIG = VllmEngine.model_validate({"cache_gib": 0.1, "gpu_memory_share": 0.3, "python": PYTHON})
KEY = "a key for tests"
MEDDLING = Path(__file__).parent / "meddling"
PLAIN = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": True,
    "banned": [],
}


@dataclass
class Answered:
    """Completion, joined from its chunks."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    error: dict[str, object] | None = None


def build_request(name, tokens, *, seed=0, max_tokens=24, experts=False):
    return {"id": name, "tokens": list(tokens), "seed": seed, "max_tokens": max_tokens, "experts": experts}


@dataclass
class GenerateAnswer:
    """A server that was started for tests."""

    url: str
    key: str = KEY

    def http(self, key=None):
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)

    def get(self, path):
        with self.http() as http:
            return http.get(path)

    def post(self, path, **body):
        with self.http() as http:
            return http.post(path, json=body)

    def load(self, policy):
        """Load a published policy and return the answer, whose status must be 200."""
        answer = self.try_load(policy)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def try_load(self, policy):
        adapter = None if policy.adapter is None else str(policy.adapter)
        return self.post("/rheostat/load", directory=str(policy.directory), adapter=adapter)

    def proof(self):
        return self.get("/rheostat/proof").json()["digest"]

    def generate(self, digest, requests, **sampling):
        """Return the completions by id, and the step counts."""
        with self.generating(digest, requests, **sampling) as lines:
            return collect(lines)

    def try_generate(self, digest, requests):
        """Request completions with the plain sampling settings and return the answer, whatever its status is."""
        return self.post("/rheostat/generate", digest=digest, sampling=PLAIN, requests=requests)

    @contextmanager
    def generating(self, digest, requests, **sampling):
        body = {"digest": digest, "sampling": {**PLAIN, **sampling}, "requests": requests}
        with self.http() as http, http.stream("POST", "/rheostat/generate", json=body) as response:
            if response.status_code != 200:
                response.read()
            assert response.status_code == 200, response.text
            yield response.iter_lines()

    @contextmanager
    def slowed(self, seconds=0.05):
        """Let each step of the server take so much longer that work does not end while a busy client acts."""
        self.post("/rheostat/slow", seconds=seconds).raise_for_status()
        try:
            yield
        finally:
            self.post("/rheostat/slow", seconds=0).raise_for_status()

    def likelihoods(self, digest, prompts, continuations):
        spelt = [{"tokens": prompt} for prompt in prompts]
        body = {"digest": digest, "prompts": spelt, "continuations": continuations, "banned": []}
        answer = self.post("/rheostat/likelihoods", **body)
        assert answer.status_code == 200, answer.text
        found = np.frombuffer(base64.b64decode(answer.json()["logprobs"]), "<f8")
        return found.reshape(len(prompts), len(continuations))


def collect(lines):
    completions: dict[int, Answered] = {}
    for line in map(json.loads, lines):
        if "done" in line:
            return completions, line
        one = completions.setdefault(line["id"], Answered())
        if "error" in line:
            one.error = line
            continue
        one.tokens += np.frombuffer(base64.b64decode(line["tokens"]), "<i4").tolist()
        one.logprobs += np.frombuffer(base64.b64decode(line["logprobs"]), "<f4").tolist()
        one.finish = line["finish"]
    raise AssertionError(f"the answer ended early, after {completions}")


@contextmanager
def meddling_server(directory, *, adapter_rank=0, report_experts=False):
    """Start a server as workers do, with added routes that change its parameters, make its steps longer and count its
    recorded experts."""
    python = find_python("vllm", CONFIG.python)
    platform = platform_of(python)

    def arguments(port):
        words = command(
            CONFIG,
            directory,
            python=python,
            platform=platform,
            at=Address(port=port),
            lora_rank=lora_rank(adapter_rank),
            report_experts=report_experts,
        )
        return [word.replace("rheostat_vllm.", "rheostat_meddling.Meddling") for word in words]

    def answers(port):
        try:
            return httpx.get(f"http://{LOOPBACK}:{port}/health", timeout=2, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    launch = Launch(
        what="a server for tests",
        command=arguments,
        environment={
            **environment(KEY, platform=platform),
            "PYTHONPATH": f"{PLUGIN}{os.pathsep}{MEDDLING}",
            "OMP_NUM_THREADS": "1",
        },
        ready=answers,
        start_seconds=240,
    )
    process, port = start(launch, on_progress=lambda: None, ports=free_ports())
    try:
        yield GenerateAnswer(f"http://{LOOPBACK}:{port}")
    finally:
        process.stop()


# ---- an engine's own server


def server_of(engine: ServedEngine) -> psutil.Process:
    """Return the process that listens at the address of the engine's server."""
    [client] = engine._servers.running_clients()
    port = urlsplit(client.url).port
    [pid] = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    return psutil.Process(pid)


def guest_of(engine: ServedEngine, monkeypatch: pytest.MonkeyPatch, config: VllmEngine = CONFIG) -> ServedEngine:
    """Return another engine that queries the server of an engine by its address."""
    [client] = engine._servers.running_clients()
    monkeypatch.setenv("SERVERS_KEY", client.key)
    settings = {"base_urls": (client.url,), "api_key_variable": "SERVERS_KEY"}
    return ServedEngine(config.model_copy(update=settings))


@contextmanager
def in_the_middle(engine: ServedEngine, act: Callable[[], object], *, after: int = 70) -> Iterator[None]:
    """Call `act` while the block runs, after this number of lines of an answer."""
    before = engine.progress

    def wait() -> None:
        while engine.progress < before + after:
            time.sleep(0.001)
        act()

    actor = threading.Thread(target=wait, daemon=True)  # it never ends if the block fails early
    actor.start()
    yield
    actor.join()
