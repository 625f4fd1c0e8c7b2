"""Stores in buckets under faults between client and server: lost, repeated, cut or late requests, and competing
writers."""

import base64
import os
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import boto3
import pyarrow as pa
import pytest
from blake3 import blake3

import rheostat.infra.store.bucket
import rheostat.infra.store.bucket_store
import rheostat.infra.store.bundles
from rheostat.flows.cli.app import main
from rheostat.infra.errors import BadInput, Damaged, Fenced, StoreFailed
from rheostat.infra.store.bundles import (
    delete_bundle,
    fetch_bundle,
    fetch_bundle_files,
    publish_bundle,
    verify_while_reading,
)
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.object_service import Timeouts
from rheostat.infra.store.run_record import RunRecord
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.verify import stray_files, verify_store
from tests.support.jobs import TINY
from tests.support.loopback import free_port
from tests.support.processes import CONTEXT, kill, preload, process
from tests.support.s3_proxy import Fault, s3_proxy
from tests.support.s3_servers import gateway

preload(__name__)

pytestmark = pytest.mark.s3

SHORT = Timeouts(answer_seconds=1, total_seconds=2)
LISTING = "list-type|comp=list"
"""Pattern of requests for a page of a listing, on S3 and on Azure."""


@pytest.fixture(params=["moto", "rgw", "azurite"])
def server(request, s3_servers):
    return s3_servers.start(request.param)


@pytest.fixture
def proxy(server):
    """Address and fault settings of a proxy in front of a server."""
    with s3_proxy(server.endpoint) as (endpoint, weather):
        yield endpoint, weather


@pytest.fixture
def place(proxy, server):
    """Store behind the proxy."""
    return server.place(endpoint=proxy[0])


@pytest.fixture
def weather(proxy):
    """Faults of the proxy, and the requests that it received."""
    return proxy[1]


@pytest.fixture
def store(place):
    """Open store behind the proxy, to which one object was written without a fault."""
    store = place.open()
    store.put("warm", b"")
    return store


def open_elsewhere(place, cache, **changes):
    """Open the store with another cache directory, as on another machine."""
    return replace(place, environment={**place.environment, "RHEOSTAT_CACHE": str(cache)}, **changes).open()


@pytest.mark.parametrize("fault", ["lost answer", "500 after", "duplicate"])
def test_a_put_that_succeeded_without_an_acknowledgement_counts_as_successful(store, weather, fault):
    weather.faults = [Fault(fault, "^PUT", times=2)]
    assert store.put("name", b"mine")
    assert not store.put("name", b"mine") and not store.put("name", b"another's")
    assert store.read("name") == b"mine"


PASSING = ["500", "503", "400 RequestTimeout", "403 RequestTimeTooSkewed"]
"""Server answers after which a client repeats its request."""


@pytest.mark.parametrize("fault", [*PASSING, "cut answer", "cut request", "lost answer", "slow"])
def test_transient_faults_are_retried_and_no_object_is_torn(place, weather, fault, tmp_path):
    store = replace(place, timeouts=replace(place.timeouts, answer_seconds=1)).open()
    data, source = os.urandom(2_000_000), tmp_path / "source"
    source.write_bytes(data)
    store.put("warm", b"")
    methods = ("PUT", "GET") if fault.startswith("403") else ("PUT", "GET", "HEAD")  # an answer to HEAD has no code
    weather.faults = [Fault(fault, f"^{method} .*{what}", times=1) for method in methods for what in "ab"]
    assert store.put("shards/a", data) and store.put("shards/b", source)
    assert store.read("shards/a") == data == store.local_path("shards/b").read_bytes()
    weather.faults = [Fault(fault, LISTING, times=1)]
    assert [(entry.key, entry.bytes) for entry in store.entries("shards/")] == [
        ("shards/a", len(data)),
        ("shards/b", len(data)),
    ]


def test_an_invalid_page_of_a_listing_is_requested_again(store, place, weather):
    for number in range(3):
        store.put(f"manifests/it-000{number}/seal.json", b"{}")
    for names in (lambda: store.entries("manifests/"), lambda: store.children("manifests")):
        weather.faults = [Fault("page", LISTING, times=1)]
        assert len(names()) == 3
    assert store.entries("nothing/") == [] and place.open().children("nothing") == []
    assert {entry.key.partition("/")[0] for entry in store.entries("")} == {"manifests", "warm"}


