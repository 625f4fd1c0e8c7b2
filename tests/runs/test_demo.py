"""The demo configurations as a new user runs them: accuracy rises for every seed, and not without a learning rate."""

from pathlib import Path

import pytest

from rheostat.flows.cli.app import main
from rheostat.tasks.views.runs import describe_run
from tests.support.jobs import demo, digest_of
from tests.support.openai_agents import find_openai_agents


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_heldout_accuracy_rises_by_at_least_30_points(tmp_path, seed):
    summary = demo(tmp_path, f"seed={seed}")
    assert summary["after"]["mean"] - summary["before"]["mean"] >= 0.3
    assert summary["after"]["low"] > summary["before"]["high"]
    assert Path(summary["plot"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_job_that_init_writes_improves_the_policy_without_warnings(tmp_path, seed):
    assert main(["init", str(tmp_path / "job")]) == 0
    summary = demo(tmp_path, f"seed={seed}", config=str(tmp_path / "job/job.toml"))
    assert summary["after"]["mean"] - summary["before"]["mean"] >= 0.3
    assert summary["after"]["low"] > summary["before"]["high"]
    iterations = describe_run(str(tmp_path / "runs"), "job").iterations
    sampled = [iteration.accuracy for iteration in iterations]
    assert sum(sampled[-3:]) > sum(sampled[3:6]) > sum(sampled[:3])
    assert [iteration.warnings for iteration in iterations if iteration.warnings] == []


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_policy_learns_to_call_its_calculator(tmp_path, seed):
    summary = demo(tmp_path, f"seed={seed}", config="configs/demos/tools/job.toml")
    assert summary["before"]["mean"] <= 0.1
    assert summary["after"]["mean"] >= 0.85


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_policy_learns_to_ask_its_user_first(tmp_path, seed):
    summary = demo(tmp_path, f"seed={seed}", config="configs/demos/dialogue/job.toml")
    assert summary["before"]["mean"] <= 0.1
    assert summary["after"]["mean"] >= 0.85


@pytest.mark.slow
@pytest.mark.openai_agents
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_policy_learns_to_call_a_tool_in_an_agent_of_openai_agents(tmp_path, seed):
    python = f"rollout.environment.python={find_openai_agents()}"
    summary = demo(tmp_path, f"seed={seed}", python, config="configs/demos/agent/job.toml")
    assert summary["before"]["mean"] <= 0.1
    assert summary["after"]["mean"] >= 0.85


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_with_a_learning_rate_of_zero_the_policy_does_not_improve(tmp_path):
    summary = demo(tmp_path, "update.learning_rate=0", "iterations=2", "warmup.steps=200")
    assert summary["before"]["mean"] == summary["after"]["mean"]
    assert summary["digest"] == digest_of(tmp_path / "runs/demo", "policy/initial")
