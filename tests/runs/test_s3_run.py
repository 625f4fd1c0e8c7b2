"""Whole runs in buckets equal the runs on disk bit for bit, also with failed requests on the way."""

import json
import os
import re
import shutil
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3
from prefect.blocks.system import Secret
from pyarrow.fs import S3FileSystem

from rheostat.flows.cli.app import main
from rheostat.flows.cli.train import run_flow
from rheostat.flows.train import train
from rheostat.infra.errors import BadInput, RunChanged
from rheostat.infra.processes.guard import CLUSTER
from rheostat.infra.store.bundles import CONTENTS
from rheostat.infra.store.copies import copy_run
from rheostat.infra.store.registry import open_registry
from rheostat.infra.store.runs import open_run
from rheostat.infra.store.storage import open_store
from rheostat.models.config.data import FileData
from rheostat.models.data.problems import Problem, load_problems
from rheostat.tasks.forks.creation import create_fork, request_fork
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.verification.invariants import verify_run
from tests.support.in_process import InProcessJob, own_store
from tests.support.jobs import SMALLEST, TINY, Job, digest_of, files_of, manifests_of, process_tree
from tests.support.jobs import Fault as WorkerFault
from tests.support.pictures import picture
from tests.support.prompts import choose_prompts, secrets_of
from tests.support.s3_proxy import Fault, s3_proxy
from tests.support.s3_servers import SECRET_KEY, Place

pytestmark = [pytest.mark.s3, pytest.mark.timeout(1200)]


