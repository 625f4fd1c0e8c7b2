"""Whole runs that several tests look at."""

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

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


class Spread(LoadScopeScheduling):
    """Modules go whole to parallel processes; all that look at the session's runs and server go to one of them."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.split("::")[0]
        return "runs" if module.startswith(RUNS) else module


RUNS = ("tests/runs/", "tests/integration/cli/", "tests/integration/prefect/")
"""Where tests share whole runs, which are made once."""


def pytest_xdist_make_scheduler(config, log):
    """Spread tests so that no fixture of a module or of the session is made twice."""
    return Spread(config, log)
