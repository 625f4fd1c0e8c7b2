"""Data and models at s3:// addresses, which are only read."""

import base64
import json
from pathlib import Path

import boto3
import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.store.inputs import fetch_path
from rheostat.infra.store.storage import open_store
from tests.support.s3_proxy import Fault, s3_proxy
from tests.support.s3_servers import ACCESS_KEY, SECRET_KEY

pytestmark = [pytest.mark.s3, pytest.mark.timeout(600)]

KEYS = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
PROCESS = json.dumps({"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY})


@pytest.fixture(autouse=True)
def _no_credentials(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def use(s3_servers, monkeypatch):
    """Function that sets the environment variables of a new place in the bucket, and returns its address."""

    def enter(*, endpoint: str = "") -> str:
        place = s3_servers.start("moto").place(endpoint=endpoint)
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        return place.uri

    return enter


def upload(server, address, files):
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    for name, data in files.items():
        client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=data)


@pytest.mark.parametrize(
    ("config", "credentials", "profile"),
    [
        ("", f"[default]\n{KEYS}", ""),
        ("[profile team]\nregion = us-east-1\n", f"[team]\n{KEYS}", "team"),
        (f"[profile team]\ncredential_process = echo '{PROCESS}'\n", "", "team"),
        ("[profile team]\nendpoint_url = ENDPOINT\n", f"[team]\n{KEYS}", "team"),
    ],
    ids=["default profile", "named profile", "program that prints keys", "endpoint in the profile"],
)
def test_an_input_is_read_with_a_profile_of_the_aws_tools(
    use, s3_servers, tmp_path, monkeypatch, config, credentials, profile
):
    server, address = s3_servers.start("moto"), use()
    upload(server, address, {"rows.jsonl": b"{}"})
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    if "ENDPOINT" in config:
        monkeypatch.delenv("AWS_ENDPOINT_URL")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(config.replace("ENDPOINT", server.endpoint))
    (tmp_path / ".aws" / "credentials").write_text(credentials)
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    assert fetch_path(Path(f"{address}/rows.jsonl")).read_bytes() == b"{}"


def test_an_input_has_the_time_that_runs_have_recorded_for_its_version(use, s3_servers):
    address = use()
    upload(s3_servers.start("moto"), address, {"rows.jsonl": b"{}"})
    status = fetch_path(Path(f"{address}/rows.jsonl")).stat()
    assert status.st_mtime_ns == open_store(address).local_path("rows.jsonl").stat().st_mtime_ns


def test_a_folder_in_a_bucket_has_the_files_of_the_bucket(use, s3_servers):
    server, address = s3_servers.start("moto"), use()
    upload(server, address, {"model/": b"", "model/config.json": b"{}", "model/a b/c.txt": b"c", "other": b""})
    folder = fetch_path(Path(f"{address}/model"))
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.json": b"{}", "a b/c.txt": b"c"}
    upload(server, address, {"model/config.json": b"[]"})
    assert (fetch_path(Path(f"{address}/model")) / "config.json").read_bytes() == b"[]"


@pytest.mark.parametrize(
    ("address", "has_keys", "parts"),
    [
        ("ADDRESS/rows.jsonl", True, ["does not exist", "neither a file nor a directory"]),
        ("s3://no-such-bucket/rows.jsonl", True, ["does not exist", "names of the bucket"]),
        ("ADDRESS/rows.jsonl", False, ["cannot be read", "credentials", "AWS_PROFILE or AWS_ACCESS_KEY_ID"]),
        ("s3://bucket", True, ["not the address of a file", "s3://bucket/name"]),
        ("s3://bucket/a/../../b", True, ["not the address of a file"]),
    ],
)
def test_an_input_that_cannot_be_read_is_refused_in_one_line(use, monkeypatch, address, has_keys, parts):
    base = use()
    if not has_keys:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(BadInput) as refused:
        fetch_path(Path(address.replace("ADDRESS", base)))
    message = str(refused.value)
    assert all(part in message for part in parts) and "\n" not in message, message


def test_an_input_whose_transfer_is_cut_is_fetched_again(use, s3_servers):
    server = s3_servers.start("moto")
    with s3_proxy(server.endpoint) as (endpoint, weather):
        address = use(endpoint=endpoint)
        upload(server, address, {"weights": b"weights" * 1000})
        weather.faults = [Fault("cut answer", "^GET", times=1)]
        assert fetch_path(Path(f"{address}/weights")).read_bytes() == b"weights" * 1000


def test_the_customer_key_of_the_store_is_sent_for_inputs(use, s3_servers, monkeypatch):
    server = s3_servers.start("moto")
    with s3_proxy(server.endpoint) as (endpoint, weather):
        address = use(endpoint=endpoint)
        upload(server, address, {"rows.jsonl": b"{}"})
        monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "sse-c")
        monkeypatch.setenv("AWS_SSE_CUSTOMER_KEY_BASE64", base64.b64encode(bytes(range(32))).decode())
        fetch_path(Path(f"{address}/rows.jsonl"))
        asked = list(zip(weather.seen, weather.headers, strict=True))
    assert {request.split()[0] for request, _ in asked} == {"HEAD", "GET"}
    assert all("x-amz-server-side-encryption-customer-key" in names for _, names in asked)
