"""Fixtures that several test modules share, and the distribution of tests over parallel processes."""

import fcntl
import functools
import gc
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

hypothesis.settings.register_profile("without a deadline", deadline=None)  # no test asserts a duration
hypothesis.settings.load_profile("without a deadline")
# Sums depend on it, workers have one, and a second thread spins while it waits for a processor that others hold.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing answers there: no test reaches the internet
pytest.register_assert_rewrite("tests.support.engines")  # claims that several modules import
pytest_plugins = ["tests.support.cpu_seconds"]

from rheostat.infra.environments.gpus import read_driver_version  # noqa: E402
from rheostat.infra.former_names import PACKAGE  # noqa: E402
from tests.support.jobs import prefect_server  # noqa: E402
from tests.support.processes import preload_no_training  # noqa: E402


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore the environment variables that a test sets, such as those of a command run in this process."""
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def same_loggers() -> Iterator[None]:
    """Restore the logger of Rheostat, to which a command run in this process attaches its own handlers."""
    logger = logging.getLogger(PACKAGE)
    propagates, level, handlers = logger.propagate, logger.level, [*logger.handlers]
    yield
    logger.propagate, logger.handlers = propagates, handlers
    logger.setLevel(level)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Local server that speaks the Hub's API, used by this process with an empty cache and without a token."""
    from tests.support.hub_server import serve_hub

    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with serve_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture(scope="session")
def together(tmp_path_factory) -> Path:
    """Directory that all test processes of this session share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if own.name.startswith("popen-") else own


@pytest.fixture(scope="session")
def prefect_api(together, pytestconfig):
    """Prefect API for all jobs that do not need a server of their own. It serves until no test process uses it."""
    told, server = together / "prefect-url", ExitStack()
    using = (together / "prefect-users").open("a")
    with locked(together / "prefect-lock"):
        fcntl.flock(using, fcntl.LOCK_SH)  # waits where the server is being ended
        if not told.exists():
            home = together / "prefect"
            home.mkdir(exist_ok=True)
            keeps_tasks = "not slow" not in pytestconfig.getoption("markexpr")  # slow tests ask for task runs
            told.write_text(server.enter_context(prefect_server(home, keeps_tasks=keeps_tasks)))
            server.callback(told.unlink, missing_ok=True)  # other sessions of pytest delete old directories
            server.callback(fcntl.flock, using, fcntl.LOCK_EX)  # done first: waits for all users
    pytestconfig.add_cleanup(using.close)
    pytestconfig.add_cleanup(server.close)  # not a fixture's end, which would count as the last test's time
    return told.read_text()


@pytest.fixture(scope="session")
def reference(together, prefect_api):
    """Finished run of the tiny job without any faults. Tests must not change it."""
    from tests.support.in_process import InProcessJob

    job, made = InProcessJob(together / "reference", prefect_api, counts_works=True), together / "reference-made"
    with locked(together / "reference-lock"):
        if not made.exists():
            job.train()
            made.touch()
    return job


@pytest.fixture(scope="session")
def s3_servers(together, pytestconfig):
    """S3 servers by kind. A server starts on its first request and serves until no test process uses it."""
    from tests.support.s3_servers import S3Servers

    stack = ExitStack()
    pytestconfig.add_cleanup(stack.close)
    return S3Servers(together / "s3", stack)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file, so that only one test process runs the block at a time."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


FORKING = {"kills": ("chaos",), "forks": ("processes", "update_workers")}
"""Support modules whose importers fork processes, in two scopes of about the same length."""
WHOLE_RUNS = "tests/runs/test_whole_runs.py"
"""Module whose tests are cases of a table. The cases of one family share an undisturbed run."""


def scope_of(nodeid: str) -> str:
    """Return the scope of a test. All tests of a scope run in one process, so that their fixtures are made once.

    A scope is a module, a family of whole runs, or several modules that fork processes: the process that they fork from
    takes 9 CPU seconds to start, once.
    """
    module, _, name = nodeid.partition("::")
    if module == WHOLE_RUNS:
        return name.partition("[")[2].partition(":")[0]
    return _scope_of_module(module)


@functools.cache
def _scope_of_module(module: str) -> str:
    text = Path(__file__).parents[1].joinpath(module).read_text()
    return next((scope for scope, names in FORKING.items() if any(f"tests.support.{n}" in text for n in names)), module)


class Spread(LoadScopeScheduling):
    """Scheduler that gives whole scopes to parallel processes."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config, log):
    """Spread tests by scopes, in the order of `pytest_collection_modifyitems`."""
    return Spread(config, log)


LONGEST = (
    "kills",
    "forks",
    "tests/integration/promotion/test_nightly.py",
    "tests/runs/test_resume.py",
    "tests/integration/pools/test_pools.py",
    "tests/integration/pools/test_fleet.py",
    "tests/runs/test_judged_run.py",
    "tests/runs/test_extending.py",
    "tests/integration/cli/test_cli.py",
    "tests/runs/test_rescoring.py",
)
"""Scopes that take longest. They start first, after the families of whole runs, so that short ones end the session."""


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """Skip modules without a test that the marks select. Importing all modules takes 30 CPU seconds per process."""
    marks = config.getoption("markexpr")
    if not re.fullmatch(r"(not )?\w+( and (not )?\w+)*", marks) or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    for excluded, mark in re.findall(r"(not )?(\w+)(?: and )?", marks):
        if excluded and re.search(rf"^pytestmark = .*mark\.{mark}\b", text, re.MULTILINE):
            return True
        if not excluded and f"mark.{mark}" not in text:
            return True
    return None


def pytest_configure(config) -> None:
    """Hide GPUs from all processes of the tests, and let none compile models, except in tests of vLLM and on GPUs.

    Most tests compare bits, which repeated computations on a GPU do not keep. If torch may compile, importing peft also
    imports torch's compiler because bitsandbytes compiles functions when it is imported. This takes 2 CPU seconds in
    each process.
    """
    if not re.match("vllm|gpu", config.getoption("markexpr")):
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        if read_driver_version() is not None:  # where it is set, Ray cannot be told of GPUs that do not exist
            os.environ["CUDA_VISIBLE_DEVICES"] = ""


DEFAULT_THRESHOLDS = gc.get_threshold()
gc.set_threshold(50_000, 20, 50)  # collection makes millions of objects that stay


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported and collected objects from later garbage collections, each of which took 0.4 s.

    Only system tests train in processes of their own, so the other tests need no fork server with training libraries.
    """
    if not any(item.get_closest_marker("system") for item in session.items):
        preload_no_training()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*DEFAULT_THRESHOLDS)


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(config, items: list[pytest.Item]) -> None:
    """Mark the further cases of tests that have the mark `thorough_after`. Sort the tests of parallel processes so that
    the longest scopes begin first and the shortest end the session."""
    cases = Counter[str]()
    for item in items:
        if (mark := item.get_closest_marker("thorough_after")) is not None:
            function, _, _ = item.nodeid.partition("[")
            cases[function] += 1
            if cases[function] > mark.args[0]:
                item.add_marker("thorough")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank_of(item.nodeid))


def _rank_of(nodeid: str) -> tuple[bool, int, bool]:
    scope = scope_of(nodeid)
    place = LONGEST.index(scope) if scope in LONGEST else len(LONGEST)
    return (not nodeid.startswith(WHOLE_RUNS), place, not nodeid.startswith("tests/runs/"))
