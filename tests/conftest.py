"""Whole runs that several tests look at."""

import hypothesis
import pytest

hypothesis.settings.register_profile("without a deadline", deadline=None)  # no test asserts a duration
hypothesis.settings.load_profile("without a deadline")
pytest.register_assert_rewrite("tests.support.engines")  # claims that several modules import
pytest_plugins = ["tests.support.cpu_seconds"]

from tests.support.jobs import Job, prefect_server  # noqa: E402


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory):
    """One Prefect API for all jobs that need not start their own."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as url:
        yield url


@pytest.fixture(scope="session")
def reference(tmp_path_factory, prefect_api):
    """The tiny job, never disturbed; nothing may change it."""
    job = Job(tmp_path_factory.mktemp("reference"), prefect_api, counts_works=True)
    ended = job.train()
    assert ended.code == 0, ended.output
    return job


RUNS = ("reference", "prefect_api")
"""Fixtures of the session that cost a whole run or a server: one process of a parallel session has them."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Spread modules over parallel processes whole, and all that share a run or a server into one, begun first."""
    for item in items:
        shared = any(name in item.fixturenames for name in RUNS)
        item.add_marker(pytest.mark.xdist_group("runs" if shared else item.path.stem))
    items.sort(key=lambda item: not any(name in item.fixturenames for name in RUNS))
