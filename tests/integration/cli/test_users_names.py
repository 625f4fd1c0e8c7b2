"""User modules in the working directory with the names of Rheostat's packages: both the user's and ours are found."""

import os
import subprocess
from pathlib import Path

import pytest

from rheostat.infra.plugins import TARGETS
from rheostat.models.config.reward_terms import TargetReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.rewards.evaluate import Case, Evaluator, Verdict
from tests.support.jobs import RHEOSTAT, TINY

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