def test_a_listing_with_a_multiple_of_100_names_is_complete(place, weather):
    store, other = place.open(), place.open()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: store.put(f"a/{number:03}", b""), range(100)))
    store.put("z", b"")
    assert other.exists("z") and len(other.entries("a/")) == 100 and len(other.children("a")) == 100


def test_a_server_that_lists_nothing_is_an_error_whether_or_not_an_object_is_known(place, weather):
    store = replace(place, timeouts=SHORT).open()
    weather.faults = [Fault("page", LISTING)]
    for _ in ("nothing known", "warm"):
        with pytest.raises(StoreFailed, match=r"cannot list .*(not a ListBucketResult|invalid list response)"):
            store.entries("manifests/")
        store.put("warm", b"")


def test_a_server_that_stays_down_is_an_error_with_the_attempts_and_seconds(place, weather):
    store = replace(place, timeouts=SHORT).open()
    store.put("warm", b"")
    for kind in ("503", "slow"):
        weather.faults = [Fault(kind)]
        with pytest.raises(StoreFailed, match=rf"{store.uri}: cannot read 'warm' \(\d+ attempts in \d+\.\d s\): .*"):
            store.read("warm")
        with pytest.raises(StoreFailed, match=r"cannot write 'new' \(\d+ attempts in"):
            store.put("new", b"")


def test_a_refused_request_is_not_sent_again(store, weather):
    weather.seen.clear()
    weather.faults = [Fault("403")]
    for use in (store.read, store.exists, store.delete, lambda key: store.put(key, b"")):
        with pytest.raises(StoreFailed, match=r"1 attempt in .*403"):
            use("warm")
    assert len(weather.seen) == 4


@pytest.mark.parametrize(
    ("header", "reason"),
    [("if-none-match", "4 of 4 simultaneous writers"), ("if-match", "did not prevent a write")],
)
def test_a_server_without_conditional_puts_is_refused_before_anything_is_written(s3_servers, header, reason):
    with s3_proxy(s3_servers.start("moto").endpoint) as (endpoint, weather):  # Ceph's checks that all headers arrive
        weather.deaf_to = (header,)
        store = s3_servers.start("moto").place(endpoint=endpoint).open()
        with pytest.raises(BadInput, match=f"must support conditional writes .*, but .*{reason}"):
            store.put("run.json", b"{}")
        with pytest.raises(BadInput, match="conditional writes"), store.lock("lock"):
            pass
        assert store.entries("") == []


