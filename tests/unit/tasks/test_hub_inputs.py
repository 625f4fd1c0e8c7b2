"""Jobs with names of the Hugging Face Hub: the commits that a run records and keeps, and the keys that take a name."""

import asyncio
import json
import tomllib
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

import rheostat.infra.store.hub
from rheostat.flows.cli.train import _build_evaluation_config
from rheostat.infra.errors import BadInput, RunChanged
from rheostat.infra.store.dependencies import dependency_records, record_dependencies, recorded_commits, recorded_config
from rheostat.infra.store.hub import cache_folder, resolve_commit
from rheostat.infra.store.hub_names import HubAddress
from rheostat.infra.store.inputs import HubPath, fetch_path, paths_in, place_texts, recorded_base
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run, open_run
from rheostat.models.config.data import FileData
from rheostat.models.config.proposals import ProposalRequest
from rheostat.models.config.retriever import RetrieverConfig
from rheostat.models.data.files import file_problems, read_problems
from rheostat.models.data.preferences import load_preferences
from rheostat.models.data.problems import load_problems
from rheostat.models.data.training_chats import load_chats
from rheostat.models.inspection.directory import inspect_import
from rheostat.models.inspection.other_models import check_teacher
from rheostat.models.modeling.critic import classifier_from_policy, write_critic
from rheostat.models.modeling.initial import write_judge, write_reward_model
from rheostat.models.modeling.initial import write_policy as write_initial_policy
from rheostat.models.modeling.policy import save_policy
from rheostat.models.proposals.job import propose_job
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.tasks.config.documents import toml_value
from rheostat.tasks.config.run import RunConfig, parse_config
from rheostat.tasks.retriever import lock_retriever, with_recorded_defaults
from rheostat.tasks.run.dependencies import dependencies_of
from rheostat.tasks.run.hub_inputs import describe_hub_inputs, fetch_hub_inputs, with_base_commits, with_hub_commits
from rheostat.tasks.soup.merging import weighted_parents
from tests.support.demos import ARITHMETIC
from tests.support.pictures import picture
from tests.support.policies import write_policy

POLICY = {"kind": "directory", "path": "team/tiny"}
DATA = {"kind": "file", "path": "team/sums", "split": "train", "heldout_split": "test"}
JOB = {"name": "r", "policy": POLICY, "data": DATA}


def resolve_again():
    """Forget the commits that this process has resolved, as a new process would."""
    rheostat.infra.store.hub._query_commit.cache_clear()


PAIRS = [{"prompt": f"number {each}?", "chosen": str(each), "rejected": "none"} for each in range(40)]
CHATS = [
    {"messages": [{"role": "user", "content": f"number {each}?"}, {"role": "assistant", "content": str(each)}]}
    for each in range(40)
]


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
    return parse_config({"data": ARITHMETIC} | place_texts(document, folder), source="job", recorded=recorded)


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


def write_adapter(directory, base, **others):
    """Write an adapter of rank 1 to the query projection of the first layer of a policy's directory."""
    directory.mkdir()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], **others}
    (directory / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "team/tiny"}))
    layer = "model.layers.0.self_attn.q_proj"
    out, width = load_file(base / "model.safetensors")[f"{layer}.weight"].shape
    pair = {"lora_A": torch.ones(1, width), "lora_B": torch.ones(out, 1)}
    tensors = {f"base_model.model.{layer}.{name}.weight": tensor for name, tensor in pair.items()}
    save_file(tensors, directory / "adapter_model.safetensors")


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
    write_adapter(tmp_path / "adapter", tmp_path / "policy")
    repositories.add("team/adapter", tmp_path / "adapter")
    policy, copy = with_hub_commits(job({"policy": {**POLICY, "path": "team/adapter"}})).policy, tmp_path / "copy"
    copy.mkdir()
    fetch_hub_inputs(policy)
    assert write_initial_policy(policy, copy, texts=[], seed=0) > 0 and (copy / "model.safetensors").is_file()
    assert set(describe_hub_inputs(policy)) == {"model team/adapter", "base model team/tiny"}


