"""Settings of stores in Azure, read from environment variables. No request is sent."""

import os

import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.store.storage import open_store

KEY = "a2V5"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)


def test_a_connection_string_names_the_account_its_key_and_its_address(monkeypatch):
    text = f"DefaultEndpointsProtocol=http;AccountName=team;AccountKey={KEY};BlobEndpoint=http://127.0.0.1:9/team"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    bucket = open_store("az://container/a/runs/").bucket
    assert (bucket.uri, bucket.endpoint) == ("az://container/a/runs", "http://127.0.0.1:9/team")
    assert bucket.client.config["account_name"] == "team" and bucket.client.prefix == "a/runs"


def test_a_named_account_takes_precedence_over_the_connection_string(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=other;AccountKey={KEY}")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "team")
    bucket = open_store("az://container").bucket
    assert bucket.endpoint == "" and "account_name" not in bucket.client.config


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("AZURE_STORAGE_CONNECTION_STRING", "unreadable", "AZURE_STORAGE_ACCOUNT_NAME"),
        ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=team;AccountKey=?", "not valid: .*Invalid Access Key"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(monkeypatch, name, value, reason):
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=reason) as refused:
        open_store("az://container/runs")
    assert "\n" not in str(refused.value)
