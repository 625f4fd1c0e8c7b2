"""What a soup's settings may be, and what its rewards do to totals."""

import re

import numpy as np
import pyarrow as pa
import pytest

from flows.cli.app import main
from models.algorithms.experience import Term
from models.config.rewards import ScoringConfig
from models.rewards.scores import Scores, score_table
from tests.support.configurations import accepted, refusal

REWARDS = 'scoring.rewards=[{kind="numeric"}, {kind="math"}]'
TERMS = 'soup.terms=["numeric", "math"]'


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([REWARDS, TERMS, "soup.beta=0.5"], "beta 0.5: expected above 1/2 and at most 1 for 2 terms: .* B is singular"),
        (["name=soups"], "'soups' is where records of soups lie: expected another name"),
        ([REWARDS, TERMS, "soup.beta=1.2"], "beta 1.2: expected above 1/2 and at most 1 for 2 terms$"),
        ([REWARDS, TERMS, "soup.candidates=[0.6, 0.4]"], "beta 0.4: expected above 1/2"),
        (
            [REWARDS, TERMS, "soup.method=bones"],
            "expected 'bone', 'direct', 'rewarded' or 'oracle', got 'bones'",
        ),
        ([REWARDS, 'soup.terms=["numeric", "maths"]'], "found 'maths'; did you mean 'math'"),
        ([REWARDS, 'soup.terms=["numeric"]'], "soup.terms"),
        ([REWARDS, TERMS, "soup.statistics_prompts=257"], "statistics_prompts 257 exceeds data.heldout_problems 256"),
        ([REWARDS, TERMS, "soup.candidates=[0.6]", "update.schedule=cosine"], "expected 'constant'"),
    ],
)
def test_a_soup_that_cannot_be_made_is_refused_in_one_line(overrides, said):

    assert re.search(said, refusal(*overrides))


def test_a_soup_changes_nothing_of_what_a_run_computes():
    assert accepted(REWARDS, TERMS).fingerprint() == accepted(REWARDS).fingerprint()


def test_what_is_no_soup_and_soups_that_are_not_there_are_refused(tmp_path, capsys):
    (tmp_path / "job.toml").write_text("")
    assert main(["soup", str(tmp_path / "job.toml"), "--store", str(tmp_path / "runs")]) == 2
    assert main(["soup-policy", "a", "--preference", "x", "--to", "b", "--store", str(tmp_path / "runs")]) == 2
    assert main(["soup-front", "a", "--store", str(tmp_path / "runs")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "run 'run' is no soup: set [soup]" in said
    assert "--preference 'x': expected numbers, such as 0.3,0.7" in said
    assert "soup 'a': expected one in" in said and "found none" in said
    assert not (tmp_path / "runs").exists()


def test_a_total_weighs_standardised_terms_and_columns_keep_the_numbers_as_they_were():
    rewards = [
        {"kind": "numeric", "weight": 0.7, "shift": -2.0, "scale": 4.0},
        {"kind": "math", "weight": 0.3, "shift": 1.0, "scale": 0.5},
    ]
    scoring = ScoringConfig.model_validate({"rewards": rewards})
    rollouts = pa.table({"prompt_row": pa.array([0], pa.int32()), "sample": pa.array([0], pa.int32())})
    table = score_table(rollouts, [Scores((6.0, 2.0), None)], scoring)
    # 0.7 · (6 + 2) / 4 + 0.3 · (2 − 1) / 0.5
    assert table["reward"].to_pylist() == [pytest.approx(1.4 + 0.6)]
    assert table["reward_numeric"].to_pylist() == [6.0] and table["reward_math"].to_pylist() == [2.0]


def test_advantages_are_of_standardised_terms_too():
    term = Term("numeric", 2.0, np.array([1.0, 3.0, np.nan]), shift=1.0, scale=4.0)
    np.testing.assert_array_equal(term.standardised, [0.0, 0.5, np.nan])
