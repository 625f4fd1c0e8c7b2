"""Jobs with names of the Hugging Face Hub: the commits that a run records and keeps, and the keys that take a name."""

import json
import tomllib

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from infra.errors import BadInput, RunChanged
from infra.store.dependencies import dependency_records, record_dependencies, recorded_config
from infra.store.inputs import HubPath, fetch_path, paths_in, place_texts
from infra.store.manifests import Manifest
from infra.store.runs import create_run, open_run
from models.config.data import FileData
from models.config.proposals import ProposalRequest
from models.data.files import file_problems, read_problems
from models.inspection.directory import inspect_import
from models.modeling.initial import write_policy as write_initial_policy
from models.proposals.job import propose_job
from tasks.config.run import RunConfig, parse_config
from tasks.run.dependencies import dependencies_of
from tasks.run.hub_inputs import describe_hub_inputs, fetch_hub_inputs, with_hub_commits
from tests.support.pictures import picture
from tests.support.policies import write_policy

POLICY = {"kind": "directory", "path": "team/tiny"}
DATA = {"kind": "file", "path": "team/sums", "split": "train", "heldout_split": "test"}
JOB = {"name": "r", "policy": POLICY, "data": DATA}


def rows(*answers):
    return "".join(json.dumps({"prompt": f"number {each}?", "answer": str(each)}) + "\n" for each in answers).encode()


def sums(shift=0):
    files = {
        "data/train-00000-of-00002.jsonl": (1, 2),
        "data/train-00001-of-00002.jsonl": (3,),
        "data/test-00000-of-00001.jsonl": (4,),
    }
    return {name: rows(*(number + shift for number in numbers)) for name, numbers in files.items()}


def job(document=JOB, *, folder="", recorded=False):
    return parse_config(place_texts(document, folder), source="job", recorded=recorded)


@pytest.fixture
def repositories(hub, tmp_path):
    """Server with a policy and a dataset, at their first commits."""
    (tmp_path / "policy").mkdir()
    write_policy(tmp_path / "policy")
    hub.add("team/tiny", tmp_path / "policy")
    hub.add("team/sums", sums(), kind="dataset")
    return hub


def begin(tmp_path, document=JOB):
    """Create a run with its dependencies and one result, as the start of a run does."""
    config = with_hub_commits(job(document))
    run = create_run(str(tmp_path / "store"), "r", config.identity())
    with run.lock():
        record_dependencies(run, dependencies_of(config, None), iteration=1, folder=str(tmp_path))
        run.commit(Manifest(key="policy/0"))
    return run


def commits_in(config):
    return {path.relative: path.address.revision for path in paths_in(config) if isinstance(path, HubPath)}


def test_a_name_is_recorded_as_written_with_its_commit(repositories, tmp_path):
    run = begin(tmp_path)
    assert run.record.config["policy"]["path"] == "team/tiny" and run.record.config["data"]["path"] == "team/sums"
    recorded = dependency_records(run)[-1].dependencies.hub
    assert set(recorded) == {"model team/tiny", "dataset team/sums"}
    assert recorded == {
        f"{kind} {name}": commit
        for kind, name in [("model", "team/tiny"), ("dataset", "team/sums")]
        for commit in [commits_in(with_hub_commits(job()))[name]]
    }


def test_a_run_continues_at_its_commits_after_the_branch_moved(repositories, tmp_path):
    run = begin(tmp_path)
    before = dependency_records(run)[-1].dependencies.hub
    moved = repositories.add("team/sums", sums(shift=10), kind="dataset")
    config = with_hub_commits(job(), open_run(str(tmp_path / "store"), "r"))
    assert commits_in(config)["team/sums"] == before["dataset team/sums"] != moved
    run.check_identity(config)
    assert [each.answer for each in file_problems(config.data, "train", 0)] == ["1", "2", "3"]


def test_the_recorded_configuration_names_the_commits(repositories, tmp_path):
    run = begin(tmp_path)
    config = job(recorded_config(run), recorded=True)
    assert commits_in(config) == commits_in(with_hub_commits(job()))
    assert config.identity(run.record.config) == run.record.config