@pytest.mark.parametrize("is_on_hub", [True, False])
def test_the_commit_of_the_base_of_an_adapter_is_recorded_once(repositories, tmp_path, is_on_hub):
    write_adapter(tmp_path / "adapter", tmp_path / "policy")
    first = resolve_commit(HubAddress("model", "team/tiny"))
    repositories.add("team/adapter", tmp_path / "adapter")
    path = "team/adapter" if is_on_hub else str(tmp_path / "adapter")
    run = begin(tmp_path, {"name": "r", "policy": {**POLICY, "path": path}, "data": DATA})
    assert dependency_records(run)[-1].dependencies.hub["base model team/tiny"] == first
    repositories.add("team/tiny", {"config.json": b"{}"})
    config = with_hub_commits(job({"name": "r", "policy": {**POLICY, "path": path}, "data": DATA}), run)
    assert dependencies_of(config, run).hub == dependency_records(run)[-1].dependencies.hub


def test_an_adapter_that_names_a_revision_of_its_base_keeps_the_revision(repositories, tmp_path):
    first = resolve_commit(HubAddress("model", "team/tiny"))
    write_adapter(tmp_path / "adapter", tmp_path / "policy")
    write_adapter(tmp_path / "fixed", tmp_path / "policy", revision=first)
    repositories.add("team/tiny", {**repositories.repositories["models", "team/tiny"].commits[0], "a.txt": b""})
    resolve_again()
    parents = [{"path": str(tmp_path / name), "weight": 0.5} for name in ("adapter", "fixed")]
    policy = with_hub_commits(job({"policy": {"kind": "merge", "parents": parents}})).policy
    assert [recorded_base(parent.path) == f"team/tiny@{first}" for parent in policy.parents] == [False, True]


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("where", ["hub", "local"])
@pytest.mark.parametrize("role", ["policy", "judge"])
def test_the_base_of_an_adapter_is_read_at_the_recorded_commit_after_its_branch_moved(
    repositories, tmp_path, monkeypatch, where, role, as_json
):
    write_adapter(tmp_path / "adapter", tmp_path / "policy")
    repositories.add("team/adapter", tmp_path / "adapter")
    adapter = {**POLICY, "path": "team/adapter" if where == "hub" else str(tmp_path / "adapter")}
    document = {**JOB, "policy": adapter}
    if role == "judge":
        document = {**JOB, "scoring": {"rewards": [{"kind": "judge", "model": adapter}]}}

    def write(config, name):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        repositories.requests.clear()
        if as_json:  # as the process that checks the inputs gets the configuration
            config = type(config).model_validate_json(config.model_dump_json())
        if role == "policy":
            write_initial_policy(config.policy, tmp_path / name, texts=[], seed=0)
        else:
            load_judge(config, tmp_path / name)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        assert not repositories.requests
        return (tmp_path / name / "model.safetensors").read_bytes()

    run = begin(tmp_path, document)
    config = with_hub_commits(job(document), run)
    fetch_hub_inputs(config)
    before = write(config, "before")
    (tmp_path / "other").mkdir()
    write_policy(tmp_path / "other", seed=1)
    moved = repositories.add("team/tiny", tmp_path / "other")
    downloaded = snapshot_download("team/tiny", endpoint=repositories.url, cache_dir=cache_folder())
    assert Path(downloaded).name == moved
    resolve_again()
    assert write(with_hub_commits(job(document), run), "after") == before
    recorded = job(recorded_config(run), recorded=True)
    assert write(with_base_commits(recorded, recorded_commits(run), resolves=False), "controller") == before


def test_a_run_without_results_records_the_commits_of_its_last_start(repositories, tmp_path):
    run = create_run(str(tmp_path / "store"), "r", job().identity())
    starts = []
    for shift in (0, 10):
        starts.append(repositories.add("team/sums", sums(shift=shift), kind="dataset"))
        resolve_again()
        with run.lock():
            record_dependencies(run, dependencies_of(with_hub_commits(job(), run), run), iteration=1)
    assert starts[0] != starts[1] == recorded_commits(run)["dataset team/sums"]


def test_a_retriever_keeps_the_commits_of_its_pairs(repositories, tmp_path):
    pairs = [{"query": f"number {each}?", "passage": f"the number {each}"} for each in range(40)]
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs).encode()
    first = repositories.add("team/pairs", {"train.jsonl": lines}, kind="dataset")
    config = RetrieverConfig(store=str(tmp_path / "store"), pairs={"kind": "file", "path": "team/pairs"})

    async def start():
        async with lock_retriever(with_recorded_defaults(config)) as opened:
            opened.run.commit(Manifest(key="pairs"))

    asyncio.run(start())
    repositories.add("team/pairs", {"train.jsonl": b""}, kind="dataset")
    resolve_again()
    assert with_recorded_defaults(config).pairs.path.address.revision == first


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