def test_an_unusable_store_is_refused_in_one_line_and_nothing_is_written(s3_servers, tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.toml").write_text(TINY)

    def refused(uri: str) -> str:
        assert main(["train", str(tmp_path / "tiny.toml"), "--store", uri]) == 2
        return capsys.readouterr().err

    server = s3_servers.start("moto")
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place(endpoint=endpoint)
        weather.deaf_to = ("if-none-match",)
        store = place.open()
        assert "the server must support conditional writes" in refused(place.uri)
        assert store.entries("") == []
        assert "the bucket does not exist" in refused("s3://no-such-bucket/runs")
    assert "must have the form s3://bucket/prefix" in refused("s3://")
    azure = s3_servers.start("azurite").place()
    azure.open()
    assert "the container does not exist" in refused("az://no-such-container/runs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://169.254.169.254")
    assert "Set AWS_ACCESS_KEY_ID" in refused("s3://no-such-bucket/runs")


def test_a_large_file_is_uploaded_in_parts_and_failed_parts_are_sent_again(place, weather, tmp_path, monkeypatch):
    store, source = place.open(), tmp_path / "weights"
    source.write_bytes(os.urandom(40 << 20))
    monkeypatch.setattr(rheostat.infra.store.bucket_store, "WHOLE_BYTES", 1 << 20)
    store.put("warm", b"")
    second, commit = "PUT .*(partNumber=2|comp=block(&|$))", "POST .*uploadId|PUT .*comp=blocklist"
    weather.faults = [Fault("503", second, times=1), Fault("lost answer", commit, times=1)]
    assert store.put("states/0/weights", source) and not store.put("states/0/weights", source)
    assert blake3().update_mmap(store.local_path("states/0/weights")).digest() == blake3(source.read_bytes()).digest()
    sent = Counter(part for request in weather.seen for part in re.findall("(?:partNumber|blockid)=([^&]+)", request))
    assert sorted(sent.values()) == [1, 1, 2], weather.seen


def test_each_part_of_a_large_upload_counts_as_progress(server, tmp_path, monkeypatch):
    source, parts = tmp_path / "weights", 8
    source.write_bytes(os.urandom(parts * (5 << 20)))
    monkeypatch.setattr(rheostat.infra.store.bucket_store, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(rheostat.infra.store.bucket, "_PART_BYTES", (5 << 20))
    with s3_proxy(server.endpoint) as (endpoint, weather):
        store, sent = server.place(endpoint=endpoint).open(), []

        def count() -> None:
            sent.append(sum(re.search("partNumber=|blockid=", request) is not None for request in weather.seen))

        store.put("states/0/weights", source, on_progress=count)
    assert len(sent) > parts
    assert sent == sorted(sent) and 0 < sent[parts - 1] < parts <= sent[-1], "no part is read far ahead"


def test_a_large_file_is_fetched_in_concurrent_parts_and_failed_parts_are_fetched_again(
    place, weather, tmp_path, monkeypatch
):
    source, size = tmp_path / "weights", 7 << 20
    source.write_bytes(os.urandom(size))
    monkeypatch.setattr(rheostat.infra.store.bucket, "RANGED_BYTES", 1 << 20)
    monkeypatch.setattr(rheostat.infra.store.bucket, "_PART_BYTES", 1 << 20)
    place.open().put("states/0/weights", source)
    together = threading.Barrier(7)
    weather.faults = [
        Fault("cut answer", "^GET", times=1),
        Fault("before", "^GET", times=7, does=lambda: together.wait(20)),
    ]
    weather.seen.clear()
    other = open_elsewhere(place, tmp_path / "elsewhere")
    assert other.local_path("states/0/weights").read_bytes() == source.read_bytes()
    assert [request.partition(" ")[0] for request in weather.seen] == ["GET"] * 8 and not together.broken


def test_an_empty_object_is_an_empty_file(server, tmp_path):
    place = server.place()
    place.open().put("states/0/nothing", b"")
    other = open_elsewhere(place, tmp_path / "elsewhere")
    assert other.local_path("states/0/nothing").read_bytes() == b""


def test_concurrent_commits_share_checks_of_the_epoch(place, weather):
    run, many, together = _run(place), 12, threading.Barrier(12)
    with run.lock(sole_writer=True):
        weather.seen.clear()
        weather.faults = [Fault("before", "^PUT .*manifests", times=many, does=lambda: together.wait(20))]
        with ThreadPoolExecutor(many) as threads:
            list(threads.map(lambda n: run.commit(Manifest(key=f"it-0001/rollout/{n:04d}")), range(many)))
        assert not together.broken
        looks = [request for request in weather.seen if request.startswith("HEAD") and "lease/000002" in request]
        assert 1 <= len(looks) < many
        assert len(_run(place).manifests("it-0001/")) == many


def test_no_concurrent_commit_succeeds_after_its_epoch_has_ended(place, weather):
    run = _run(place)
    with run.lock(sole_writer=True):
        relieved = threading.Event()

        def relieve() -> None:
            run.store.put("lease/000002.json", seal({}))
            relieved.set()

        weather.faults = [Fault("before", "^HEAD .*lease/000002", times=1, does=relieve)]
        with ThreadPoolExecutor(8) as threads:
            attempts = [threads.submit(run.commit, Manifest(key=f"it-0001/rollout/{n:04d}")) for n in range(8)]
        assert relieved.is_set()
        assert all(isinstance(attempt.exception(), Fenced) for attempt in attempts)
        assert run.store.entries("manifests/") == []


def test_another_machine_fetches_and_hashes_a_bundle_once(place, weather, tmp_path, monkeypatch):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "made" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "made" / name).write_bytes(name.encode() * 100)
    bundle = publish_bundle(place.open(), tmp_path / "made", prefix="policies")
    other = open_elsewhere(place, tmp_path, uri=place.uri + "/")
    monkeypatch.setattr(rheostat.infra.store.bundles, "_known", {})
    hashed, digest = [], rheostat.infra.store.bundles.digest_file
    monkeypatch.setattr(
        rheostat.infra.store.bundles, "digest_file", lambda path: hashed.append(path.name) or digest(path)
    )
    with verify_while_reading(other, bundle, large_suffix=".safetensors") as directory:
        assert (directory / "model.safetensors").read_bytes() == b"model.safetensors" * 100
    assert fetch_bundle(other, bundle) == directory
    assert sorted(hashed) == ["config.json", "model.safetensors"]
    assert sum("GET" in request and "safetensors" in request for request in weather.seen) == 1


def test_one_file_of_a_bundle_is_fetched_without_the_others(place, weather, tmp_path, monkeypatch):
    made = tmp_path / "made"
    made.mkdir()
    for rank in range(3):
        (made / f"rank-{rank}").write_bytes(bytes([rank]) * 1000)
    bundle = publish_bundle(place.open(), made, prefix="states")
    monkeypatch.setattr(rheostat.infra.store.bundles, "_known", {})
    other = open_elsewhere(place, tmp_path / "other")
    assert (fetch_bundle_files(other, bundle, ["rank-1"]) / "rank-1").read_bytes() == b"\1" * 1000
    fetched = {
        f"rank-{rank}" for rank in range(3) for r in weather.seen if r.startswith("GET") and f"/rank-{rank}" in r
    }
    assert fetched == {"rank-1"}
    with pytest.raises(BadInput, match=r"has no files \['rank-7'\]"):
        fetch_bundle_files(other, bundle, ["rank-7"])


def test_a_cached_file_is_fetched_again_only_after_its_object_changes(place, weather):
    store = place.open()
    store.put("name", b"first")
    path = store.local_path("name")
    weather.seen.clear()
    assert store.local_path("name") == path and [request.partition(" ")[0] for request in weather.seen] == ["HEAD"]
    other = open_elsewhere(place, path.parent / "elsewhere")
    other.delete("name")
    with pytest.raises(Damaged, match="'name' is missing"):
        store.local_path("name")
    other.put("name", b"second")
    assert store.local_path("name").read_bytes() == b"second"


@pytest.mark.parametrize("kind", ["moto", "rgw"])
def test_credentials_and_endpoint_are_read_from_the_configured_profile(kind, s3_servers, tmp_path, monkeypatch):
    place = s3_servers.start(kind).place()
    given = place.environment
    place.open()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    (tmp_path / "config").write_text(
        f"[profile team]\nregion = us-east-1\nendpoint_url = {given['AWS_ENDPOINT_URL']}\n"
    )
    bare = replace(place, environment={})
    with pytest.raises(BadInput, match=r"AWS_PROFILE is 'team', but .* no aws_access_key_id in .*credentials"):
        bare.open()
    (tmp_path / "credentials").write_text(
        f"[team]\naws_access_key_id = {given['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {given['AWS_SECRET_ACCESS_KEY']}\n"
    )
    assert bare.open().put("name", b"") and bare.open().exists("name")


KMS_KEY = "arn:aws:kms:us-east-1:123456789012:key/abcd"
ENCRYPTIONS = {"AES256": {}, "aws:kms": {"AWS_SSE_KMS_KEY_ID": KMS_KEY, "AWS_SSE_BUCKET_KEY_ENABLED": "true"}}
ENCRYPTED = "x-amz-server-side-encryption"
"""Beginning of the names of the encryption headers."""


@pytest.mark.parametrize("kind", ENCRYPTIONS)
def test_every_object_is_encrypted_as_configured_in_the_environment(s3_servers, tmp_path, monkeypatch, kind):
    """Write records, leases, and files in one request or in parts. All requests and stored objects are encrypted."""
    for name, value in {"AWS_SERVER_SIDE_ENCRYPTION": kind, **ENCRYPTIONS[kind]}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rheostat.infra.store.bucket_store, "WHOLE_BYTES", 1 << 20)
    server = s3_servers.start("moto")
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place(endpoint=endpoint)
        _put_all_kinds(place.open(), tmp_path)
        asked = list(zip(weather.seen, weather.headers, strict=True))
    makes = [names for request, names in asked if re.match("(PUT [^?]*$|POST .*uploads)", request)]
    extra = {f"{ENCRYPTED}-aws-kms-key-id", f"{ENCRYPTED}-bucket-key-enabled"} if kind == "aws:kms" else set()
    assert len(makes) > 4 and all({ENCRYPTED, *extra} <= names for names in makes)
    bucket, _, prefix = place.uri.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
    keys = [each["Key"] for each in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]]
    said = [client.head_object(Bucket=bucket, Key=key) for key in keys]
    assert [each["ServerSideEncryption"] for each in said] == [kind] * 4
    assert {each.get("SSEKMSKeyId", "") for each in said} == {KMS_KEY if extra else ""}


