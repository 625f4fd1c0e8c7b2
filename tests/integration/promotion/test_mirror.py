"""MLflow's registry as a mirror of ours, in a SQLite file: a sync copies all versions and the champion."""

import re
import socket
from pathlib import Path

import pytest

from rheostat.infra.store.registry import open_registry
from tests.support.champions import append_record
from tests.support.in_process import run_command

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

REASON = ("--reason", "because")


@pytest.fixture
def registry(tmp_path):
    return open_registry(str(tmp_path / "store"), "assistant")


@pytest.fixture
def give(registry):
    """Function that runs a command about the registry."""
    store = registry.store.uri.rpartition("/registry/")[0]
    return lambda *words: run_command(*words, "--store", store)


@pytest.fixture
def address(tmp_path):
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def read_mirror(address):
    """Return what MLflow's client reads: the champion's record, run and files, and the run of each version."""
    from mlflow import MlflowClient, artifacts

    client = MlflowClient(tracking_uri=address, registry_uri=address)
    champion = client.get_model_version_by_alias("assistant", "champion")
    files = artifacts.download_artifacts("models:/assistant@champion/model", tracking_uri=address)
    versions = client.search_model_versions("name='assistant'", order_by=["version_number ASC"])
    told = client.get_registered_model("assistant").tags["rheostat.record"]
    runs = [each.tags["rheostat.run"] for each in versions]
    return told, champion.tags["rheostat.run"], Path(files).read_text(), runs


def test_promotions_and_rollbacks_move_the_alias_and_register_each_version_once(
    registry, tmp_path, give, address, monkeypatch
):
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", address)
    append_record(registry, tmp_path, "a")
    append_record(registry, tmp_path, "b", kind="proposal")
    assert give("promote", "assistant", "run-b", *REASON).code == 0
    assert read_mirror(address) == ("3", "run-b", "b", ["run-a", "run-b"])
    for _ in range(2):
        assert give("rollback", "assistant", *REASON).code == 0
    assert read_mirror(address) == ("4", "run-a", "a", ["run-a", "run-b"])


def test_a_rollback_succeeds_while_the_mirror_is_down_and_the_mirror_catches_up(
    registry, tmp_path, give, address, monkeypatch
):
    for policy in "ab":
        append_record(registry, tmp_path, policy)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
    ended = give("rollback", "assistant", *REASON)
    assert ended.code == 0 and registry.champion().number == 3
    assert re.search(
        r"^warning: registry assistant is not synced to MLflow yet: MLflow's registry .*$", ended.output, re.MULTILINE
    )
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", address)  # of a registry that answers
    ended = give("mirror", "assistant")
    assert ended.code == 0 and "MLflow's registry: version 1 is champion (record 3)\n" in ended.output
    assert read_mirror(address) == ("3", "run-a", "a", ["run-a", "run-b"])


def test_a_mirror_without_an_address_or_a_registry_is_refused_in_one_line(registry, tmp_path, give):
    assert "there is no registry 'assistant'" in give("mirror", "assistant", "--to", "sqlite:///mlflow.db").output
    append_record(registry, tmp_path, "a")
    ended = give("mirror", "assistant")
    assert (ended.code, ended.output.count("\n")) == (2, 1)
    assert "--to URI or MLFLOW_REGISTRY_URI" in ended.output and "is missing" in ended.output
