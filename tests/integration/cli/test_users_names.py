"""User modules with the names of Rheostat's packages and of libraries: both the user's and ours are found."""

import os
import subprocess
from pathlib import Path

import pytest

from rheostat.infra.demos import EXAMPLES
from rheostat.infra.plugins import TARGETS
from rheostat.models.config.reward_terms import TargetReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.rewards.evaluate import Case, Evaluator, Verdict
from tests.support.jobs import RHEOSTAT, ROOT, TINY
from tests.support.wheels import build_wheel, install_wheel

NAMES = ("models", "tasks", "flows", "infra", "placement", "json", "torch", "numpy", "prefect", "ray")
REWARD = "def shared(prompt, completion, answer): return float(len(completion) % 2)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Working directory with a user module and reward for each package name of ours, and a job that uses some."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(REWARD)
    terms = ", ".join(f'{{kind = "target", name = "{name}", target = "{name}:shared"}}' for name in ("models", "json"))
    ours = '{kind = "target", name = "steps", target = "models.rewards.arithmetic_steps:wrong_steps", per = "step"}'
    lines = [f"rewards = [{terms}, {ours}]" if line.startswith("rewards") else line for line in TINY.splitlines()]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    (tmp_path / "arithmetic.py").write_bytes((EXAMPLES / "arithmetic.py").read_bytes())
    return tmp_path


def command(folder: Path, *arguments: str, api: str | None = None) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", TARGETS)}
    environment = kept | {"PREFECT_HOME": str(folder / "prefect")} | ({"PREFECT_API_URL": api} if api else {})
    return subprocess.run([RHEOSTAT, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_rewards_in_user_modules_named_like_rheostats_packages_are_found(folder: Path, monkeypatch):
    monkeypatch.chdir(folder)
    rewards = tuple(TargetReward(name=name, target=f"{name}:shared") for name in NAMES)
    evaluator = Evaluator(ScoringConfig(rewards=rewards))
    try:
        assert evaluator.evaluate([Case("", "odd", "")]) == [Verdict((1.0,) * len(NAMES), None)]
    finally:
        evaluator.close()


@pytest.mark.smoke
@pytest.mark.system
def test_a_job_is_checked_next_to_user_modules_named_like_rheostats_packages(folder: Path):
    done = command(folder, "train", "job.toml", "--dry-run")
    assert done.returncode == 0, done.stderr
    misspelt = command(
        folder, "train", "job.toml", "--dry-run", "scoring.rewards=[{kind='target',target='models:shard'}]"
    )
    assert misspelt.returncode == 2
    assert "did you mean 'shared'?" in misspelt.stderr


@pytest.mark.system
def test_the_documented_installation_trains_next_to_user_modules_named_like_rheostats_packages(folder: Path):
    done = command(folder, "train", "job.toml", "iterations=1")
    assert done.returncode == 0, done.stderr
    assert command(folder, "verify", "tiny").returncode == 0
    assert command(folder, "export-policy", "tiny", "--to", "exported").returncode == 0


SCRIPT = """
from pathlib import Path
from rheostat import RunConfig, load_config, train
import flows, models.mine, tasks
config = load_config(Path("job/job.toml"), ["scoring.rewards=[{kind='target',target='tasks:mine'}]"])
print(config.scoring.rules[0].function.target)
print(tasks.__file__, models.mine.__file__, flows.__file__)
print(train.name, RunConfig.__module__)
"""


@pytest.mark.system
def test_a_wheel_works_next_to_a_project_that_has_models_tasks_and_flows(tmp_path):
    programs = install_wheel(build_wheel(ROOT, tmp_path), tmp_path / "venv")
    project = tmp_path / "project"
    for name in ("models/__init__.py", "models/mine.py", "flows/__init__.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("")
    (project / "tasks.py").write_text("def mine(prompt, completion, answer): return 1.0\n")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PREFECT_HOME": str(tmp_path / "prefect")}

    def run(program: str, *words: str) -> str:
        command = [programs / program, *words]
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("rheostat", "init", "job")
    rewards = "scoring.rewards=[{kind='target',target='tasks:mine'}]"
    run("rheostat", "plan", "job/job.toml", rewards)
    run("rheostat", "train", "job/job.toml", "--dry-run", rewards)
    target, modules, ours = run("python", "-c", SCRIPT).splitlines()[-3:]
    assert (target, ours) == ("tasks:mine", "train rheostat.tasks.config.run")
    assert modules.split() == [str(project / name) for name in ("tasks.py", "models/mine.py", "flows/__init__.py")]
