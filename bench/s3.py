"""Speed of the store on S3, compared with boto3 and s3fs: put a shard of 64 MB, commit a manifest, get the shard.

Weights are put and fetched, compared with boto3's TransferManager. The requests of an iteration with many shards are
counted in a whole run, in which every answer is delayed, and priced.
"""

import os
import resource
import secrets
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import boto3
import pyarrow as pa
import s3fs
from botocore.client import BaseClient
from botocore.config import Config

from bench.tables import Table
from rheostat.infra.errors import BadInput
from tests.support.in_process import InProcessJob
from tests.support.jobs import prefect_server
from tests.support.s3_proxy import s3_proxy
from tests.support.s3_servers import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, missing_ceph, moto, rgw

ROUNDS = 9
SHARD, MANIFEST = 64_000_000, 2_000

SHARDS = 256
"""Number of shards in the iteration whose S3 requests are counted."""
PRICES = {"PUT": 5.0, "POST": 5.0, "LIST": 5.0, "GET": 0.4, "HEAD": 0.4, "DELETE": 0.0}
"""Price of one million requests in US dollars by kind of request, for S3 Standard in us-east-1.

Source: aws.amazon.com/s3/pricing.
"""

ANSWER_SECONDS = 0.02
"""Seconds by which the S3 server's responses are delayed while requests are counted."""
WEIGHTS, WEIGHTS_ROUNDS = 2_000_000_000, 2
"""Size of the weights file in bytes, and number of measured rounds.

There are few rounds, because Ceph keeps deleted data in memory.
"""

Do = Callable[[str, bytes, bytes], None]


