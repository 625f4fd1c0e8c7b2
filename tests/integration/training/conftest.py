"""Fixtures of workers of a test: the run's address and the initial policy."""

import gc
from pathlib import Path

import pytest

from rheostat.models.records.versions import ModelVersion
from tests.support.training import publish_scratch


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def policy(uri: str) -> ModelVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "scratch"))


@pytest.fixture(autouse=True)
def little_to_collect() -> None:
    """Freeze imported objects, because trainers collect garbage when they end and would scan all of them each time."""
    gc.freeze()
