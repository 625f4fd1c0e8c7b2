"""Run store in a container of Azure Blob Storage, or of any server with the same API."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from obstore.exceptions import BaseError
from obstore.store import AzureStore

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bucket import Bucket
from rheostat.infra.store.bucket_store import connect_bucket, open_bucket_store
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.object_service import Service, Timeouts

if TYPE_CHECKING:  # obstore defines these types for type checkers only
    from obstore.store import AzureConfig, ClientConfig, RetryConfig

AZURE: Final = Service(
    page="docs/azure.md",
    bucket="container",
    page_names=5000,
    missing_bucket="ContainerNotFound",
    credentials="Set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or the client id, secret and tenant of a "
    "service principal.",
)


def open_azure(uri: str, *, timeouts: Timeouts | None = None, lease_seconds: float | None = None) -> Store:
    """Open the store at an address `az://container/prefix`. No request is sent until the store is used. The environment
    variables RHEOSTAT_AZURE_SECONDS and RHEOSTAT_LEASE_SECONDS are the default time limits of requests and leases.

    Raises BadInput if the address is not valid, or if no storage account is set.
    """
    return open_bucket_store(
        uri, _connect, seconds_variable="RHEOSTAT_AZURE_SECONDS", timeouts=timeouts, lease_seconds=lease_seconds
    )


def _connect(uri: str, container: str, prefix: str, timeouts: Timeouts) -> Bucket:
    """Open a container. The account, its endpoint and the credentials are read from environment variables."""
    config = _read_connection_string(os.environ)
    if not config.get("account_name") and not os.environ.get("AZURE_STORAGE_ACCOUNT_NAME"):
        raise BadInput(
            f"store {uri!r}: the storage account is not set. Set AZURE_STORAGE_ACCOUNT_NAME and its key, or "
            "AZURE_STORAGE_CONNECTION_STRING."
        )
    named = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT") or ""
    endpoint = config.get("endpoint", named)

    def client(options: "ClientConfig", retries: "RetryConfig") -> AzureStore:
        return AzureStore(container, prefix=prefix or None, config=config, client_options=options, retry_config=retries)

    try:
        return connect_bucket(uri, AZURE, client, endpoint=endpoint, timeouts=timeouts)
    except BaseError as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"store {uri!r}: the settings in the environment are not valid: {reason}") from None


def _read_connection_string(environment: Mapping[str, str]) -> "AzureConfig":
    """Return the settings in AZURE_STORAGE_CONNECTION_STRING. If AZURE_STORAGE_ACCOUNT_NAME is set, the connection
    string is not read."""
    if environment.get("AZURE_STORAGE_ACCOUNT_NAME"):
        return {}
    parts = environment.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    values = dict(part.split("=", 1) for part in parts if "=" in part)
    config: AzureConfig = {}
    if "AccountName" in values:
        config["account_name"] = values["AccountName"]
    if "AccountKey" in values:
        config["account_key"] = values["AccountKey"]
    if "SharedAccessSignature" in values:
        config["sas_key"] = values["SharedAccessSignature"]
    if "BlobEndpoint" in values:
        config["endpoint"] = values["BlobEndpoint"]
    return config
