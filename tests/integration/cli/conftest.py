"""Fixtures for commands: jobs in a temporary directory, and commands on the finished run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rheostat.flows.cli.app import main
from tests.support.refusals import build_folder


@pytest.fixture
def make_job(tmp_path, monkeypatch) -> Callable[[str], Path]:
    """Function that writes a folder of tests/unit/refusals/models.toml to the current directory and returns it."""

    def make(folder: str) -> Path:
        monkeypatch.chdir(tmp_path)
        build_folder("models", folder, tmp_path)
        return tmp_path

    return make


@pytest.fixture
def run_command(capsys, reference):
    """Function that runs a command on the finished run and returns exit code, stdout and stderr."""

    def run(*arguments: str, store: Path = reference.store) -> tuple[int, str, str]:
        code = main([*arguments, "--store", str(store)])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def copied_store(reference, tmp_path) -> Path:
    """Store with a copy of the finished run, which a test may damage."""
    shutil.copytree(reference.run, tmp_path / "store" / "tiny")
    return tmp_path / "store"
