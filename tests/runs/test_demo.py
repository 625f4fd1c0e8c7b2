"""The demo as a newcomer runs it: it learns on every seed, and not without a learning rate."""

from pathlib import Path

import pytest

from tests.support.jobs import demo, digest_of


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
def test_a_policy_learns_to_ask_its_calculator(tmp_path, seed):
    summary = demo(tmp_path, f"seed={seed}", config="configs/tools.toml")
    assert summary["before"]["mean"] <= 0.1
    assert summary["after"]["mean"] >= 0.85


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_policy_learns_to_ask_its_user_first(tmp_path, seed):
    summary = demo(tmp_path, f"seed={seed}", config="configs/dialogue.toml")
    assert summary["before"]["mean"] <= 0.1
    assert summary["after"]["mean"] >= 0.85


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_without_a_learning_rate_nothing_is_learnt(tmp_path):
    still = ("update.learning_rate=0", "iterations=2", "evaluation.temperature=1.0", "warmup.steps=200")
    summary = demo(tmp_path, *still)
    before, after = summary["before"], summary["after"]
    assert before["low"] <= after["mean"] <= before["high"]
    assert summary["digest"] == digest_of(tmp_path / "runs/demo", "policy/initial")
