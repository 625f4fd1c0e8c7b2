"""Demonstrations: former names of their parts are still read and recorded, and a copy is code of the user."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

from rheostat.flows.cli.app import main
from rheostat.infra.demos import (
    DEMOS,
    EXAMPLES,
    FORMER_DATA_KINDS,
    FORMER_POLICY_KINDS,
    FORMER_TARGETS,
    demo_files,
    demo_names,
    find_example,
    is_in_demo,
)
from rheostat.infra.errors import BadInput, DeprecatedSpelling
from rheostat.infra.plugins import TARGETS, find_target
from rheostat.models.data.problems import load_problems
from rheostat.tasks.config.documents import toml_value
from rheostat.tasks.config.run import RunConfig, load_config, parse_config
from rheostat.tasks.run.dependencies import dependencies_of
from tests.support.demos import ARITHMETIC, demo_job, load_demo
from tests.support.jobs import ROOT, SEARCH_PATH

SMALL = {"train_problems": 8, "heldout_problems": 2}
OPTIONS = dict.fromkeys(("arithmetic", "calculations", "measures", "pictures"), SMALL)
each_kind = pytest.mark.parametrize("kind", FORMER_DATA_KINDS)


def run_alone(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run Python code in another process, which knows no folder with modules of demonstrations."""
    kept = {name: value for name, value in os.environ.items() if name != TARGETS}
    environment = kept | {"PYTHONPATH": SEARCH_PATH}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


