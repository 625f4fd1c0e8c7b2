"""Stores that several modules of this folder use."""

import pytest

from rheostat.infra.store.storage import open_store


@pytest.fixture
def store(tmp_path):
    """Store of a run on disk."""
    return open_store(str(tmp_path / "run"))