def _put_all_kinds(store, directory):
    for size in (1 << 10, 20 << 20):
        (directory / f"{size}").write_bytes(os.urandom(size))
        assert store.put(f"policies/{size}", directory / f"{size}")
    assert store.put("name", b"")
    with store.lock("lock") as lease:
        lease.renew(seconds=4)


def test_a_customer_key_is_sent_with_every_object_that_is_written_or_read(s3_servers, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "sse-c")
    monkeypatch.setenv("AWS_SSE_CUSTOMER_KEY_BASE64", base64.b64encode(bytes(range(32))).decode())
    monkeypatch.setattr(rheostat.infra.store.bucket_store, "WHOLE_BYTES", 1 << 20)
    server = s3_servers.start("moto")
    with s3_proxy(server.endpoint) as (endpoint, weather):
        store = server.place(endpoint=endpoint).open()
        _put_all_kinds(store, tmp_path)
        assert store.read("name") == b""
        store.delete("policies/1024")
        asked = list(zip(weather.seen, weather.headers, strict=True))
    without = [request for request, names in asked if f"{ENCRYPTED}-customer-key" not in names]
    assert {re.sub("=.*", "", request).partition("?")[2] for request in without} == {"delete", "uploadId"}, without
    assert not [request for request in without if not request.startswith("POST")]


