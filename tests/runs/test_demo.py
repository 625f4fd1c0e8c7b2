"""The demo as a newcomer runs it: it learns on every seed, and not without a learning rate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RHEOSTAT = str(Path(sys.executable).with_name("rheostat"))


def demo(home: Path, *overrides: str, config: str = "configs/demo.toml") -> dict[str, object]:
    """Run a configuration with overrides and return its summary."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [RHEOSTAT, "train", config, *overrides, "--store", str(home / "runs"), "--json"]
    environment = kept | {"PREFECT_HOME": str(home / "prefect")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "eta" in done.stderr, "progress goes to stderr where JSON goes to stdout"
    return json.loads(done.stdout)


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
def test_without_a_learning_rate_nothing_is_learnt(tmp_path):
    summary = demo(tmp_path, "update.learning_rate=0", "iterations=3", "evaluation.temperature=1.0")
    before, after = summary["before"], summary["after"]
    assert before["low"] <= after["mean"] <= before["high"]
    manifests = tmp_path / "runs/demo/manifests"
    first = json.loads((manifests / "policy/initial.json").read_text())["bundles"]["weights"]["digest"]
    assert summary["digest"] == first
