"""Gains and losses that a gate can detect with the problems of its suites, computed before training."""

import json

import pytest

from rheostat.flows.cli.app import main
from tests.support.jobs import ROOT

JOB = """
store = "{store}"
data = {{kind = "target", target = "arithmetic:ArithmeticData"}}
policy.kind = "scratch"
[[evaluations]]
name = "sums"
data = {{kind = "target", target = "arithmetic:ArithmeticData"}}
problems = 256
rewards = [{{kind = "numeric"}}, {{name = "marked", weight = 0, kind = "regex", pattern = "####"}}]
[promotion]
registry = "assistant"
primary = {{suite = "sums", min_gain = 0.05}}
guards = [{{suite = "sums", term = "marked", margin = 0.02}}]
"""


@pytest.mark.thorough
def test_rules_report_the_effects_that_their_number_of_problems_can_show(tmp_path, capsys):
    """With 20% of problems different, 256 problems are far too few for a margin of 0.02."""
    (tmp_path / "job.toml").write_text(JOB.format(store=tmp_path / "runs"))
    assert main(["gate", str(tmp_path / "job.toml"), "--json"]) == 0
    primary, guard = json.loads(capsys.readouterr().out)
    assert (primary["rule"], primary["problems"], primary["is_short"], primary["needed"]) == ("sums", 256, False, 0)
    assert primary["shown"] == pytest.approx(0.05 + 0.092, abs=0.01)
    assert (guard["rule"], guard["is_short"]) == ("sums/marked", True)
    assert guard["power"] < 0.1
    assert guard["needed"] == pytest.approx(5040, rel=0.02)
    assert guard["shown"] == pytest.approx(0.092, abs=0.002)
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_the_rules_of_a_bundled_configuration_are_reported_in_lines(capsys, tmp_path):
    assert main(["gate", str(ROOT / "configs/weekly.toml"), "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "sums: with 256 problems, a gain of 0.104 is shown with power 0.8 "
        "(level 0.01, graded scores, root mean square difference 0.45)\n"
    )
