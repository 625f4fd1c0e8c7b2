"""What a gate says of its suites before anything is trained."""

import json
from pathlib import Path

import pytest

from flows.cli.app import main

RULES = """
store = "{store}"
[data]
kind = "arithmetic"
[policy]
kind = "scratch"
[promotion]
registry = "assistant"
primary = {{suite = "sums", min_gain = 0.05}}
guards = [{{suite = "sums", term = "marked", margin = 0.2}}]
"""


MARKED = "kind='regex', pattern='####'"
JUDGED = "kind='judge', verdict={kind='logprob'}, model={kind='trained', shape={kind='policy'}}"


def suite(problems=500, heldout=512, more="", marked=MARKED):
    """The override that makes a suite."""
    rewards = f"[{{kind='numeric'}}, {{name='marked', weight=0, {marked}}}]"
    data = f"{{kind='arithmetic', heldout_problems={heldout}}}"
    return f"evaluations=[{{name='sums', problems={problems}, data={data}, rewards={rewards}{more}}}]"


@pytest.fixture
def given(tmp_path, capsys):
    (tmp_path / "job.toml").write_text(RULES.format(store=tmp_path / "runs"))

    def give(command, *words):
        code = main([command, str(tmp_path / "job.toml"), *words])
        return code, capsys.readouterr()

    return give


def test_a_rule_whose_suite_is_too_small_for_it_says_how_many_problems_it_takes(given, tmp_path):
    """(2.3263 √0.2 + 0.8416 √(0.2 − 0.05²))² / 0.05² = 801, and 256 are there."""
    code, said = given("gate", suite(problems=256), "--json")
    assert code == 0, said.err
    primary, guard = json.loads(said.out)
    assert (primary["rule"], primary["problems"], primary["needed"], primary["is_short"]) == ("sums", 256, 801, True)
    assert (guard["rule"], guard["is_short"]) == ("sums/marked", False)
    assert guard["shown"] == pytest.approx(0.087, abs=0.002)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("promotion.guards=[{suite='sums', term='marks', margin=0.1}]", "'marks'; did you mean 'marked'"),
        ("promotion.guards=[{suite='sums', margin=0}]", "promotion.guards.0.margin: expected greater than 0, got 0"),
        ("promotion.floors=[{suite='sum', least=0.9}]", "found 'sum'; did you mean 'sums'?"),
        (suite(problems=29), "expected a suite of at least 30 problems, found 29 of 'sums'"),
        (suite(heldout=400), "'sums': evaluation.problems 500 exceeds data.heldout_problems 400"),
        (suite(more=", samples=4"), "samples 4 at temperature 0 are all the same"),
        (suite(marked=JUDGED), "'sums': reward marked: expected one judge for the two policies"),
        ("promotion=", "expected rules under [promotion], found none"),
    ],
)
def test_rules_that_nothing_can_answer_are_refused_in_one_line(given, change, message):
    code, said = given("gate", *((change,) if change.startswith("evaluations") else (suite(), change)))
    assert (code, said.out) == (2, "")
    assert message in said.err and len(said.err.splitlines()) == 1


def test_rules_of_the_repository_are_answered_in_lines(capsys, tmp_path):
    weekly = str(Path(__file__).parents[3] / "configs/weekly.toml")
    assert main(["gate", weekly, "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "sums: 256 problems show a gain 0.088 with power 0.8 (level 0.01, 20% of problems differ)\n"
    )