def test_another_revision_in_the_job_is_refused_by_its_key(repositories, tmp_path):
    run = begin(tmp_path)
    other = with_hub_commits(job({**JOB, "data": {**DATA, "revision": "v2"}}), run)
    with pytest.raises(RunChanged, match=r"data\.revision"):
        run.check_identity(other)


def test_a_local_path_comes_before_a_name_of_the_hub(repositories, tmp_path):
    (tmp_path / "team" / "tiny").mkdir(parents=True)
    config = job(folder=str(tmp_path))
    assert config.policy.path == tmp_path / "team" / "tiny"
    assert describe_hub_inputs(config.policy)["path team/tiny"].startswith("local, /")


def test_a_local_path_that_a_run_recorded_does_not_become_a_name_of_the_hub(repositories, tmp_path):
    (tmp_path / "team" / "tiny").mkdir(parents=True)
    document = {"name": "r", "policy": POLICY}
    run = create_run(str(tmp_path / "store"), "r", job(document, folder=str(tmp_path)).identity())
    with run.lock():
        run.commit(Manifest(key="policy/0"))
    (tmp_path / "team" / "tiny").rmdir()
    config = with_hub_commits(job(document, folder=str(tmp_path)), run)
    assert config.policy.path == tmp_path / "team" / "tiny" and not isinstance(config.policy.path, HubPath)
    assert str(job(recorded_config(run), recorded=True).policy.path) == "team/tiny"


def test_a_local_path_with_the_name_of_a_recorded_repository_is_refused(repositories, tmp_path):
    document = {"name": "r", "policy": POLICY}
    run = begin(tmp_path, document)
    (tmp_path / "team" / "tiny").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"team/tiny has the name of the model team/tiny.*Rename"):
        with_hub_commits(job(document, folder=str(tmp_path)), run)


def test_workers_get_the_commits_and_read_the_cache_without_a_request(repositories, monkeypatch):
    config = with_hub_commits(job())
    fetch_hub_inputs(config)
    sent = type(config).model_validate_json(config.model_dump_json())
    repositories.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [each.answer for each in file_problems(sent.data, "train", 0)] == ["1", "2", "3"]
    assert [each.answer for each in file_problems(sent.data, "heldout", 0)] == ["4"]
    assert (fetch_path(sent.policy.path) / "config.json").is_file() and not repositories.requests


def test_a_policy_of_the_hub_is_checked_and_copied_like_a_directory(repositories, tmp_path):
    policy, copy = with_hub_commits(job()).policy, tmp_path / "copy"
    copy.mkdir()
    assert inspect_import(policy, []).shape.parameters == write_initial_policy(policy, copy, texts=[], seed=0)
    assert (copy / "model.safetensors").read_bytes() == (tmp_path / "policy" / "model.safetensors").read_bytes()
    assert not (copy / "model.safetensors").is_symlink()


def test_an_adapter_with_a_base_on_the_hub_is_checked_and_merged(repositories, tmp_path):
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    settings["base_model_name_or_path"] = "team/tiny"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    layer = "model.layers.0.self_attn.q_proj"
    out, width = load_file(tmp_path / "policy" / "model.safetensors")[f"{layer}.weight"].shape
    pair = {"lora_A": torch.ones(1, width), "lora_B": torch.ones(out, 1)}
    tensors = {f"base_model.model.{layer}.{name}.weight": tensor for name, tensor in pair.items()}
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    repositories.add("team/adapter", tmp_path / "adapter")
    policy, copy = with_hub_commits(job({"policy": {**POLICY, "path": "team/adapter"}})).policy, tmp_path / "copy"
    copy.mkdir()
    fetch_hub_inputs(policy)
    assert write_initial_policy(policy, copy, texts=[], seed=0) > 0 and (copy / "model.safetensors").is_file()
    assert set(describe_hub_inputs(policy)) == {"model team/adapter", "base model team/tiny"}


def test_the_plan_names_commits_files_and_bytes(repositories):
    lines = describe_hub_inputs(with_hub_commits(job()))
    commits = commits_in(with_hub_commits(job()))
    assert lines["dataset team/sums (train)"] == f"commit {commits['team/sums'][:12]}, 2 files, 0.0 MiB"
    assert lines["model team/tiny"].startswith(f"commit {commits['team/tiny'][:12]}, ")


