"""Losses, penalties and corrections against numbers worked by hand."""

import math

import pytest
import torch

from models.config.objectives import ConstantMean, SequenceMean, TokenMean
from models.objectives.importance import mismatch
from models.objectives.losses import kl_estimate, token_weights
from models.training.trainer import learning_rate


def test_kl_estimators_have_their_values_at_a_log_ratio_of_ln_2():
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    found = {kind: kl_estimate(policy, reference, kind=kind).item() for kind in ("k1", "k2", "k3")}
    assert found == {
        "k1": pytest.approx(0.693147, abs=1e-6),
        "k2": pytest.approx(0.240227, abs=1e-6),  # half of its square
        "k3": pytest.approx(0.193147, abs=1e-6),  # 1/2 - 1 + ln 2
    }


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_policy_does_not_diverge_from_itself(kind):
    logprobs = torch.tensor([-0.1, -3.0])
    assert kl_estimate(logprobs, logprobs, kind=kind).tolist() == [0, 0]


def test_aggregations_weigh_tokens_of_long_and_short_sequences_differently():
    lengths = [1, 3]
    assert token_weights(TokenMean(), lengths) == [0.25, 0.25]
    assert token_weights(SequenceMean(), lengths) == [0.5, pytest.approx(1 / 6)]
    assert token_weights(ConstantMean(length=10), lengths) == [0.05, 0.05]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (TokenMean(), 7 / 4),  # (4 + 1 + 1 + 1) / 4
        (SequenceMean(), 5 / 2),  # (4 + (1 + 1 + 1) / 3) / 2
        (ConstantMean(length=10), 7 / 20),  # (4 + 1 + 1 + 1) / (2 x 10)
    ],
)
def test_losses_of_tokens_become_one_number(aggregation, expected):
    short, long = token_weights(aggregation, [1, 3])
    assert 4 * short + (1 + 1 + 1) * long == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", [TokenMean(), SequenceMean(), ConstantMean(length=10)])
def test_sequences_without_tokens_change_no_weight(aggregation):
    assert token_weights(aggregation, [1, 0, 3])[::2] == token_weights(aggregation, [1, 3])


def test_mismatch_is_measured_before_the_cap():
    found = mismatch(torch.tensor([math.log(0.6)]), torch.tensor([math.log(0.2)]))
    assert found.difference_N.item() == pytest.approx(math.log(3))
    assert found.weight_N.item() == pytest.approx(3)
    assert found.kl_N.item() == pytest.approx(3 - 1 - math.log(3))


def test_the_learning_rate_warms_up_stays_or_falls():
    def course(schedule, floor=0.0):
        return [
            learning_rate(step, 6, peak=1.0, warmup_steps=2, schedule=schedule, floor=floor) for step in (0, 1, 2, 4, 6)
        ]

    assert course("constant") == [0.5, 1, 1, 1, 1]
    assert course("linear") == [0.5, 1, 1, 0.5, 0]
    assert course("cosine") == [0.5, 1, 1, pytest.approx(0.5), pytest.approx(0)]
    assert course("cosine", floor=0.1)[-1] == pytest.approx(0.1)
