"""The store in S3 beside plain boto3: a shard of 64 MB put, its manifest committed, the shard got back."""

import os
import resource
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import boto3
import pyarrow as pa
from botocore.config import Config

from bench.tables import Table
from infra.errors import BadInput
from tests.support.s3_servers import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, missing_ceph, moto, rgw

ROUNDS = 9
SHARD, MANIFEST = 64_000_000, 2_000

Do = Callable[[str, bytes, bytes], None]


def measure() -> list[Table]:
    """Have each take its turn in every round, on a server of its own process."""
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as directory, ExitStack() as stack:
        if missing := missing_ceph():
            raise BadInput(missing)
        servers = {"moto": moto, "Ceph RGW": rgw}
        homes = {name: Path(directory, name.partition(" ")[0]) for name in servers}
        for home in homes.values():
            home.mkdir()
        return [_table(name, stack.enter_context(serve(homes[name]))) for name, serve in servers.items()]


def _table(name: str, server: S3Server) -> Table:
    ways = {"boto3: put_object, put_object, get_object": _plain(server), **_ours(server)}
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for round_ in range(ROUNDS + 1):
        shard, manifest = os.urandom(SHARD), os.urandom(MANIFEST)
        for way, do in ways.items():
            started, cpu = time.perf_counter(), _cpu()
            do(secrets.token_hex(8), shard, manifest)
            if round_:  # the first is to get to know the server
                taken[way].append((time.perf_counter() - started, _cpu() - cpu))
    plain = next(iter(taken.values()))
    rows = tuple(
        (
            way,
            statistics.median(seconds for seconds, _ in each),
            statistics.median(cpu for _, cpu in each),
            statistics.median(one[0] / other[0] for one, other in zip(plain, each, strict=True)),
        )
        for way, each in taken.items()
    )
    return Table(
        title=f"S3 on {name}: put {SHARD / 1e6:.0f} MB, commit, get: median of {ROUNDS}",
        columns=("", "seconds", "CPU s of the client", "speed of boto3 = 1"),
        rows=rows,
        notes=("client and server share this machine; the ratio is the median of those of single rounds",),
    )


def _plain(server: S3Server) -> Do:
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )

    def do(name: str, shard: bytes, manifest: bytes) -> None:
        client.put_object(Bucket=BUCKET, Key=f"plain/{name}", Body=shard, IfNoneMatch="*")
        client.put_object(Bucket=BUCKET, Key=f"plain/{name}.json", Body=manifest, IfNoneMatch="*")
        assert len(client.get_object(Bucket=BUCKET, Key=f"plain/{name}")["Body"].read()) == SHARD

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
        assert pa.memory_map(str(store.local(f"shards/{name}"))).size() == SHARD

    return {"the store: put, put, read": read, "the store: put, put, map from the cache": map_file}


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
