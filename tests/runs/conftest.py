"""Fixtures of tests that examine whole runs."""

from collections.abc import Callable

import pytest

from tests.support.in_process import InProcessJob, copy_job
from tests.support.whole_runs import read_families


@pytest.fixture(scope="session")
def undisturbed(together, prefect_api) -> Callable[[str], InProcessJob]:
    """Function that returns the undisturbed run of a family of runs.toml. Tests must not change the run."""
    return lambda name: read_families()[name].undisturbed(together, prefect_api)


@pytest.fixture
def copied(reference, tmp_path) -> InProcessJob:
    """Copy of the undisturbed tiny run, which a test may change."""
    return copy_job(reference, tmp_path)


@pytest.fixture
def whole(request, undisturbed) -> InProcessJob:
    """Undisturbed run of the family that the module names in `FAMILY`. Tests must not change the run."""
    return undisturbed(request.module.FAMILY)


@pytest.fixture
def job(whole, tmp_path) -> InProcessJob:
    """Copy of that run, which a test may change."""
    return copy_job(whole, tmp_path / "job")
