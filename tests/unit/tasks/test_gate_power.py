"""Which gains and losses a gate can detect with the problems of its suites, before anything is trained."""

import json

import pytest

from flows.cli.app import main
from tests.support.jobs import ROOT

JOB = """
store = "{store}"
data.kind = "arithmetic"
policy.kind = "scratch"
[[evaluations]]
name = "sums"
problems = 256
rewards = [{{kind = "numeric"}}, {{name = "marked", weight = 0, kind = "regex", pattern = "####"}}]
[promotion]
registry = "assistant"
primary = {{suite = "sums", min_gain = 0.05}}
guards = [{{suite = "sums", term = "marked", margin = 0.2}}]
"""


def test_a_rule_whose_suite_is_too_small_reports_how_many_problems_it_needs(tmp_path, capsys):
    """(2.3263 √0.2 + 0.8416 √(0.2 − 0.05²))² / 0.05² = 801, and 256 are there."""
    (tmp_path / "job.toml").write_text(JOB.format(store=tmp_path / "runs"))
    assert main(["gate", str(tmp_path / "job.toml"), "--json"]) == 0
    primary, guard = json.loads(capsys.readouterr().out)
    assert (primary["rule"], primary["problems"], primary["needed"], primary["is_short"]) == ("sums", 256, 801, True)
    assert (guard["rule"], guard["is_short"]) == ("sums/marked", False)
    assert guard["shown"] == pytest.approx(0.087, abs=0.002)
    assert not (tmp_path / "runs").exists()


def test_the_rules_of_a_shipped_configuration_are_reported_in_lines(capsys, tmp_path):
    assert main(["gate", str(ROOT / "configs/weekly.toml"), "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "sums: 256 problems show a gain 0.088 with power 0.8 (level 0.01, 20% of problems differ)\n"
    )