def test_a_single_file_of_a_dataset_is_read(repositories):
    path = "hf://datasets/team/sums/data/test-00000-of-00001.jsonl"
    data = FileData(path=path, heldout_path="hf://datasets/team/sums/data/train-00001-of-00002.jsonl")
    assert [each.answer for each in file_problems(data, "train", 0)] == ["4"]


def test_a_job_is_proposed_for_names_of_the_hub(repositories, tmp_path):
    problems = [{"prompt": f"What is {number}?", "answer": str(number)} for number in range(40)]
    content = "".join(json.dumps(problem) + "\n" for problem in problems).encode()
    repositories.add("team/questions", {"train.jsonl": content}, kind="dataset")
    request = ProposalRequest(
        name="r", folder=str(tmp_path), data="team/questions", policy="team/tiny", memory=2**34, cores=2
    )
    document = tomllib.loads(propose_job(request).document)
    assert (document["data"]["path"], document["policy"]["path"]) == ("team/questions", "team/tiny")


CHAT = {"kind": "directory", "path": "team/tiny"}


@pytest.mark.parametrize(
    ("document", "kind"),
    [
        ({"policy": POLICY}, "model"),
        ({"policy": {"kind": "diffusion", "path": "team/tiny"}}, "model"),
        ({"policy": {"kind": "merge", "parents": [{"path": "team/tiny", "weight": 0.5}] * 2}}, "model"),
        ({"data": {"kind": "file", "path": "team/tiny"}}, "dataset"),
        ({"data": {"kind": "file", "path": "a.jsonl", "heldout_path": "team/tiny"}}, "dataset"),
        ({"data": {"kind": "mixture", "sources": [{"path": "team/tiny"}]}}, "dataset"),
        ({"preferences": {"kind": "file", "path": "team/tiny"}}, "dataset"),
        ({"scoring": {"rewards": [{"kind": "judge", "model": CHAT}]}}, "model"),
        ({"scoring": {"rewards": [{"kind": "model", "model": CHAT}]}}, "model"),
        ({"scoring": {"rewards": [{"kind": "similarity", "retriever": "team/tiny"}]}}, "model"),
        ({"algorithm": {"kind": "grpo", "distillation": {"teacher": CHAT}}}, "model"),
        ({"algorithm": {"kind": "ppo", "critic": {"path": "team/tiny"}}}, "model"),
    ],
)
def test_every_key_for_a_model_or_data_takes_a_name_of_the_hub(document, kind):
    [(key, value)] = document.items()
    settings = TypeAdapter(RunConfig.model_fields[key].rebuild_annotation()).validate_python(value)
    names = {(path.address.kind, path.address.name) for path in paths_in(settings) if isinstance(path, HubPath)}
    assert names == {(kind, "team/tiny")}


@pytest.mark.parametrize("path", ["team/pictures", "hf://datasets/team/pictures/train/metadata.jsonl"])
def test_the_images_that_a_dataset_names_are_fetched_from_the_folder_of_its_data_file(path, hub):
    names = ("red.png", "deep/blue.png")
    rows = "".join(json.dumps({"file_name": name, "prompt": f"{name}?", "answer": "1"}) + "\n" for name in names)
    pictures = {f"train/{name}": picture(name.split("/")[-1].removesuffix(".png")) for name in names}
    hub.add("team/pictures", {"train/metadata.jsonl": rows.encode(), **pictures}, kind="dataset")
    data = job(JOB | {"data": {"kind": "file", "path": path, "images_column": "file_name"}}).data
    assert [each.images for each in read_problems(data.path, data)] == [(each,) for each in pictures.values()]
    missing = rows.replace("red.png", "gone.png")
    hub.add("team/other", {"train/metadata.jsonl": missing.encode(), **pictures}, kind="dataset")
    data = job(JOB | {"data": {"kind": "file", "path": "team/other", "images_column": "file_name"}}).data
    with pytest.raises(BadInput, match=r"metadata.jsonl:1.*gone.png"):
        read_problems(data.path, data)
