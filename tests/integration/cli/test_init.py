"""`rheostat init`: the job that it writes trains without changes, from any directory."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.plugins import TARGETS
from tests.support.jobs import AUTH, RHEOSTAT
from tests.support.refused_folders import copy_model


@pytest.fixture
def begun(tmp_path, monkeypatch, capsys):
    """Folder with a new job, and the output of `rheostat init`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TARGETS, raising=False)
    assert main(["init", "My Job"]) == 0
    return capsys.readouterr().out


def printed(said: str) -> list[list[str]]:
    """Return the commands that `rheostat init` printed, without their explanations."""
    lines = [line.removeprefix("next").strip() for line in said.splitlines() if "rheostat train" in line]
    return [shlex.split(line.rpartition("    ")[0]) for line in lines]


@pytest.mark.smoke
@pytest.mark.system
def test_the_printed_dry_run_command_accepts_a_new_job(begun, tmp_path, capsys):
    assert sorted(path.name for path in (tmp_path / "My Job").iterdir()) == [
        "job.toml",
        "my_rewards.py",
        "problems.jsonl",
    ]
    dry, train = printed(begun)
    assert train == ["rheostat", "train", "My Job/job.toml"]
    assert main(dry[1:]) == 0
    out = capsys.readouterr().out
    assert "my-job in " in out
    assert "1,386 training, 150 held out" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["My Job"], "a dry run writes nothing"


def test_init_overwrites_no_file(begun, tmp_path, capsys):
    rewards = tmp_path / "My Job" / "my_rewards.py"
    rewards.write_text("mine")
    (tmp_path / "My Job" / "job.toml").unlink()
    assert main(["init", "My Job"]) == 2
    assert "contains problems.jsonl, my_rewards.py, so nothing was written" in capsys.readouterr().err
    assert rewards.read_text() == "mine"
    assert not (tmp_path / "My Job" / "job.toml").exists()


def test_init_adds_the_files_of_deployments_to_a_folder_with_a_job_once(begun, tmp_path, capsys):
    assert main(["init", "My Job", "--deployments"]) == 0
    assert "prefect --no-prompt deploy --all" in capsys.readouterr().out
    assert {"prefect.yaml", "automations.yaml", "configs", "job.toml"} <= {
        path.name for path in (tmp_path / "My Job").iterdir()
    }
    assert "infra/" not in (tmp_path / "My Job/automations.yaml").read_text(), "commands work in that folder"
    assert main(["init", "My Job", "--deployments"]) == 2
    assert " more, so nothing was written" in capsys.readouterr().err


@pytest.mark.smoke
@pytest.mark.system
def test_a_misspelled_reward_is_refused_before_the_run_starts(begun, tmp_path, capsys):
    job = tmp_path / "My Job" / "job.toml"
    job.write_text(job.read_text().replace("my_rewards:marked", "my_rewards:markt"))
    assert main(["train", str(job), "--dry-run"]) == 2
    assert "did you mean 'marked'?" in capsys.readouterr().err


@pytest.fixture
def labels(tmp_path, monkeypatch) -> Path:
    """Current directory with a file of labelled texts and the directory of a tiny model."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"Review number {number}.", "label": "good" if number % 2 else "bad"} for number in range(40)]
    (tmp_path / "reviews.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    copy_model("chat", tmp_path / "models" / "tiny")
    return tmp_path


@pytest.mark.system
def test_a_file_and_a_model_directory_train_within_three_commands(labels, prefect_api):
    environment = {**os.environ, "PREFECT_API_URL": prefect_api, **AUTH, "PREFECT_HOME": str(labels / "prefect")}
    options = {"cwd": labels, "env": environment, "capture_output": True, "text": True}
    started = subprocess.run([RHEOSTAT, "init", "--data", "reviews.jsonl", "--policy", "models/tiny"], **options)
    assert started.returncode == 0, started.stderr
    assert "exact_match, because 40 answers have only 2 different texts: bad, good" in started.stdout
    assert "problems " in started.stdout, "the plan is printed"
    assert "next     rheostat train job.toml" in started.stdout
    trained = subprocess.run([RHEOSTAT, "train", "job.toml", "--json"], **options)
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["iterations"] == 9


@pytest.mark.system
def test_the_job_may_be_written_to_a_new_folder(labels, capsys):
    assert main(["init", "new/job", "--data", "reviews.jsonl", "--policy", "models/tiny"]) == 0
    assert 'path = "../../reviews.jsonl"' in (labels / "new/job/job.toml").read_text()
    capsys.readouterr()
    assert main(["train", "new/job/job.toml", "--dry-run"]) == 0


@pytest.mark.system
@pytest.mark.parametrize("data", ["gone.jsonl", "reviews.jsonl"])
def test_init_writes_nothing_if_an_input_cannot_be_used(data, labels, capsys):
    assert (
        main(["init", "job", "--data", data, "--policy", "models" if data == "reviews.jsonl" else "models/tiny"]) == 2
    )
    error = capsys.readouterr().err
    assert ("config.json" if data == "reviews.jsonl" else "gone.jsonl: no such file") in error
    assert sorted(path.name for path in labels.iterdir()) == ["models", "reviews.jsonl"]


@pytest.mark.slow
def test_a_job_trains_from_any_directory_and_continues_after_its_folder_was_moved(begun, tmp_path, prefect_api):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    short = ("warmup.steps=20", "iterations=1", "rollout.prompts=4", "rollout.group_size=2", "evaluation.problems=4")
    command = [RHEOSTAT, "train", str(Path("..", "My Job", "job.toml")), *short, "--json"]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", TARGETS)}
    environment = {**kept, "PREFECT_API_URL": prefect_api, **AUTH, "PREFECT_HOME": str(tmp_path / "prefect")}
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["iterations"] == 1
    (tmp_path / "My Job").rename(tmp_path / "moved")
    command[2:] = [str(tmp_path / "moved" / "job.toml"), *short, "iterations=2", "--json"]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["iterations"] == 2, "it continues the run of the folder before"
    assert main(["export", "my-job", "--store", str(elsewhere / "runs")]) == 0
    assert main(["verify", "my-job", "--store", str(elsewhere / "runs")]) == 0
