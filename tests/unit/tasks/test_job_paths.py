"""Relative paths in job files and overrides: where they start, and that a moved job continues its run."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from rheostat.infra.errors import DeprecatedSpelling, RunChanged
from rheostat.infra.store.dependencies import record_dependencies, recorded_config
from rheostat.infra.store.garbage import depends_on
from rheostat.infra.store.inputs import PathNames
from rheostat.infra.store.runs import Run, create_run
from rheostat.infra.validation_errors import field_models
from rheostat.models.config.retriever import PairFile, RetrieverConfig
from rheostat.models.config.users import DirectoryUser
from rheostat.tasks.config.documents import toml_value
from rheostat.tasks.config.run import RunConfig, load_config, parse_config, validate_again
from rheostat.tasks.run.dependencies import dependencies_of, find_matching_run
from tests.support.demos import ARITHMETIC

JOB = """
name = "job"
store = "runs"
extends = "../shared/base.toml"
data = {kind = "mixture", sources = [{path = "train.jsonl"}, {path = "../data/more.jsonl"}, {path = "/else/where"}]}
scoring.rewards = [{kind = "numeric"}, {kind = "clip", path = "clip"}]
scoring.python = "venv/bin/python"
"""
BASE = 'policy = {kind = "directory", path = "model"}'


@pytest.fixture
def job(tmp_path, monkeypatch) -> Path:
    """Job in its folder, next to the files that it names. The working directory is another one."""
    home = tmp_path / "project"
    files = {
        "jobs/job.toml": JOB,
        "jobs/train.jsonl": "{}",
        "data/more.jsonl": "{}",
        "shared/base.toml": BASE,
        "jobs/clip/config.json": '{"model_type": "clip"}',
    }
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return home / "jobs/job.toml"


def record(run: Run, config: RunConfig) -> None:
    """Record the dependencies of a run as its start or resumption does."""
    with run.lock():
        record_dependencies(run, dependencies_of(config, run), iteration=1, folder=PathNames(config).folder)


def test_relative_paths_start_in_the_folder_of_the_file_that_has_them(job, tmp_path):
    config = load_config(job)
    home = tmp_path / "project"
    assert [source.path.resolve() for source in config.data.sources] == [
        home / "jobs/train.jsonl",
        home / "data/more.jsonl",
        Path("/else/where"),
    ]
    assert config.policy.path.resolve() == home / "shared/model"
    assert config.scoring.rewards[1].path == home / "jobs/clip"
    assert config.scoring.python == home / "jobs/venv/bin/python"
    assert config.store == "runs", "runs are kept where the user works, as --store says too"
    assert load_config(job, ["scoring.python=python3.11"]).scoring.python == Path("python3.11")


def test_relative_paths_in_overrides_start_in_the_working_directory(job, tmp_path):
    config = load_config(job, ['policy={kind="directory", path="mine"}', "scoring.python=bin/python"])
    assert config.policy.path == tmp_path / "cwd/mine"
    assert config.scoring.python == tmp_path / "cwd/bin/python"
    assert config.identity()["policy"] == {"kind": "directory", "path": "../../cwd/mine"}


def test_relative_paths_in_documents_without_a_file_stay_relative():
    config = parse_config(
        {"data": ARITHMETIC, "policy": {"kind": "directory", "path": "mine"}}, source="parameters of a flow"
    )
    assert config.policy.path == Path("mine")


def test_options_of_a_user_class_can_have_paths_too(tmp_path, monkeypatch):
    (tmp_path / "own_source.py").write_text(
        "from rheostat.infra.store.inputs import Location\n"
        "from rheostat.models.config.data import DataSource\n"
        "class Mine(DataSource):\n    implementation = 'own_source:f'\n    where: Location\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "job.toml").write_text('data = {kind="target", target="own_source:Mine", options={where="x"}}')
    config = load_config(tmp_path / "job.toml")
    assert config.data.where == tmp_path / "x"
    assert config.identity()["data"]["options"]["where"] == "x"


def test_a_path_that_exists_only_in_the_working_directory_is_used_with_a_warning_that_names_the_right_path(job):
    job.with_name("train.jsonl").rename("train.jsonl")
    with pytest.warns(DeprecatedSpelling) as warned:
        config = load_config(job)
    assert config.data.sources[0].path == Path.cwd() / "train.jsonl"
    assert config.identity()["data"]["sources"][0]["path"] == "../../cwd/train.jsonl"
    assert [str(each.message) for each in warned] == [
        "'train.jsonl' exists only in the working directory. Relative paths in a job file start in the folder of the "
        f"file, {job.parent}. Write '../../cwd/train.jsonl', because a later version will not read the other path."
    ]


def test_a_job_that_is_moved_with_its_files_continues_its_run(job, tmp_path, monkeypatch):
    first = load_config(job)
    run = create_run(str(tmp_path / "runs"), "job", first.identity())
    record(run, first)
    moved = shutil.move(tmp_path / "project", tmp_path / "elsewhere")
    config = load_config(Path(moved) / "jobs/job.toml", [f"store={tmp_path / 'runs'}"])
    monkeypatch.chdir("/")
    assert find_matching_run(config) is not None
    record(run, config)
    assert RunConfig.model_validate(recorded_config(run) | {"name": "job"}).identity() == config.identity()
    assert recorded_config(run)["policy"]["path"].folder == Path(moved) / "jobs"
    (Path(moved) / "data/more.jsonl").write_text("other")
    (tmp_path / "runs/job/policies").mkdir()  # a run without results would take the change
    with pytest.raises(RunChanged, match=r"data file \.\./data/more\.jsonl has changed"):
        find_matching_run(config)
    (Path(moved) / "data/more.jsonl").write_text("{}")
    (Path(moved) / "jobs/clip/config.json").write_text('{"model_type": "clip", "x": 1}')
    with pytest.raises(RunChanged, match=r"data file clip/config\.json has changed"):
        find_matching_run(config)
    (Path(moved) / "jobs/clip/config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(RunChanged, match=r"policy\.path was"):
        find_matching_run(
            load_config(Path(moved) / "jobs/job.toml", [f"store={tmp_path / 'runs'}", "policy.path=/other"])
        )


def test_a_run_whose_record_has_paths_of_the_working_directory_or_absolute_ones_continues(job, tmp_path, monkeypatch):
    config = load_config(job, [f"store={tmp_path / 'runs'}"])
    monkeypatch.chdir(tmp_path / "project")
    old = config.identity()
    old["data"]["sources"][0]["path"] = "jobs/train.jsonl"
    old["data"]["sources"][1]["path"] = str(tmp_path / "project/data/more.jsonl")
    create_run(str(tmp_path / "runs"), "job", old)
    assert find_matching_run(config) is not None


def test_a_run_is_kept_for_another_whose_job_names_its_policy_by_a_relative_path(job, tmp_path):
    store = str(tmp_path / "project/runs")
    first = create_run(store, "first", {})
    job.write_text(
        f'data = {toml_value(ARITHMETIC)}\npolicy = {{kind = "directory", path = "../runs/first/policies/1"}}'
    )
    second = create_run(store, "second", load_config(job).identity())
    record(second, load_config(job))
    assert depends_on(second, first) and not depends_on(first, second)


def test_parts_that_are_replaced_later_do_not_change_the_other_paths(job):
    config = load_config(job)
    again = validate_again(config.model_copy(update={"seed": 1}), source="again")
    assert again.identity() == config.model_copy(update={"seed": 1}).identity()
    assert again.policy.path == config.policy.path
    assert json.loads(again.model_dump_json())["policy"]["path"] == str(config.policy.path), "workers read it so"


VALIDATORS = re.compile(r"(Before|Wrap)Validator")


def bare_paths(model: type[BaseModel], known: set[type[BaseModel]]) -> Iterator[str]:
    """Name the fields whose relative paths do not start in the folder of the job file."""
    known.add(model)
    for name, field in model.model_fields.items():
        if "pathlib" in str(field.annotation) and not VALIDATORS.search(f"{field.annotation} {field.metadata}"):
            yield f"{model.__name__}.{name}"
        for inner in {*field_models(field)} - known:
            yield from bare_paths(inner, known)


@pytest.mark.parametrize("root", [RunConfig, RetrieverConfig])
def test_every_path_of_a_configuration_starts_in_the_folder_of_its_file(root):
    known: set[type[BaseModel]] = set()
    assert [*bare_paths(root, known)] == []
    assert {RunConfig: DirectoryUser, RetrieverConfig: PairFile}[root] in known