LEAST_REQUESTS, SHARD_REQUESTS = 110, 9
"""Limits of the requests of an iteration and of each of its shards, from prompts to update, as in docs/s3.md."""
LEAST_HEADS, SHARD_HEADS = 60, 4
SECRET_VARIABLE = "AWS_SECRET_ACCESS_KEY"
SECRET = "a-secret-of-this-test"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Stores set environment variables of this process, which are restored afterwards."""
    aws = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
    for name in (*aws, "RHEOSTAT_CACHE"):
        monkeypatch.setenv(name, "")
    for name in ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def files_below(*homes: Path) -> list[Path]:
    return [path for home in homes for path in home.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["moto", "rgw"])
def test_a_run_in_a_bucket_equals_the_run_on_disk(kind, s3_servers, reference, prefect_api, together, tmp_path):
    server = s3_servers.start(kind)
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place(endpoint=endpoint)
        if kind == "moto":  # which takes any
            place = replace(place, environment={**place.environment, SECRET_VARIABLE: SECRET})
        store = place.open()
        job = InProcessJob(tmp_path, prefect_api, address=place.uri)
        job.train()
        assert place.manifests() == manifests_of(reference.run)
        asked = weather.between("^PUT .*/manifests/it-0001/seal", "^PUT .*/manifests/it-0002/seal")
        # Each worker that reads a file finds it by a list that starts after the name before it.
        lists = [request for request in asked if "list-type" in request and "start-after" not in request]
        assert len(asked) <= LEAST_REQUESTS + SHARD_REQUESTS * 3 and len(lists) <= 12, "\n".join(lists)
        verified = job.command("verify")
        assert verified.code == 0, verified.output
        shown = json.loads(job.command("show", "--json").output)
        assert shown["policy"].startswith(f"{place.uri}/tiny/policies/")
        exported = json.loads(job.command("export", "--json").output)
        keys = {"access_key": place.environment["AWS_ACCESS_KEY_ID"], "secret_key": place.environment[SECRET_VARIABLE]}
        bucket = S3FileSystem(endpoint_override=endpoint, region="us-east-1", **keys)
        tables = [pq.read_table(address.removeprefix("s3://"), filesystem=bucket) for address in exported]
        assert [table["iteration"][0].as_py() for table in tables] == [1, 2, 3]
        with job.prefect():
            assert main(["evaluate", shown["policy"], "pools.cluster=threads"]) == 0
            assert main(["evaluate", f"{place.uri}/tiny"]) == 2
        assert all(SECRET.encode() not in store.read(entry.key) for entry in store.entries(""))
        assert all(SECRET.encode() not in path.read_bytes() for path in files_below(tmp_path, together / "prefect"))
        again = len(weather.seen)
        job.train()
        assert not [request for request in weather.seen[again:] if request.startswith("PUT") and "manifests" in request]


def test_a_run_in_azure_with_failed_requests_equals_the_run_on_disk(s3_servers, reference, prefect_api, tmp_path):
    server = s3_servers.start("azurite")
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place(endpoint=endpoint)
        store = place.open()
        weather.share = 0.01
        job = InProcessJob(tmp_path, prefect_api, address=place.uri)
        job.train()
        weather.share = 0
        assert place.manifests() == manifests_of(reference.run)
        verified = job.command("verify")
        assert verified.code == 0, verified.output
        shown = json.loads(job.command("show", "--json").output)
        assert shown["policy"].startswith(f"{place.uri}/tiny/policies/")
        key = place.environment["AZURE_STORAGE_ACCOUNT_KEY"].encode()
        assert all(key not in store.read(entry.key) for entry in store.entries(""))
        here = str(tmp_path / "copy")
        assert main(["copy", "tiny", place.uri, here]) == 0
        assert Place(here).manifests() == manifests_of(reference.run)


def test_an_iteration_of_many_shards_sends_and_reports_a_bounded_number_of_requests(s3_servers, prefect_api, tmp_path):
    server, shards = s3_servers.start("moto"), 16
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place(endpoint=endpoint)
        place.open()
        job = InProcessJob(tmp_path, prefect_api, address=place.uri)
        job.train("iterations=2", f"rollout.prompts={shards}", "rollout.shard_prompts=1", "rollout.group_size=2")
        asked = weather.between("^PUT .*/manifests/it-0001/seal", "^PUT .*/manifests/it-0002/seal")
        verbs = Counter("LIST" if "list-type" in request else request.partition(" ")[0] for request in asked)
        assert verbs["HEAD"] <= LEAST_HEADS + SHARD_HEADS * shards, verbs
        assert sum(verbs.values()) <= LEAST_REQUESTS + SHARD_REQUESTS * shards, verbs
        iterations = json.loads(job.command("show", "--json").output)["iterations"]
        first, second = (each["requests"] for each in iterations)
        assert 2 * shards < second["PUT"] <= verbs["PUT"] and second["HEAD"] <= verbs["HEAD"]
        assert second["GET"] <= verbs["GET"] and first["LIST"] > 0


def test_a_run_with_many_failed_requests_equals_a_run_without_failures(s3_servers, reference, prefect_api, tmp_path):
    server = s3_servers.start("moto")
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place(endpoint=endpoint)
        place.open()
        weather.share, weather.seed = 0.05, 1
        InProcessJob(tmp_path, prefect_api, address=place.uri).train()
        weather.share = 0
        assert place.manifests() == manifests_of(reference.run)


KILLS = (
    WorkerFault("rollout", "progress", "generate", count=5),
    WorkerFault("scoring", "begin", "^score"),
    WorkerFault("update-0", "progress", "update"),
)


def test_a_run_killed_while_a_new_policy_is_uploaded_continues_with_the_files_on_this_machine(
    s3_servers, reference, prefect_api, tmp_path
):
    server = s3_servers.start("moto")
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place(endpoint=endpoint)
        place.open()
        job = Job(tmp_path, prefect_api, address=place.uri, counts_works=True)
        with job.started() as process:

            def kill_at_second_policy() -> None:
                keys = [request for request in weather.seen if re.match("PUT .*/policies/[^/]+/config.json", request)]
                if len(keys) > 1:
                    process.kill()

            weather.faults = [Fault("before", "^PUT .*/policies/", does=kill_at_second_policy)]
            assert job.ended(process).code == -signal.SIGKILL
        weather.faults = []
        assert "it-0001/update" not in place.manifests()
        resumed = job.train()
        assert resumed.code == 0, resumed.output
        assert place.manifests() == manifests_of(reference.run)
        updates = {work: count for work, count in job.works().items() if work.startswith("update")}
        assert {*updates.values()} == {1}, "the update was not repeated to upload its policy"


def test_killed_ray_workers_do_not_change_a_run_in_a_bucket_and_no_process_writes_the_key(
    s3_servers, reference, prefect_api, tmp_path
):
    server, told = s3_servers.start("rgw"), []
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place(endpoint=endpoint)
        place.open()
        job = Job(tmp_path, prefect_api, address=place.uri, counts_works=True)
        with job.started(faults=KILLS) as process:

            def look() -> None:
                family = process_tree(process.pid)
                clusters = {member.environ().get(CLUSTER) for member in family} - {None}
                told.extend(" ".join(member.cmdline()).encode() for member in family)
                told.extend(path.read_bytes() for path in files_below(*map(Path, clusters)))

            weather.faults = [Fault("before", "^PUT .*/manifests/it-0002/update", times=1, does=look)]
            ended = job.ended(process)
        assert ended.code == 0, ended.output
        assert place.manifests() == manifests_of(reference.run)
        assert sum(job.works().values()) - len(job.works()) >= len(KILLS), "each kill had a work begun again"
    told.extend(path.read_bytes() for path in files_below(tmp_path))
    assert len(told) > 20 and not [text for text in told if SECRET_KEY.encode() in text]


def test_keys_from_a_secret_block_of_prefect_are_used_and_written_nowhere(
    s3_servers, prefect_api, monkeypatch, tmp_path
):
    place = s3_servers.start("rgw").place()
    store = place.open()
    keys = {name: os.environ.pop(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    job = InProcessJob(tmp_path, prefect_api, address=place.uri)
    monkeypatch.setenv("RHEOSTAT_SECRETS", "nobody")
    with pytest.raises(BadInput, match="RHEOSTAT_SECRETS names 'nobody', but Prefect has no Secret block"):
        job.train("iterations=1")
    with job.prefect():
        Secret(value="a text").save("text", overwrite=True)
        Secret(value=json.dumps(keys)).save("bucket", overwrite=True)
    monkeypatch.setenv("RHEOSTAT_SECRETS", "text")
    with pytest.raises(BadInput, match="The Secret block 'text', which"):
        job.train("iterations=1")
    monkeypatch.setenv("RHEOSTAT_SECRETS", "bucket")
    job.train("iterations=1")
    assert "it-0001/seal" in place.manifests()
    assert all(SECRET_KEY.encode() not in store.read(entry.key) for entry in store.entries(""))
    assert all(SECRET_KEY.encode() not in path.read_bytes() for path in files_below(tmp_path))


def test_a_fork_in_a_bucket_shares_the_objects_of_its_parent_and_is_trained(
    s3_servers, reference, prefect_api, tmp_path
):
    place = s3_servers.start("moto").place()
    place.open()
    copy_run("tiny", own_store(reference, tmp_path), place.uri)
    asked = request_fork(place.uri, "tiny@2", "fork", overrides=["pools.cluster=threads", "report=false"])
    create_fork(asked)
    with InProcessJob(tmp_path / "on", prefect_api, address=place.uri).prefect():
        run_flow(train(asked.config))
    fork, parent = open_run(place.uri, "fork"), open_run(place.uri, "tiny")
    assert policy_after(fork, 3).bundles == policy_after(parent, 3).bundles
    own = {entry.key for entry in open_store(f"{place.uri}/fork").entries("") if entry.key != "fork.json"}
    assert own.isdisjoint(fork.fork.shared["tiny"]) and len(own) < len(fork.fork.shared["tiny"])
    assert verify_run(place.uri, "fork") == []


def test_a_copy_in_a_bucket_continues_like_a_copy_on_disk_and_is_copied_back_byte_for_byte(
    s3_servers, reference, prefect_api, tmp_path, capsys
):
    place = s3_servers.start("moto").place()
    place.open()
    store = own_store(reference, tmp_path)
    assert main(["copy", "tiny", store, place.uri, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["found"], told["problems"]) == (True, 0, [])
    assert main(["copy", "tiny", place.uri, str(tmp_path / "back/store")]) == 0
    assert files_of(tmp_path / "back/store/tiny") == files_of(reference.run)
    on_disk, in_bucket = (
        InProcessJob(tmp_path / "back", prefect_api),
        InProcessJob(tmp_path / "on", prefect_api, address=place.uri),
    )
    for job in (on_disk, in_bucket):
        job.train("iterations=4")
    assert place.manifests() == manifests_of(on_disk.run)
    assert len(place.manifests()) > len(manifests_of(reference.run))
    assert main(["copy", "tiny", store, place.uri]) == 0


def test_data_and_a_policy_in_a_bucket_give_the_same_weights_as_local_files(
    s3_servers, reference, prefect_api, tmp_path
):
    place = s3_servers.start("moto").place()
    store, rows = place.open(), [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist([{"prompt": "7+7=", "answer": "14"}] * 8), tmp_path / "heldout.parquet")
    policy = Path(json.loads(reference.command("show", "--json").output)["policy"])
    shutil.copytree(policy, tmp_path / "policy", ignore=shutil.ignore_patterns("bundle.json"))
    for path in files_below(tmp_path):
        store.put(path.relative_to(tmp_path).as_posix(), path)

    def trained(name: str, home: str) -> str:
        """Train on the files in this place, and return the digest of the weights."""
        data = f'data={{kind="file", path="{home}/train.jsonl", heldout_path="{home}/heldout.parquet"}}'
        job = InProcessJob(tmp_path / name, prefect_api)
        job.train(data, f'policy={{kind="directory", path="{home}/policy"}}', "warmup=", "iterations=1")
        assert home in (job.run / "run.json").read_text()
        return digest_of(job.run, "it-0001/update")

    assert trained("far", place.uri) == trained("near", str(tmp_path))
    store.delete("train.jsonl")
    store.put("train.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows[1:]))
    with pytest.raises(RunChanged, match=f"{place.uri}/train.jsonl"):
        trained("far", place.uri)


def test_images_in_a_bucket_equal_local_images(s3_servers, tmp_path):
    place = s3_servers.start("moto").place()
    store = place.open()
    (tmp_path / "pictures/warm").mkdir(parents=True)
    for name in ("blue", "warm/red"):
        (tmp_path / f"pictures/{name}.png").write_bytes(picture(name.rpartition("/")[2]))
    rows = [{"prompt": "What colour?", "answer": name, "images": f"{name}.png"} for name in ("blue", "warm/red")]
    for name, file in {"train": rows, "lacking": [{**rows[0], "images": ["blue.png", "cold/red.png"]}]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in file))
    for path in files_below(tmp_path):
        store.put(path.relative_to(tmp_path).as_posix(), path)

    def read(home: str, name: str) -> list[Problem]:
        path = f"{home}/{name}.jsonl"
        data = {"kind": "file", "path": path, "heldout_path": path, "images_column": "images"}
        return load_problems(FileData(**data, images_root=f"{home}/pictures"), "train", 0)

    near, far = read(str(tmp_path), "train"), read(place.uri, "train")
    assert [each.images for each in far] == [each.images for each in near] == [(picture("blue"),), (picture("red"),)]
    assert [each.identity for each in far] == [each.identity for each in near]
    with pytest.raises(
        BadInput, match=rf"{place.uri}/lacking.jsonl.* {place.uri}/pictures/cold/red.png does not exist"
    ):
        read(place.uri, "lacking")


def test_forgotten_prompts_of_a_run_in_a_bucket_are_in_neither_the_bucket_nor_the_cache(
    s3_servers, reference, prefect_api, tmp_path
):
    place = s3_servers.start("moto").place()
    cache = tmp_path / "cache"
    store = replace(place, environment={**place.environment, "RHEOSTAT_CACHE": str(cache)}).open()
    copy_run("tiny", own_store(reference, tmp_path), place.uri)
    job = InProcessJob(tmp_path, prefect_api, address=place.uri)
    assert job.command("export").code == 0 and job.command("verify").code == 0
    ids = choose_prompts(reference)
    secrets = secrets_of(reference, ids)

    def found():
        contents = [store.read(entry.key) for entry in store.entries("") if not entry.key.endswith(".parquet")]
        contents += [path.read_bytes() for path in files_below(cache) if path.suffix != ".parquet"]
        return sum(secret in content for content in contents for secret in secrets)

    assert found() >= 2 * len(secrets), "the bucket and the cache have them"
    (tmp_path / "ids").write_text("\n".join(ids))
    with open_run(place.uri, "tiny").lock():
        assert "is locked by process" in job.command("forget", "--prompt-ids", str(tmp_path / "ids"), "--delete").output
        assert "is locked by process" in job.command("gc", "--keep", "0", "--delete").output
    forgotten = job.command("forget", "--prompt-ids", str(tmp_path / "ids"), "--delete")
    assert forgotten.code == 0, forgotten.output
    assert found() == 0
    for entry in store.entries("tiny/export/"):
        rows = pq.read_table(store.local_path(entry.key)).to_pylist()
        assert not any(row["prompt"] or row["completion"] for row in rows if row["prompt_id"] in ids)
    assert job.command("verify").code == 0
    store.put("tiny/shards/00/nobodys.arrow", b"nobody's")
    assert '"shards"' in job.command("gc", "--delete", "--json").output
    assert not store.exists("tiny/shards/00/nobodys.arrow")
    assert job.command("gc", "--keep", "0", "--older-than", "1d", "--delete").output.startswith("nothing to delete")
    assert job.command("gc", "--keep", "0", "--delete").code == 0
    assert store.entries("tiny/shards/") == store.entries("tiny/policies/") == []
    assert job.command("verify").code == 0 and job.command("show").code == 0


RULES = """
[[evaluations]]
name = "sums"
data = {kind = "target", target = "arithmetic:ArithmeticData", options = {heldout_problems = 30}}
problems = 30
[promotion]
registry = "assistant"
primary = {suite = "sums", min_gain = -1}
"""


def test_a_registry_in_a_bucket_promotes_rolls_back_and_checks_out_its_champion(s3_servers, prefect_api, tmp_path):
    place = s3_servers.start("moto").place()
    place.open()
    job = InProcessJob(tmp_path, prefect_api, address=place.uri)
    (tmp_path / "tiny.toml").write_text(TINY + RULES)
    smallest = (*SMALLEST, "iterations=1", "pools.cluster=threads", "promotion.problems=all")
    for day in ("2026-11-02", "2026-11-09"):
        assert run_command(job, "retrain", str(tmp_path / "tiny.toml"), *smallest, "--day", day) == 0
    registry = open_registry(place.uri, "assistant")
    first, second = registry.records()
    assert [(each.kind, each.previous) for each in (first, second)] == [("promote", 0), ("promote", 1)]

    def again(run):
        return registry.append(
            lambda number, champion: second.model_copy(
                update={"number": number, "run": run, "previous": champion.number}
            )
        )

    with ThreadPoolExecutor(20) as threads:
        made = list(threads.map(again, map("run-{}".format, range(20))))
    assert sorted((each.number, each.previous) for each in made) == [(number, number - 1) for number in range(3, 23)]
    assert run_command(job, "rollback", "assistant", "--to", "1", "--reason", "it refuses too often") == 0
    assert registry.champion().policy == first.policy
    assert run_command(job, "verify", "assistant") == 0
    assert run_command(job, "lineage", "assistant@champion") == 0
    assert run_command(job, "checkout", "assistant", "--to", str(tmp_path / "current")) == 0
    assert blake3((tmp_path / "current" / CONTENTS).read_bytes()).hexdigest() == first.bundle.digest


def run_command(job: InProcessJob, *words: str) -> int:
    with job.prefect():
        return main([*words, "--store", job.address])
