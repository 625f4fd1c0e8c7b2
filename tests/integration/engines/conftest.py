"""Policies, servers, work and episodes of the tests of engines and rollout workers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.drawn import DrawnVllm
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.storage import open_store
from rheostat.models.config.engines import VllmEngine
from rheostat.models.engines.protocol import build_engine
from rheostat.models.engines.vllm.engine import ServedEngine
from rheostat.models.records.work import RolloutWork
from tests.support.batch_server import KEY, BatchServer, batch_server
from tests.support.engines import Published, publish
from tests.support.episodes import Episodes
from tests.support.rollout_workers import example


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def store(home: Path) -> Store:
    return open_store(f"{home}/run")


@pytest.fixture(scope="module")
def work(store: Store, home: Path) -> RolloutWork:
    return example(store, home / "made")


@pytest.fixture(scope="module")
def episodes(home: Path) -> Episodes:
    return Episodes(home)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(tmp_path_factory.mktemp("policy"))


Serve = Callable[..., tuple[ServedEngine, list[BatchServer]]]


@pytest.fixture
def serve(policy: Published, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Function that starts servers and returns an engine with the policy loaded, and the servers."""
    monkeypatch.setenv("SERVERS_KEY", KEY)
    with ExitStack() as stack:

        def start(
            count: int = 1, *, settings: dict[str, object] | None = None, **server: object
        ) -> tuple[ServedEngine, list[BatchServer]]:
            servers = [
                stack.enter_context(batch_server(BatchServer(lambda directory: policy.version.digest, **server)))
                for _ in range(count)
            ]
            urls = tuple(server.url for server in servers)
            values = {"base_urls": urls, "api_key_variable": "SERVERS_KEY"} | (settings or {})
            settings_class = DrawnVllm if "lengths" in values else VllmEngine
            engine = build_engine(settings_class.model_validate(values))
            engine.load(policy.directory, policy.version)
            return engine, servers

        yield start
