"""Several reward terms, penalties of rewards before groups are compared, and what a teacher adds to the advantages."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.algorithms.advantages import informative_groups, token_advantages
from rheostat.models.algorithms.experience import AuxiliaryScores
from rheostat.models.algorithms.group_relative import EPSILON
from rheostat.models.algorithms.shaping import divergence, next_coefficient
from rheostat.models.config.algorithms import (
    Capo,
    DistillationOnly,
    DrGrpo,
    Grpo,
    Overlong,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RewardKl,
    Rloo,
)
from rheostat.models.config.divergence import AdaptiveKl
from rheostat.models.config.teachers import Distillation, TeacherDirectory
from tests.support.experiences import NAN, Drawn, completions, experience

ONE_BY_ONE = "normalise_then_sum"
OVERLONG = Overlong(buffer=4, penalty=2)
TEACHER = Distillation(teacher=TeacherDirectory(path="teacher"), coefficient=0.5)


OUTCOME_AND_OTHER = Drawn([1, 0, 0, 0], [1, 2, 1, 1], [0, 0, 1, 1], terms={"other": (0.5, [0, 4, 8, 4])})
HALVES = np.repeat([0.5, -0.5], [8, 6])
OWN, OTHER = 0.5 / math.sqrt(3 / 16), 0.5 * 2 / math.sqrt(8)
"""Distances to the mean in deviations over the batch: outcomes have variance 3/16, the other term 8."""


@pytest.mark.parametrize(
    ("algorithm", "case", "expected"),
    [
        # outcome (1, 0), other term (0, 40) of weight 0.5: the sum is (1, 20), which hides the outcome
        (Grpo(), Drawn([1, 0], [1, 1], terms={"short": (0.5, [0, 40])}), [-1, 1]),
        # one by one: (1, -1) + 0.5 · (-1, 1)
        (Grpo(combine=ONE_BY_ONE), Drawn([1, 0], [1, 1], terms={"short": (0.5, [0, 40])}), [0.5, -0.5]),
        # a completion without one of its terms is in the group of no term
        (
            DrGrpo(combine=ONE_BY_ONE),
            Drawn([1, 0, 5], [1, 1, 1], terms={"short": (1.0, [0, 4, NAN])}),
            [0.5 - 2, -0.5 + 2, NAN],
        ),
        # over the batch: outcomes (1, 0 | 0, 0) have mean 1/4, the other term (0, 4 | 8, 4) has mean 4
        (Grpo(std="batch", combine=ONE_BY_ONE), OUTCOME_AND_OTHER, [OWN - OTHER, *[OTHER - OWN] * 2, OTHER, -OTHER]),
        # summed first: (1, 2 | 4, 2), mean 9/4, variance (25 + 1 + 49 + 1) / 64
        (Grpo(std="batch"), OUTCOME_AND_OTHER, np.array([-0.5, 0.5, 0.5, 1, -1]) / math.sqrt(76 / 64)),
        # outcome normalised (1, -1); the penalty (1, 0) is centred to (0.5, -0.5) and not divided by its deviation
        (Grpo(combine=ONE_BY_ONE, overlong=OVERLONG), Drawn([8, 0], [8, 6]), HALVES),
        (Grpo(std="batch", combine=ONE_BY_ONE, overlong=OVERLONG), Drawn([8, 0], [8, 6]), HALVES),
        # rewards (1, 1) less (1, 0), centred (-0.5 on 8 tokens, 0.5 on 6): mean -1/14, variance 1/4 - 1/196
        (
            ReinforcePlusPlusBaseline(overlong=OVERLONG),
            Drawn([1, 1], [8, 6]),
            (1 / 14 - HALVES) / math.sqrt(1 / 4 - 1 / 196),
        ),
    ],
)
def test_terms_and_penalties_are_combined_as_worked_by_hand(algorithm, case: Drawn, expected):
    found = token_advantages(experience(case, max_new_tokens=10), algorithm).advantages_T
    np.testing.assert_allclose(found, expected, rtol=1e-5 if isinstance(algorithm, Grpo) else 1e-12)


@pytest.mark.parametrize("kind", [DrGrpo, Rloo])
@given(case=completions(steps=False), data=st.data())
def test_algorithms_that_only_centre_may_sum_terms_before_or_after(kind, case: Drawn, data: st.DataObject):
    number = len(case.rewards)
    other = data.draw(st.lists(st.integers(-8, 8), min_size=number, max_size=number))
    batch = experience(
        Drawn(case.rewards, case.lengths, case.groups, terms={"other": (-0.75, other)}), max_new_tokens=6
    )
    overlong = OVERLONG.model_copy(update={"buffer": 3})
    before, after = (
        token_advantages(batch, kind(combine=combine, overlong=overlong)).advantages_T
        for combine in ("sum_then_normalise", ONE_BY_ONE)
    )
    np.testing.assert_allclose(after, before, atol=1e-9)


def test_a_group_whose_terms_cancel_out_is_informative_only_if_they_are_normalised_one_by_one():
    scored = experience(Drawn([1, 0, 0], [1] * 3, terms={"other": (1.0, [0, 1, 1])})).scored
    assert not informative_groups(scored, Grpo()).any()
    assert not informative_groups(scored, Grpo(combine=ONE_BY_ONE)).any()
    scored = experience(Drawn([2, 0, 0], [1] * 3, terms={"other": (1.0, [0, 1, 2])})).scored
    assert informative_groups(scored, Grpo(combine=ONE_BY_ONE)).all()


@pytest.mark.parametrize("combine", ["sum_then_normalise", ONE_BY_ONE])
def test_advantages_are_clipped_on_either_side_before_the_teacher_adds_to_them(combine: str):
    # 1 - 1/3, 0 - 1/3, 0 - 1/3
    case, found = Drawn([1, 0, 0, NAN], [1, 2, 1, 1]), estimates([-1.0] * 5, [-3.0, *[-1.0] * 4])
    for bound, expected in ((0.5, [0.5, -1 / 3, -1 / 3, -1 / 3, NAN]), (0.25, [0.25, -0.25, -0.25, -0.25, NAN])):
        algorithm = DrGrpo(advantage_clip=bound, combine=combine)
        np.testing.assert_allclose(token_advantages(experience(case), algorithm).advantages_T, expected, rtol=1e-12)
        with_teacher = algorithm.model_copy(update={"distillation": TEACHER})
        both = token_advantages(experience(case, auxiliary_scores=found), with_teacher).advantages_T
        np.testing.assert_allclose(both, [expected[0] - 1, *expected[1:]], rtol=1e-12)


@pytest.mark.parametrize("combine", ["sum_then_normalise", ONE_BY_ONE])
def test_length_near_the_limit_lowers_the_reward_and_does_not_make_a_group_informative(combine: str):
    batch = experience(Drawn([1, 1, 0, 1], [8, 6, 6, 6], [0, 0, 1, 1]), max_new_tokens=10)
    algorithm = DrGrpo(combine=combine, overlong=OVERLONG)
    found = token_advantages(batch, algorithm)
    np.testing.assert_allclose(found.advantages_T, np.repeat([-0.5, 0.5, -0.5, 0.5], [8, 6, 6, 6]), atol=1e-12)
    assert informative_groups(batch.scored, algorithm).tolist() == [False, True]


# ---- divergence in the reward


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)])
def test_the_divergence_of_a_token_is_as_worked_by_hand(kind, expected: float):
    assert divergence(np.array([-1.0]), np.array([-1.5]), kind) == pytest.approx([expected], abs=1e-15)
    assert divergence(np.array([-1.0]), np.array([-1.0]), kind) == [0.0]


def test_the_divergence_of_a_completion_is_subtracted_from_its_reward():
    # k1 sums (0.5 · 2, 0.25 · 4), coefficient 0.5: rewards (1 - 0.5, 0 - 0.5 | …)
    batch = experience(
        Drawn([1, 0], [2, 3]),
        logprobs_T=np.zeros(5),
        auxiliary_scores=AuxiliaryScores(reference_T=np.array([-0.5, -0.5, -1.0, -1.0, -1.0])),
        kl_coefficient=0.5,
    )
    found = token_advantages(batch, DrGrpo(kl=RewardKl(kind="k1")))
    half = ((1 - 0.5) - (0 - 1.5)) / 2
    np.testing.assert_allclose(found.advantages_T, [half, half, -half, -half, -half], rtol=1e-12)
    assert found.metrics == {"kl": 4 / 5, "kl_coefficient": 0.5}
    grpo = token_advantages(batch, Grpo(kl=RewardKl(kind="k1"))).advantages_T
    np.testing.assert_allclose(grpo, np.sign(found.advantages_T) * half / (half + EPSILON), rtol=1e-12)


def test_the_reported_divergence_is_that_of_completions_with_a_reward():
    batch = experience(
        Drawn([1, NAN, 0], [1, 2, 1]),
        logprobs_T=np.zeros(4),
        auxiliary_scores=AuxiliaryScores(reference_T=np.array([-1.0, -9.0, -9.0, -2.0])),
    )
    assert token_advantages(batch, Grpo(kl=RewardKl())).metrics == {"kl": 1.5, "kl_coefficient": 0.0}


# ---- distillation


def estimates(policy: list[float], teacher: list[float]) -> AuxiliaryScores:
    number = len(policy)
    return AuxiliaryScores(np.array(policy), np.zeros(number), np.array(teacher), np.zeros(number))


ALONE = (Grpo(), DrGrpo(), Rloo(), ReinforcePlusPlus(), ReinforcePlusPlusBaseline(), Ppo(), Capo())


@pytest.mark.parametrize("algorithm", ALONE, ids=lambda algorithm: algorithm.kind)
def test_a_teacher_adds_to_the_advantage_of_every_token(algorithm):
    case, found = Drawn([1, 0], [1, 2]), estimates([-1.0, -2.0, -1.5], [-0.5, -2.0, -3.5])
    with_teacher = algorithm.model_copy(update={"distillation": TEACHER})
    alone = token_advantages(experience(case, auxiliary_scores=found), algorithm).advantages_T
    both = token_advantages(experience(case, auxiliary_scores=found), with_teacher).advantages_T
    np.testing.assert_allclose(both - alone, [0.25, 0, -1], atol=1e-12)
    assert with_teacher.keeps_uninformative


def test_a_teacher_that_is_the_policy_gives_advantages_of_exactly_zero():
    policy = np.random.default_rng(0).normal(-1, 1, 6).astype(np.float32).tolist()
    with_teacher = DistillationOnly(distillation=TEACHER)
    batch = experience(Drawn([1, 0], [2, 4]), auxiliary_scores=estimates(policy, policy))
    assert token_advantages(batch, with_teacher).advantages_T.tolist() == [0.0] * 6


def test_rewards_change_nothing_if_the_teacher_is_the_only_source_of_advantages():
    with_teacher = DistillationOnly(distillation=TEACHER)
    for rewards in ([1, 0], [0, 1], [5, 5]):
        batch = experience(Drawn(rewards, [1, 1]), auxiliary_scores=estimates([-1.0, -1.0], [-2.0, 0.0]))
        assert token_advantages(batch, with_teacher).advantages_T.tolist() == [-0.5, 0.5]


# ---- the controller of the KL coefficient

ADAPTIVE = AdaptiveKl(target=0.1, horizon=1000)


@pytest.mark.parametrize(
    ("coefficient", "kl", "completions", "expected"),
    [
        (0.5, 0.10, 200, 0.5),  # on target
        (0.5, 0.11, 200, 0.5 * math.exp(0.1 * 0.2)),  # a tenth too much, over a fifth of the horizon
        (0.5, 0.09, 200, 0.5 * math.exp(-0.1 * 0.2)),
        (0.5, 9.00, 200, 0.5 * math.exp(0.2 * 0.2)),  # errors are clipped at 0.2
        (0.5, -0.5, 200, 0.5 * math.exp(-0.2 * 0.2)),
        (1.0, 0.11, 1, 1 + 1e-3 * 0.1),  # arXiv 1909.08593: beta x (1 + K error), with K = completions / horizon
    ],
)
def test_the_coefficient_follows_the_error(coefficient, kl, completions, expected):
    found = next_coefficient(coefficient, kl=kl, completions=completions, adaptive=ADAPTIVE)
    assert found == pytest.approx(expected, rel=1e-7)


@given(kl=st.floats(-1e6, 1e6), completions=st.integers(0, 100_000))
def test_the_coefficient_stays_positive_for_every_measured_divergence(kl, completions):
    assert next_coefficient(1e-3, kl=kl, completions=completions, adaptive=ADAPTIVE) > 0


@given(first=st.integers(0, 5000), second=st.integers(0, 5000), kl=st.floats(-1, 1))
def test_two_iterations_change_the_coefficient_as_much_as_one_with_all_their_completions(first, second, kl):
    between = next_coefficient(1.0, kl=kl, completions=first, adaptive=ADAPTIVE)
    after = next_coefficient(between, kl=kl, completions=second, adaptive=ADAPTIVE)
    assert after == pytest.approx(next_coefficient(1.0, kl=kl, completions=first + second, adaptive=ADAPTIVE))


@given(start=st.floats(1e-4, 10))
def test_a_divergence_that_falls_with_the_coefficient_reaches_its_target(start):
    coefficient = start
    for _ in range(600):
        coefficient = next_coefficient(coefficient, kl=0.02 / coefficient, completions=100, adaptive=ADAPTIVE)
    assert 0.02 / coefficient == pytest.approx(0.1, rel=1e-2)
