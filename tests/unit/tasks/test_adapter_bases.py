"""LoRA adapters whose base model is on the Hugging Face Hub: merges and runs read the base model at one commit. The
adapters are on this machine, on the Hub or in a bucket."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import snapshot_download
from pydantic import TypeAdapter

import rheostat.infra.store.hub
from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.hub import cache_folder, resolve_commit
from rheostat.infra.store.hub_names import HubAddress
from rheostat.infra.store.inputs import fetch_path, format_path, place_texts
from rheostat.models.config.lora import LoraConfig
from rheostat.models.modeling.merging import find_base
from rheostat.models.modeling.weighted_sum import write_merge
from rheostat.models.records.merges import MERGE, MergeWork
from rheostat.tasks.config.run import parse_config
from rheostat.tasks.run.hub_inputs import base_commits, fetch_hub_inputs, with_base_commits, with_hub_commits
from rheostat.tasks.soup.merging import mergekit_page, weighted_parents
from tests.support.demos import ARITHMETIC
from tests.support.memory_bucket import memory_bucket
from tests.support.policies import write_adapter, write_policy

PLACES = ("local", "hub", "bucket")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("RHEOSTAT_CACHE", str(tmp_path / "cache"))
    with memory_bucket() as objects:
        yield objects


@pytest.fixture
def adapters(hub, bucket, tmp_path):
    """Names of the same adapter on this machine, on the Hub and in a bucket, by place."""
    folder, base = tmp_path / "adapter", tmp_path / "policy"
    write_policy(base)
    hub.add("team/tiny", base)
    write_adapter(base, folder, LoraConfig(rank=1), ref=BundleRef(key="base", digest="0", bytes=0))
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "team/tiny"}))
    hub.add("team/adapter", folder)
    bucket.pipe({f"/models/adapter/{path.name}": path.read_bytes() for path in folder.iterdir()})
    return {"local": str(folder), "hub": "team/adapter", "bucket": "gs://models/adapter"}


def move_branch(hub, folder: Path) -> str:
    """Add a commit with another policy to the base model and download it, as another program would. Return the commit
    before."""
    before = resolve_commit(HubAddress("model", "team/tiny"))
    write_policy(folder, seed=1)
    moved = hub.add("team/tiny", folder)
    snapshot_download("team/tiny", endpoint=hub.url, cache_dir=cache_folder())
    rheostat.infra.store.hub._query_commit.cache_clear()
    assert moved != before
    return before


def as_sent(work: MergeWork) -> MergeWork:
    """Return a request as the process that merges receives it."""
    adapter = TypeAdapter(MergeWork)
    return adapter.validate_json(adapter.dump_json(work))


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_merge_reads_the_base_of_an_adapter_at_one_commit_and_records_the_commit(
    adapters, hub, tmp_path, monkeypatch, place
):
    parents = weighted_parents(str(tmp_path), [f"{adapters[place]}=0.5", f"{tmp_path / 'policy'}=0.5"])
    commit = move_branch(hub, tmp_path / "other")
    (tmp_path / "sum").mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    merge = write_merge(as_sent(MergeWork(parents, tmp_path / "sum")))
    assert [parent.base for parent in merge.parents] == [f"team/tiny@{commit}", ""]
    recorded = json.loads((tmp_path / "sum" / MERGE).read_text())["parents"]
    assert [parent.get("base") for parent in recorded] == [f"team/tiny@{commit}", None]
    assert find_base(parents[0].path).name == commit


def test_an_adapter_of_joined_ranks_names_its_base_on_the_hub_with_the_commit(adapters, tmp_path):
    commit = resolve_commit(HubAddress("model", "team/tiny"))
    parents = weighted_parents(str(tmp_path), [f"{adapters[place]}=0.5" for place in ("local", "hub")])
    (tmp_path / "sum").mkdir()
    write_merge(MergeWork(parents, tmp_path / "sum", adapters="ranks"))
    settings = json.loads((tmp_path / "sum" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("team/tiny", commit)


def test_a_mergekit_file_names_the_base_on_the_hub_with_the_commit(adapters, tmp_path):
    commit = resolve_commit(HubAddress("model", "team/tiny"))
    [model] = yaml.safe_load(mergekit_page(weighted_parents(str(tmp_path), [f"{adapters['local']}=1"])))["models"]
    assert model["model"] == f"team/tiny@{commit}+{adapters['local']}"


@pytest.mark.parametrize("place", PLACES)
def test_a_run_records_the_commit_of_the_base_of_an_adapter_and_reads_the_base_there(
    adapters, hub, tmp_path, monkeypatch, place
):
    document = place_texts({"policy": {"kind": "directory", "path": adapters[place]}}, "")
    config = with_hub_commits(parse_config({"data": ARITHMETIC} | document, source="job"))
    fetch_hub_inputs(config)
    commit = move_branch(hub, tmp_path / "other")
    assert base_commits(config) == {"base model team/tiny": commit}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sent = type(config).model_validate_json(config.model_dump_json())
    assert find_base(fetch_path(sent.policy.path)).name == commit
    policy = {"kind": "directory", "path": format_path(config.policy.path)}
    joined = parse_config(place_texts({"data": ARITHMETIC, "policy": policy}, ""), source="job")
    joined = with_base_commits(joined, base_commits(config), resolves=False)
    assert find_base(fetch_path(joined.policy.path)).name == commit


def test_a_complete_model_in_a_bucket_has_no_base_on_the_hub(adapters, bucket):
    bucket.pipe_file("/models/adapter/config.json", b"{}")
    document = place_texts({"policy": {"kind": "directory", "path": adapters["bucket"]}}, "")
    assert base_commits(with_hub_commits(parse_config({"data": ARITHMETIC} | document, source="job"))) == {}
