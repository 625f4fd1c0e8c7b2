"""Retrains of three weeks as a new user runs them: two promotions, a rejection for a faulty reward, and a rollback."""

import json
import subprocess

import pytest

from tests.support.jobs import RHEOSTAT, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run_json(*words):
    """Run a command in the repository's root, and return its JSON output."""
    done = subprocess.run(
        [RHEOSTAT, *words, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=1200, check=True
    )
    return json.loads(done.stdout)


def test_a_week_with_a_faulty_reward_is_rejected_and_a_rollback_reverts_the_second_promotion(tmp_path):
    store = ("--store", str(tmp_path))
    weeks = run_json("retrain", "configs/weekly.toml", "--times", "3", "--day", "2026-11-02", *store)
    assert [week["record"]["kind"] for week in weeks] == ["promote", "promote", "reject"]
    assert "worse than the champion" in weeks[2]["record"]["reason"]
    rewards = [week["trained"][when]["mean"] for week in weeks[2:] for when in ("before", "after")]
    assert rewards[0] < rewards[1], "its own reward rose"
    run_json("rollback", "assistant", "--reason", "refuses too often", *store)
    records = run_json("registry", "assistant", *store)["assistant"]
    assert [record["kind"] for record in records] == ["promote", "promote", "reject", "rollback"]
    assert records[3]["policy"] == records[0]["policy"]