def test_a_run_in_a_bucket_is_written_read_and_verified(server, tmp_path):
    place = server.place()
    run, table = _run(place), pa.table({"tokens": [[1, 2], [3]]})
    (tmp_path / "deep").mkdir()
    for name in ("config.json", "deep/weights"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    run.store.put("run.json", seal(run.record.model_dump(mode="json")))
    with run.lock():
        shard = write_shard(run.store, table, kind="test", metadata={})
        bundle = publish_bundle(run.store, tmp_path, prefix="policies")
        assert (fetch_bundle(run.store, bundle) / "deep/weights").read_bytes() == b"deep/weights" * 1000
        assert publish_bundle(run.store, tmp_path, prefix="policies") == bundle
        made = run.commit(Manifest(key="it-0001/rollout", shards=(shard,), bundles={"weights": bundle}))
        run.write_entry("it-0001/timing", {"seconds": 1})
    reader = _run(place)
    assert reader.require("it-0001/rollout") == made and reader.journal() == {"it-0001/timing": {"seconds": 1}}
    assert read_shard(reader.store, shard).equals(table)
    fetched = fetch_bundle(reader.store, bundle)
    assert (fetched / "deep/weights").read_bytes() == (tmp_path / "deep/weights").read_bytes()
    assert verify_store(reader) == [] and stray_files(reader) == []
    delete_bundle(reader.store, bundle)
    (problem,) = verify_store(reader)
    assert bundle.key in problem
    with pytest.raises(Damaged, match="never completely published"):
        fetch_bundle(reader.store, bundle)


def _write_all(place, number, names, start, results):
    store = place.open()
    start.wait()
    results.put((number, [store.put(f"race/{name}", f"{number}".encode() * 50_000) for name in range(names)]))


@pytest.mark.parametrize("seed", [1])
def test_with_many_faults_exactly_one_writer_of_each_name_reports_success(place, weather, seed):
    place.open().put("warm", b"")
    weather.seed, weather.share = seed, 0.3
    names, racers = 12, 4
    start, results = CONTEXT.Barrier(racers), CONTEXT.Queue()
    children = [CONTEXT.Process(target=_write_all, args=(place, each, names, start, results)) for each in range(racers)]
    try:
        for child in children:
            child.start()
        outcomes = dict(results.get(timeout=200) for _ in children)
    finally:
        for child in children:
            kill(child)
    weather.share = 0
    store = place.open()
    for name in range(names):
        (winner,) = [number for number, wins in outcomes.items() if wins[name]]
        assert store.read(f"race/{name}") == f"{winner}".encode() * 50_000
    assert len(store.entries("race/")) == names


def test_a_restarted_gateway_has_every_acknowledged_object(s3_servers):
    server, port = s3_servers.start("rgw"), free_port()
    place, stop, written = server.place(endpoint=f"http://127.0.0.1:{port}"), threading.Event(), []
    store = place.open()

    def write() -> None:
        while not stop.is_set():
            name = f"shards/{len(written)}"
            assert store.put(name, name.encode() * 100_000)
            written.append(name)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        for is_last in (False, False, True):
            with gateway(server.home, port):
                seen = len(written)
                while len(written) < seen + 5 and not writing.done():
                    time.sleep(0.05)
                if is_last:
                    stop.set()
                    writing.result()
    store = replace(place, environment={**place.environment, "AWS_ENDPOINT_URL": server.endpoint}).open()
    assert {entry.key for entry in store.entries("shards/")} == set(written)
    assert all(store.read(name) == name.encode() * 100_000 for name in written)


def _run(place):
    record = RunRecord(name="first", fingerprint="0" * 16, config={}, created="", versions={})
    return Run(place.open(), record)


def _drive(place, line):
    with _run(place).lock() as run:
        line.send(run.epoch)
        number = 0
        try:
            while True:
                run.commit(Manifest(key=f"epoch-{run.epoch}/{number:06d}"))
                number += 1
                time.sleep(0.02)
        except Fenced as error:
            line.send(str(error))
    line.send("over")


def test_a_stopped_driver_loses_its_lease_and_commits_nothing_when_it_continues(server):
    place = server.place()
    near, far_end = CONTEXT.Pipe()
    with process(_drive, place, far_end) as first:
        assert near.recv() == 1
        os.kill(first.pid, signal.SIGSTOP)
        with _run(place).lock() as run:
            assert run.epoch == 2
            before = {manifest.key for manifest in run.manifests("epoch-1/")}
            os.kill(first.pid, signal.SIGCONT)
            why = near.recv()  # where it stopped between its look at the lease and its write, the epoch stops it
            assert "has lost its lock" in why or "another process has locked the run" in why
            assert near.recv() == "over"
            assert {manifest.key for manifest in run.manifests("epoch-1/")} == before
            run.commit(Manifest(key="epoch-2/last"))


def test_a_clock_that_is_wrong_by_an_hour_changes_nothing(place, weather, server):
    weather.clock = timedelta(hours=1 if server.home.name == "rgw" else -1)
    near, far_end = CONTEXT.Pipe()
    with process(_drive, place, far_end) as first:
        assert near.recv() == 1
        time.sleep(2 * place.lease_seconds)
        with _run(place).store.lock("lock") as held:
            assert held is None
        kill(first)
        with _run(place).lock() as run:
            assert run.epoch == 2


def test_a_driver_that_cannot_renew_its_lease_stops_and_detects_a_new_holder(server):
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place()
        behind = replace(server.place(endpoint=endpoint), uri=place.uri, timeouts=SHORT)
        with behind.open().lock("lock") as lease:
            weather.faults = [Fault("503", "PUT .*lock")]
            lease.check()
            with place.open().lock("lock") as taken:
                assert taken is not None
                with pytest.raises(StoreFailed, match="cannot write 'lock'"):
                    lease.check()
                weather.faults = []
                with pytest.raises(Fenced, match="another process has taken it"):
                    lease.check()
                taken.check()


def test_a_lease_is_kept_if_the_server_was_down_longer_than_its_term_and_nobody_took_it(server):
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place()
        behind = replace(server.place(endpoint=endpoint), uri=place.uri, timeouts=SHORT)
        with behind.open().lock("lock") as lease:
            weather.faults = [Fault("lost answer", "PUT .*lock", times=1), Fault("503", "lock")]
            time.sleep(place.lease_seconds + 1)
            with pytest.raises(StoreFailed):
                lease.check()
            weather.faults = []
            lease.check()
            with place.open().lock("lock") as other:
                assert other is None


def test_a_lease_is_kept_despite_lost_answers(place, weather):
    store = place.open()
    with store.lock("lock") as lease:
        weather.faults = [Fault("lost answer", "PUT .*lock", times=3), Fault("500 after", "PUT .*lock", times=2)]
        time.sleep(2 * place.lease_seconds)
        lease.check()
        assert not any(fault.times for fault in weather.faults)