def read(document: dict[str, object], folder: Path) -> tuple[RunConfig, list[str]]:
    """Load a job file with these tables; return the configuration and the deprecation warnings."""
    path = folder / "job.toml"
    tables = {"data": ARITHMETIC, **document}
    path.write_text("\n".join(f"{name} = {toml_value(value)}" for name, value in tables.items()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config(path)
    return config, [str(each.message) for each in caught if issubclass(each.category, DeprecatedSpelling)]


def job_with(data: dict[str, object]) -> dict[str, object]:
    return {"evaluation": {"problems": 2}, "data": data}


@each_kind
def test_a_former_kind_gives_the_same_run_as_the_demonstration_and_one_warning(kind, tmp_path):
    target, demo = FORMER_DATA_KINDS[kind].rpartition("/")[2], find_example(FORMER_DATA_KINDS[kind])
    options = OPTIONS.get(kind, {})
    old, warned = read(job_with({"kind": kind, **options}), tmp_path)
    new, silent = read(job_with({"kind": "target", "target": target, "options": options}), tmp_path)
    assert (old, old.identity()) == (new, new.identity())
    assert {"kind": kind, **options}.items() <= old.identity()["data"].items(), "runs record the former kind"
    module = target.partition(":")[0]
    assert silent == []
    assert warned == [
        f"{tmp_path}/job.toml: data.kind = {kind!r} is deprecated. Write kind = 'target' and target = {target!r}, "
        f"with {module}.py from `rheostat init DIR --example {demo}`."
    ]


@pytest.mark.thorough_after(1)
@each_kind
def test_a_former_kind_is_read_from_stored_runs_messages_and_parameters_of_deployments(kind, tmp_path):
    config, _ = read(job_with({"kind": kind, **OPTIONS.get(kind, {})}), tmp_path)
    assert parse_config(config.identity(), source="run", recorded=True).identity() == config.identity()
    assert RunConfig.model_validate_json(config.model_dump_json()) == config

    def flow(config: RunConfig) -> None: ...

    schema = parameter_schema(flow).model_dump_for_openapi()
    assert validate({"config": config.model_dump(mode="json")}, schema) == []


IMAGES = {
    "rollout": {"denoising": {"steps": 6}, "engine": {"kind": "diffusers"}},
    "scoring": {"rewards": [{"kind": "target", "target": "painting:painting"}]},
}
"""Settings that a text-to-image policy needs."""


@pytest.mark.parametrize("kind", FORMER_POLICY_KINDS)
def test_a_former_kind_of_policy_gives_the_same_run_as_the_demonstration_and_one_warning(kind, tmp_path):
    demo, _, target = FORMER_POLICY_KINDS[kind].partition("/")
    options = {"layers": 2} if demo == "paint" else {"decoder": {"context": 160}}
    rest = IMAGES if demo == "paint" else {}
    old, [warned] = read({"policy": {"kind": kind, **options}, **rest}, tmp_path)
    new, silent = read({"policy": {"kind": "target", "target": target, "options": options}, **rest}, tmp_path)
    assert (old, old.identity(), silent) == (new, new.identity(), [])
    recorded = old.identity()["policy"]["kind"]
    assert recorded == kind or (recorded, kind) == ("seeing_scratch", "scratch_vision")
    assert warned == (
        f"{tmp_path}/job.toml: policy.kind = {kind!r} is deprecated. Write kind = 'target' and target = {target!r}, "
        f"with {target.partition(':')[0]}.py from `rheostat init DIR --example {demo}`."
    )
    assert parse_config(old.identity(), source="run", recorded=True).identity() == old.identity()
    assert RunConfig.model_validate_json(old.model_dump_json()) == old
    assert not any(dependencies_of(old).code.values()), "the version of Rheostat covers the code"


def test_a_former_kind_is_the_shape_of_a_judge_unless_it_generates_images(tmp_path):
    judge = {"kind": "judge", "model": {"kind": "trained", "shape": {"kind": "scratch_vision"}}}
    config, [warned] = read({"scoring": {"rewards": [judge]}}, tmp_path)
    assert "scoring.rewards.model.shape.kind = 'scratch_vision'" in warned
    assert config.identity()["scoring"]["rewards"][0]["model"]["shape"]["kind"] == "seeing_scratch"
    assert parse_config(config.identity(), source="run", recorded=True).identity() == config.identity()
    judge["model"]["shape"]["kind"] = "scratch_diffusion"
    with pytest.raises(BadInput, match=r"a judge outputs text, but .*ScratchDiffusionPolicy' generate images"):
        read({"scoring": {"rewards": [judge]}}, tmp_path)


@pytest.mark.thorough
def test_a_process_that_knows_no_folder_reads_a_former_kind():
    code = (
        "from rheostat.tasks.config.run import override_config\n"
        "from rheostat.models.data.problems import load_problems\n"
        "config = override_config({}, ['data.kind=measures', 'data.train_problems=4'], source='job')\n"
        "print(len(load_problems(config.data, 'train', 0)))"
    )
    done = run_alone(code, ROOT)
    assert done.stdout == "4\n", done.stderr


@pytest.mark.parametrize("former", FORMER_TARGETS)
def test_a_former_import_string_still_names_its_part(former):
    name = FORMER_TARGETS[former].rpartition(":")[2]
    assert getattr(find_target(former, where="test"), "__name__", None) == name


def test_a_run_records_the_former_import_string_of_a_data_source_and_of_a_reward(tmp_path):
    reward = {"kind": "target", "name": "brief", "target": "models.rewards.list_length:near"}
    data = {"kind": "target", "target": "models.data.lists:ListData"}
    config, warned = read({**job_with(data), "scoring": {"rewards": [reward]}}, tmp_path)
    assert len(warned) == 2 and "scoring.rewards.target = 'models.rewards.list_length:near'" in warned[1]
    assert config.identity()["data"]["target"] == "models.data.lists:ListData"
    [rule] = config.scoring.rules
    assert (rule.target, rule.function.target) == ("models.rewards.list_length:near", "list_length:near")


def test_a_former_kind_of_reward_gives_the_same_run_and_one_warning(tmp_path):
    rewards = {"rewards": [{"kind": "regex", "pattern": "a"}, {"kind": "painting", "weight": 2}]}
    config, [warned] = read({"data": ARITHMETIC, "scoring": rewards}, tmp_path)
    assert warned == (
        f"{tmp_path}/job.toml: scoring.rewards.kind = 'painting' is deprecated. Write kind = 'target' and target = "
        "'painting:painting', with painting.py from `rheostat init DIR --example paint`."
    )
    recorded = config.identity()["scoring"]["rewards"][1]
    assert recorded == {"kind": "painting", "name": None, "weight": 2}
    assert parse_config(config.identity(), source="run", recorded=True).identity() == config.identity()
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    assert config.scoring.terms == ("regex", "painting") and config.scoring.checking_targets.keys() == {"painting"}


def test_the_version_of_rheostat_covers_the_code_of_an_installed_demonstration():
    assert not any(dependencies_of(load_demo("soup")).code.values())


def test_a_copy_of_a_demonstration_is_code_of_the_user(tmp_path, monkeypatch):
    code = (
        "from pathlib import Path\nfrom rheostat.infra.plugins import register_target_folder\n"
        "from rheostat.tasks.config.run import load_config\n"
        "from rheostat.tasks.run.dependencies import dependencies_of\n"
        "register_target_folder(Path('copy'))\nconfig = load_config(Path('copy/job.toml'))\n"
        "print(config.identity()['data']['target'], *dependencies_of(config).code['data measures:MeasuresData'])"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["init", "copy", "--example", "dialogue"]) == 0
    done = run_alone(code, tmp_path)
    assert done.stdout == "measures:MeasuresData measures\n", done.stderr


@pytest.mark.thorough
def test_a_module_of_the_user_that_hides_a_demonstration_is_named(tmp_path):
    shutil.copy(DEMOS / "dialogue/measures.py", tmp_path)
    code = (
        "from rheostat.tasks.config.run import override_config\n"
        "override_config({}, ['data.kind=measures'], source='job')"
    )
    done = run_alone(code, tmp_path)
    assert f"another module has the same name: {tmp_path}/measures.py. Rename that module" in done.stderr


@pytest.mark.parametrize("name", demo_names())
def test_a_demonstration_is_a_job_code_and_a_short_description(name):
    folder = demo_job(name).parent
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {".toml", ".py", ".md"}
    lines = (folder / "README.md").read_text().splitlines()
    assert len(lines) <= 20 and f"`rheostat init DIR --example {name}`" in lines[-1]
    assert all(f"`{path.name}`" in "\n".join(lines) for path in folder.glob("*.py"))
    assert f"`configs/demos/{name}/job.toml`" in (ROOT / "docs/examples.md").read_text()


def test_init_copies_a_demonstration_once_and_lists_all_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine", "--example", "soup"]) == 0
    assert "rheostat soup mine/job.toml" in capsys.readouterr().out
    copied = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in (DEMOS / "soup").iterdir() if path.is_file()}
    assert main(["init", "mine", "--example", "soup"]) == 2
    assert "already contains" in capsys.readouterr().err
    assert main(["init", "other", "--example", "soop"]) == 2
    assert f"no example 'soop'. Choose one of {', '.join(demo_names())}." in capsys.readouterr().err
    assert main(["init", "other", "--example", "soup", "--deployments"]) == 2
    assert "--deployments cannot be combined with --example" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_copied_demonstration_contains_the_shared_module_that_its_job_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "copy", "--example", "capo"]) == 0
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {path.name for path in demo_files("capo")}
    code = (
        "from rheostat.flows.cli.app import main\n"
        "from rheostat.tasks.config.run import load_config\n"
        "from pathlib import Path\n"
        "assert main(['plan', 'copy/job.toml']) == 0\n"
        "print(load_config(Path('copy/job.toml')).identity()['data']['target'])"
    )
    done = run_alone(code, tmp_path)
    assert done.stdout.endswith("\narithmetic:ArithmeticData\n"), done.stderr


@pytest.mark.parametrize(("own", "folders"), [(False, f"{EXAMPLES}\n"), (True, "None\n")])
def test_the_shared_module_is_found_from_everywhere_unless_the_user_has_a_module_of_its_name(own, folders, tmp_path):
    if own:
        shutil.copy(EXAMPLES / "arithmetic.py", tmp_path)
    code = (
        "import os\nfrom rheostat.infra.plugins import TARGETS, find_target\n"
        "find_target('arithmetic:ArithmeticData', where='data')\nprint(os.environ.get(TARGETS))"
    )
    done = run_alone(code, tmp_path)
    assert done.stdout == folders, done.stderr


def test_a_users_module_next_to_the_example_jobs_is_not_part_of_a_demonstration():
    assert is_in_demo(EXAMPLES / "arithmetic.py")
    assert not is_in_demo(EXAMPLES / "my_rewards.py")


@pytest.mark.thorough
def test_problems_of_a_demonstration_do_not_exceed_its_distinct_problems(tmp_path):
    config = load_demo("tools", "data.options={train_problems=100000}")
    with pytest.raises(
        BadInput, match=r"data\.options\.train_problems is 100000, but only [\d,]+ different problems could"
    ):
        load_problems(config.data, "train", 0)
