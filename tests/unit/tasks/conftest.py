"""Runs and registries that several modules of this folder use."""

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.store.registry import open_registry
from rheostat.infra.store.runs import create_run


@pytest.fixture
def run(tmp_path):
    """New run `r`, locked by this process."""
    new_run = create_run(str(tmp_path), "r", {"seed": 1})
    with new_run.lock():
        yield new_run


@pytest.fixture
def home(tmp_path):
    """Store of the registry."""
    return str(tmp_path / "store")


@pytest.fixture
def registry(home):
    """Empty registry `assistant`."""
    return open_registry(home, "assistant")


@pytest.fixture
def registry_command(home, capsys):
    """Function that runs a `rheostat` command on the store of the registry and returns exit code, stdout and stderr."""

    def run_command(*words):
        code = main([*words, "--store", home])
        return (code, *capsys.readouterr())

    return run_command