def measure() -> list[Table]:
    """Measure the speed of Rheostat's S3 store, of boto3 and of s3fs, against two S3 servers on this machine.

    Returns a table of the requests and their price per iteration, a table per server of the seconds to put and get a
    shard, and a table of the seconds to transfer a weights file. Raises BadInput if Ceph is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as directory, ExitStack() as stack:
        if missing := missing_ceph():
            raise BadInput(missing)
        servers = {"moto": moto, "Ceph RGW": rgw}
        homes = {name: Path(directory, name.partition(" ")[0]) for name in servers}
        for home in homes.values():
            home.mkdir()
        running = {name: stack.enter_context(serve(homes[name])) for name, serve in servers.items()}
        return [
            _requests(running["moto"], Path(directory)),
            *(_table(name, each) for name, each in running.items()),
            _weights(Path(directory)),
        ]


def _requests(server: S3Server, home: Path) -> Table:
    """Count the S3 requests of one iteration of a real job, and return a table with their numbers and prices.

    The job runs two iterations, and the second is counted.
    """
    overrides = {
        "iterations": 2,
        "data.options.train_problems": 4 * SHARDS,
        "rollout.prompts": SHARDS,
        "rollout.shard_prompts": 1,
        "rollout.group_size": 2,
        "rollout.sampling.max_new_tokens": 4,
        "evaluation.problems": 1,
    }
    (home / "prefect").mkdir()
    with s3_proxy(server.endpoint) as (endpoint, weather), prefect_server(home / "prefect") as api:
        place = server.place(endpoint=endpoint)
        place.open()
        weather.seconds = ANSWER_SECONDS
        InProcessJob(home / "job", api, address=place.uri).train(
            *(f"{key}={value}" for key, value in overrides.items())
        )
    beginning, end = (weather.time_of(f"^PUT .*/manifests/it-000{number}/seal") for number in (1, 2))
    requests = weather.between("^PUT .*/manifests/it-0001/seal", "^PUT .*/manifests/it-0002/seal")
    counts = Counter("LIST" if "list-type" in request else request.partition(" ")[0] for request in requests)
    priced = {kind: (count, count * PRICES[kind] / 1000) for kind, count in counts.most_common()}
    total = sum(counts.values()), sum(price for _, price in priced.values())
    return Table(
        title=f"S3: requests of an iteration of {SHARDS} shards, rollout to update, in {end - beginning:.0f} s",
        columns=("", "requests", "for each shard", "US$ for 1,000 iterations"),
        rows=tuple((kind, count, count / SHARDS, price) for kind, (count, price) in (*priced.items(), ("all", total))),
        notes=(
            "requests of the driver and its workers on one machine with a large cache; renewals of leases are not "
            "included",
            f"each response is delayed by {1e3 * ANSWER_SECONDS:.0f} ms",
        ),
    )


def _table(name: str, server: S3Server) -> Table:
    ways = {
        "boto3: put_object, put_object, get_object": _plain(server),
        "s3fs: pipe_file, pipe_file, cat_file": _s3fs(server),
        **_ours(server),
    }
    durations: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for round_ in range(ROUNDS + 1):
        shard, manifest = os.urandom(SHARD), os.urandom(MANIFEST)
        for way, do in ways.items():
            started, cpu = time.perf_counter(), _cpu()
            do(secrets.token_hex(8), shard, manifest)
            if round_:  # the first round is a warm-up
                durations[way].append((time.perf_counter() - started, _cpu() - cpu))
    plain = next(iter(durations.values()))
    rows = tuple(
        (
            way,
            statistics.median(seconds for seconds, _ in each),
            statistics.median(cpu for _, cpu in each),
            statistics.median(one[0] / other[0] for one, other in zip(plain, each, strict=True)),
        )
        for way, each in durations.items()
    )
    return Table(
        title=f"S3 on {name}: put {SHARD / 1e6:.0f} MB, commit, get: median of {ROUNDS}",
        columns=("", "seconds", "CPU s of the client", "speed of boto3 = 1"),
        rows=rows,
        notes=("client and server share this machine; the ratio is the median over rounds",),
    )


def _weights(directory: Path) -> Table:
    """Measure the seconds to upload and download a file of weights with boto3 and with Rheostat's store.

    The downloads start without a cached copy.
    """
    home = directory / "weights"
    home.mkdir()
    with rgw(home, gibibytes=16) as server:
        return _moved(server, home / "source", home / "fetched")


def _moved(server: S3Server, source: Path, target: Path) -> Table:
    with source.open("wb") as file:
        for _ in range(WEIGHTS // 10**8):
            file.write(os.urandom(10**8))
    client, durations = _client(server), dict[str, list[tuple[float, float]]]()

    def clocked(way: str, do: Callable[[], object]) -> None:
        started, cpu = time.perf_counter(), _cpu()
        do()
        durations.setdefault(way, []).append((time.perf_counter() - started, _cpu() - cpu))

    for _ in range(WEIGHTS_ROUNDS):
        key, store = secrets.token_hex(8), server.place().open()
        clocked("boto3: upload_file", lambda: client.upload_file(str(source), BUCKET, key))  # noqa: B023
        clocked("boto3: download_file", lambda: client.download_file(BUCKET, key, str(target)))  # noqa: B023
        client.delete_object(Bucket=BUCKET, Key=key)
        clocked("the store: put", lambda: store.put(key, source))  # noqa: B023
        shutil.rmtree(server.home / "cache")
        clocked("the store: fetch into the cache", lambda: store.local_path(key))  # noqa: B023
        assert store.local_path(key).stat().st_size == WEIGHTS
        store.delete(key)
    rows = tuple(
        (
            way,
            statistics.median(seconds for seconds, _ in each),
            WEIGHTS / 1e6 / statistics.median(seconds for seconds, _ in each),
            statistics.median(cpu for _, cpu in each),
        )
        for way, each in durations.items()
    )
    return Table(
        title=f"S3 on Ceph RGW: {WEIGHTS / 1e9:g} GB of weights in one file: median of {WEIGHTS_ROUNDS}",
        columns=("", "seconds", "MB/s", "CPU s of the client"),
        rows=rows,
        notes=("client and server share this machine; checking digests when a bundle is loaded is not included",),
    )


def _client(server: S3Server) -> BaseClient:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )


def _plain(server: S3Server) -> Do:
    client = _client(server)

    def do(name: str, shard: bytes, manifest: bytes) -> None:
        client.put_object(Bucket=BUCKET, Key=f"plain/{name}", Body=shard, IfNoneMatch="*")
        client.put_object(Bucket=BUCKET, Key=f"plain/{name}.json", Body=manifest, IfNoneMatch="*")
        assert len(client.get_object(Bucket=BUCKET, Key=f"plain/{name}")["Body"].read()) == SHARD

    return do


def _s3fs(server: S3Server) -> Do:
    files = s3fs.S3FileSystem(endpoint_url=server.endpoint, key=ACCESS_KEY, secret=SECRET_KEY)

    def do(name: str, shard: bytes, manifest: bytes) -> None:
        files.pipe_file(f"{BUCKET}/s3fs/{name}", shard, mode="create")
        files.pipe_file(f"{BUCKET}/s3fs/{name}.json", manifest, mode="create")
        assert len(files.cat_file(f"{BUCKET}/s3fs/{name}")) == SHARD

    return do


def _ours(server: S3Server) -> dict[str, Do]:
    store = server.place().open()

    def put(name: str, shard: bytes, manifest: bytes) -> None:
        assert store.put(f"shards/{name}", shard) and store.put(f"manifests/{name}.json", manifest)

    def read(name: str, shard: bytes, manifest: bytes) -> None:
        put(name, shard, manifest)
        assert len(store.read(f"shards/{name}")) == SHARD

    def map_file(name: str, shard: bytes, manifest: bytes) -> None:
        put(name, shard, manifest)
        assert pa.memory_map(str(store.local_path(f"shards/{name}"))).size() == SHARD

    return {"the store: put, put, read": read, "the store: put, put, map from the cache": map_file}


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
