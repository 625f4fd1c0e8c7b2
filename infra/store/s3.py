"""Run store in a bucket of S3, or of any server with the same API that supports conditional writes."""

import os
from collections.abc import Mapping
from configparser import ConfigParser
from pathlib import Path
from typing import TYPE_CHECKING, Final

from obstore.store import S3Store

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bucket import Bucket
from rheostat.infra.store.bucket_store import connect_bucket, open_bucket_store
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.object_service import Service, Timeouts

if TYPE_CHECKING:  # obstore defines these types for type checkers only
    from obstore.store import ClientConfig, RetryConfig, S3Config

S3: Final = Service(
    page="docs/s3.md",
    bucket="bucket",
    page_names=1000,
    missing_bucket="NoSuchBucket",
    credentials="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or set AWS_PROFILE to a profile that contains them.",
)


def open_s3(uri: str, *, timeouts: Timeouts | None = None, lease_seconds: float | None = None) -> Store:
    """Open the store at an address `s3://bucket/prefix`. No request is sent until the store is used. The environment
    variables RHEOSTAT_S3_SECONDS and RHEOSTAT_LEASE_SECONDS are the default time limits of requests and leases.

    Raises BadInput if the address is not valid.
    """
    return open_bucket_store(
        uri, _connect, seconds_variable="RHEOSTAT_S3_SECONDS", timeouts=timeouts, lease_seconds=lease_seconds
    )


def _connect(uri: str, bucket: str, prefix: str, timeouts: Timeouts) -> Bucket:
    """Open a bucket. Its endpoint, region and credentials are read from environment variables, or from the AWS profile
    that AWS_PROFILE names."""
    config = _profile(os.environ)
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        config["endpoint"] = endpoint

    def client(options: "ClientConfig", retries: "RetryConfig") -> S3Store:
        return S3Store(bucket, prefix=prefix or None, config=config, client_options=options, retry_config=retries)

    return connect_bucket(uri, S3, client, endpoint=config.get("endpoint", ""), timeouts=timeouts)


def _profile(environment: Mapping[str, str]) -> "S3Config":
    """Read the AWS profile that AWS_PROFILE names from the AWS configuration files. Settings in the environment take
    precedence.

    Raises BadInput if the profile contains no access key.
    """
    name = environment.get("AWS_PROFILE")
    if not name or "AWS_ACCESS_KEY_ID" in environment:
        return {}
    home = Path.home() / ".aws"
    config_path = environment.get("AWS_CONFIG_FILE", str(home / "config"))
    credentials_path = environment.get("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))
    files = ConfigParser(interpolation=None)
    files.read([config_path, credentials_path])
    settings = {key: value for part in (f"profile {name}", name) if part in files for key, value in files[part].items()}
    if "aws_access_key_id" not in settings:
        files_read = f"{credentials_path} or {config_path}"
        raise BadInput(
            f"AWS_PROFILE is {name!r}, but this profile has no aws_access_key_id in {files_read}. Add the key to the "
            "profile, or set another profile."
        )
    config: S3Config = {
        "access_key_id": settings["aws_access_key_id"],
        "secret_access_key": settings.get("aws_secret_access_key", ""),
    }
    if "aws_session_token" in settings:
        config["session_token"] = settings["aws_session_token"]
    if "region" in settings:
        config["region"] = settings["region"]
    if "endpoint_url" in settings:
        config["endpoint"] = settings["endpoint_url"]
    return config
