"""Where the workers of a test have their run, and the policy that they begin with."""

import gc
from pathlib import Path

import pytest

from models.records.versions import ModelVersion
from tests.support.training import publish_scratch


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def policy(uri: str) -> ModelVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "scratch"))


@pytest.fixture(autouse=True)
def little_to_collect() -> None:
    """Trainers collect garbage where they end: what was imported by then need not be looked through each time."""
    gc.freeze()