# ---- other models and data
CHAT = {"kind": "directory", "path": "team/tiny"}
SCORER = {"kind": "directory", "path": "team/scorer"}


def load_judge(config, folder):
    [reward] = config.scoring.hosted_rewards.values()
    return write_judge(reward, reward.model, folder, problems=[], seed=0)


def load_scorer(config, folder):
    [reward] = config.scoring.hosted_rewards.values()
    return write_reward_model(reward, reward.model, folder, problems=[], seed=0)


def load_teacher(config, folder):
    tokenizer = load_tokenizer(fetch_path(config.policy.path))
    return check_teacher(config.algorithm.distillation.teacher, tokenizer, longest_tokens=8)


def load_critic(config, folder):
    return write_critic(fetch_path(config.algorithm.critic.path), fetch_path(config.policy.path), folder)


def load_pairs(config, folder):
    return load_preferences(config.preferences, config.data, split="train", seed=0)


def load_mixture(config, folder):
    return load_problems(config.data, "train", 0)


def load_warmup(config, folder):
    return load_chats(config.warmup.chats)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("document", "name", "files", "load"),
    [
        ({"scoring": {"rewards": [{"kind": "judge", "model": CHAT}]}}, "model team/tiny", "model", load_judge),
        ({"scoring": {"rewards": [{"kind": "model", "model": SCORER}]}}, "model team/scorer", "model", load_scorer),
        ({"algorithm": {"kind": "grpo", "distillation": {"teacher": CHAT}}}, "model team/tiny", "model", load_teacher),
        ({"algorithm": {"kind": "ppo", "critic": {"path": "team/scorer"}}}, "model team/scorer", "model", load_critic),
        (
            {"dpo": {}, "preferences": {"kind": "file", "path": "team/pairs"}},
            "dataset team/pairs",
            "train",
            load_pairs,
        ),
        (
            {"data": {"kind": "mixture", "sources": [{"path": "team/sums", "split": "train"}]}},
            "dataset team/sums",
            "train",
            load_mixture,
        ),
        ({"warmup": {"chats": {"path": "team/chats"}}}, "dataset team/chats", "train", load_warmup),
    ],
    ids=["judge", "reward model", "teacher", "critic", "preferences", "mixture", "chats"],
)
def test_another_input_of_the_hub_is_fetched_recorded_and_loaded_offline(
    repositories, tmp_path, monkeypatch, document, name, files, load
):
    scorer, copy = tmp_path / "scorer", tmp_path / "copy"
    for folder in (scorer, copy):
        folder.mkdir()
    save_policy(classifier_from_policy(tmp_path / "policy"), load_tokenizer(tmp_path / "policy"), scorer)
    repositories.add("team/scorer", scorer)
    for repository, lines in (("team/pairs", PAIRS), ("team/chats", CHATS)):
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        repositories.add(repository, {"train.jsonl": content}, kind="dataset")
    kind, _, repository = name.partition(" ")
    config = with_hub_commits(job({**JOB, **document}))
    fetch_hub_inputs(config)
    assert any(file.split("/")[-1].startswith(files) for file in repositories.downloads())
    assert recorded_commits(begin(tmp_path, {**JOB, **document}))[name] == resolve_commit(HubAddress(kind, repository))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repositories.requests.clear()
    assert load(type(config).model_validate_json(config.model_dump_json()), copy) and not repositories.requests


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
        ({"warmup": {"chats": {"path": "team/tiny"}}}, "dataset"),
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


# ---- commands
def test_evaluate_takes_the_name_of_a_model_of_the_hub(hub, tmp_path):
    (tmp_path / "job.toml").write_text(f'name = "r"\ndata = {toml_value(ARITHMETIC)}\n')
    config = _build_evaluation_config("team/tiny@v1", tmp_path / "job.toml", [])
    assert config.policy.path.address == HubAddress("model", "team/tiny", "v1")


def test_merge_takes_names_of_models_of_the_hub_and_records_their_commits(repositories, tmp_path):
    commit = resolve_commit(HubAddress("model", "team/tiny"))
    own, other = weighted_parents(str(tmp_path), ["team/tiny=0.5", f"{tmp_path / 'policy'}=0.5"])
    assert own.name == f"team/tiny@{commit}" and own.path.name == commit and other.path == tmp_path / "policy"
    assert (own.path / "model.safetensors").is_file()


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
