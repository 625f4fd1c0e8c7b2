"""Soups: how standardized reward terms add up, and what the settings of a soup do not change."""

import numpy as np
import pyarrow as pa
import pytest

from rheostat.models.algorithms.experience import Term
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.rewards.scores import Scores, score_table
from tests.support.configurations import accepted

REWARDS = 'scoring.rewards=[{kind="numeric"}, {kind="math"}]'
TERMS = 'soup.terms=["numeric", "math"]'


def test_settings_of_a_soup_do_not_change_the_fingerprint_of_a_run():
    assert accepted(REWARDS, TERMS).fingerprint() == accepted(REWARDS).fingerprint()


def test_the_total_reward_weighs_standardized_terms_and_columns_keep_the_raw_rewards():
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


def test_advantages_are_computed_from_standardized_terms():
    term = Term("numeric", 2.0, np.array([1.0, 3.0, np.nan]), shift=1.0, scale=4.0)
    np.testing.assert_array_equal(term.standardized, [0.0, 0.5, np.nan])
