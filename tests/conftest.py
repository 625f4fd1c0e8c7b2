"""Whole runs that several tests look at."""

import pytest

pytest.register_assert_rewrite("tests.support.engines")  # claims that several modules import

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
