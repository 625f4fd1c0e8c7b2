"""Advantages that differ from token to token (CAPO, REINFORCE++, GAE) against numbers worked by hand, against code that
walks over tokens one by one, and their laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.models.algorithms.advantages import groups_that_differ, informative_groups, token_advantages
from rheostat.models.algorithms.experience import AuxiliaryScores, Experience
from rheostat.models.algorithms.ppo import compute_generalized_advantages, policy_lam
from rheostat.models.algorithms.ragged import discounted_sums, values_on_last_tokens, values_on_tokens
from rheostat.models.config.algorithms import (
    Capo,
    Overlong,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RewardKl,
)
from rheostat.models.records.columns import Floats
from tests.support.experiences import NAN, Drawn, completions, experience

REINFORCE = ReinforcePlusPlus(kl=None)
K1 = RewardKl(kind="k1")
discounts = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def rows(values_T: Floats, lengths: list[int]) -> list[list[float]]:
    """Cut a flat column at the ends of completions."""
    return [row.tolist() for row in np.split(values_T, np.cumsum(lengths)[:-1])]


def step_of(steps: list[tuple[int, float]], token: int) -> float:
    return [value for start, value in steps if start <= token][-1]


def moments(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


# ---- CAPO


@pytest.mark.parametrize(
    ("algorithm", "case", "expected"),
    [
        # tokens count, not completions: rewards (1, 0) on 2 and 6 tokens have mean 2/8 and variance 1/4 · 3/4
        (Capo(), Drawn([1, 0], [2, 6]), [3**0.5] * 2 + [-(3**-0.5)] * 6),
        # outcome 2 or 0, a flag subtracts 1: tokens (2, 2, 1 | 0, -1), mean 4/5, squares 1.44 · 2 + 0.04 + 0.64 + 3.24
        (
            Capo(),
            Drawn([2, 0], [3, 2], steps=[[(0, 0), (2, -1)], [(0, 0), (1, -1)]]),
            np.array([1.2, 1.2, 0.2, -0.8, -1.8]) / math.sqrt(6.8 / 5),
        ),
        # equal lengths without a flag: GRPO
        (Capo(), Drawn([1, 0, 0, 0], [3] * 4), np.repeat([3**0.5, *[-(3**-0.5)] * 3], 3)),
        # centred in groups: (0.5 | -0.5, -0.5, -0.5 | 2 | -2): mean -1/6, squares 0.25 · 4 + 8 = 9
        (
            ReinforcePlusPlusBaseline(),
            Drawn([1, 0, 6, 2], [1, 3, 1, 1], [0, 0, 1, 1]),
            (np.array([0.5, -0.5, -0.5, -0.5, 2, -2]) + 1 / 6) / math.sqrt(9 / 6 - 1 / 36),
        ),
    ],
)
def test_advantages_of_tokens_are_those_worked_by_hand(algorithm, case: Drawn, expected):
    np.testing.assert_allclose(token_advantages(experience(case), algorithm).advantages_T, expected, rtol=1e-12)


def loop_over_capo(case: Drawn) -> list[list[float]]:
    values = [
        [reward + case.step_weight * step_of(steps, token) for token in range(length)]
        for reward, steps, length in zip(case.rewards, case.steps, case.lengths, strict=True)
    ]
    for group in set(case.groups):
        mine = [row for row, other in enumerate(case.groups) if other == group]
        tokens = [value for row in mine for value in values[row] if not math.isnan(value)]
        mean, std = moments(tokens) if tokens else (0.0, 0.0)
        for row in mine:
            values[row] = [value * 0 if std < 1e-6 else (value - mean) / std for value in values[row]]
    return values


@given(completions())
def test_capo_agrees_with_a_loop_over_tokens(case: Drawn):
    found = token_advantages(experience(case), Capo())
    for row, expected in zip(rows(found.advantages_T, case.lengths), loop_over_capo(case), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-9)


@given(completions(), st.integers(-20, 20), st.integers(1, 16))
def test_capo_does_not_depend_on_shift_and_scale_of_rewards(case: Drawn, shift: int, scale: int):
    moved = Drawn(
        [shift + scale * reward for reward in case.rewards], case.lengths, case.groups, case.steps, float(scale)
    )
    plain, other = (token_advantages(experience(each), Capo()).advantages_T for each in (case, moved))
    np.testing.assert_allclose(other, plain, atol=1e-7)


def test_an_all_correct_group_with_a_flagged_step_is_informative_for_capo_alone():
    steps = [[(0, 0)], [(0, 0), (1, -1)], [(0, 0)], [(0, 0)]]
    scored = experience(Drawn([2, 2, 2, 2], [3] * 4, [0, 0, 1, 1], steps)).scored
    assert informative_groups(scored, Capo()).tolist() == [True, False]
    assert groups_that_differ(scored, Capo(), "outcome").tolist() == [True, False]
    assert groups_that_differ(scored, REINFORCE, "outcome").tolist() == [False, False]
    assert groups_that_differ(scored, REINFORCE, "steps").tolist() == [True, False]  # by the steps' aggregate


def test_a_flag_on_a_completion_without_a_reward_makes_no_group_informative():
    steps = [[(0, 0)], [(0, 0), (1, -1)], [(0, 0)]]
    scored = experience(Drawn([2, NAN, 2], [3] * 3, steps=steps)).scored
    assert not groups_that_differ(scored, Capo(), "outcome").any()
    assert not informative_groups(scored, Capo()).any()


@given(completions())
def test_groups_that_are_uninformative_for_capo_have_no_advantages(case: Drawn):
    batch = experience(case)
    informative_N = informative_groups(batch.scored, Capo())[batch.scored.group_N]
    found_T = token_advantages(batch, Capo()).advantages_T
    assert not np.nan_to_num(found_T)[~np.repeat(informative_N, case.lengths)].any()
    if informative_N.any():
        assert np.nan_to_num(found_T).any()


# ---- sums to the end


@given(completions(missing=False), discounts)
def test_discounted_sums_agree_with_a_loop_from_the_last_token(case: Drawn, factor: float):
    values_T = np.arange(sum(case.lengths), dtype=np.float64)
    found = rows(discounted_sums(values_T, np.array(case.lengths), factor), case.lengths)
    for row, values in zip(found, rows(values_T, case.lengths), strict=True):
        running, expected = 0.0, []
        for value in reversed(values):
            running = value + factor * running
            expected.insert(0, running)
        np.testing.assert_allclose(row, expected, rtol=1e-12)


def test_a_step_gives_its_value_to_all_its_tokens_or_to_the_last():
    spans = experience(Drawn([0, 0, 0], [4, 0, 2], steps=[[(0, 1), (3, 5)], [], [(0, 7)]])).scored.terms[-1].spans
    lengths = np.array([4, 0, 2])
    np.testing.assert_array_equal(values_on_tokens(spans, lengths), [1, 1, 1, 5, 7, 7])
    np.testing.assert_array_equal(values_on_last_tokens(spans, lengths), [0, 0, 1, 5, 0, 7])


# ---- REINFORCE++


def test_reinforce_pp_has_the_advantages_worked_by_hand():
    # rewards 1 on 2 tokens and 0 on 1, divergence k1 of 0.5 each, coefficient 0.2: (0.8, 0.9 | -0.1)
    # mean 1.6/3; squares 0.0711 + 0.1344 + 0.4011 = 0.6067
    batch = experience(
        Drawn([1, 0], [2, 1]),
        logprobs_T=np.array([-1.0, -1.0, -1.0]),
        auxiliary_scores=AuxiliaryScores(reference_T=np.full(3, -1.5)),
        kl_coefficient=0.2,
    )
    found = token_advantages(batch, ReinforcePlusPlus(kl=K1))
    expected = (np.array([0.8, 0.9, -0.1]) - 1.6 / 3) / math.sqrt((0.8**2 + 0.9**2 + 0.1**2) / 3 - (1.6 / 3) ** 2)
    np.testing.assert_allclose(found.advantages_T, expected, rtol=1e-12)
    assert found.metrics == {"kl": 0.5, "kl_coefficient": 0.2}


def with_models(case: Drawn, seed: int, **settings: object) -> Experience:
    random = np.random.default_rng(seed)
    logprobs_T, reference_T, values_T = random.normal(-1, 1, (3, sum(case.lengths)))
    estimates = AuxiliaryScores(reference_T=reference_T, values_T=values_T)
    return experience(case, logprobs_T=logprobs_T, auxiliary_scores=estimates, kl_coefficient=0.3, **settings)


def loop_over_rewards(case: Drawn, batch: Experience) -> list[list[float]]:
    """Each token's divergence, a step's value at its last token, the outcome at the end."""
    kl = rows(batch.logprobs_T - batch.auxiliary_scores.reference_T, case.lengths)
    walked = []
    for row, length in enumerate(case.lengths):
        rewards = [-0.3 * kl[row][token] for token in range(length)]
        ends = [*(start for start, _ in case.steps[row][1:]), length]
        for (_, value), end in zip(case.steps[row], ends, strict=False):
            rewards[end - 1] += case.step_weight * value
        if length:
            rewards[-1] += case.rewards[row]
        walked.append(rewards)
    return walked


@given(completions(), st.integers(0, 99), discounts)
def test_reinforce_pp_agrees_with_a_loop_over_tokens(case: Drawn, seed: int, gamma: float):
    batch = with_models(case, seed)
    expected = []
    for rewards in loop_over_rewards(case, batch):
        sums = [sum(gamma ** (i - t) * rewards[i] for i in range(t, len(rewards))) for t in range(len(rewards))]
        expected += sums
    trained = [value for value in expected if not math.isnan(value)]
    mean, std = moments(trained) if trained else (0, 1)
    if trained and std >= 1e-6:
        found = token_advantages(batch, ReinforcePlusPlus(kl=K1, gamma=gamma))
        np.testing.assert_allclose(found.advantages_T, [(value - mean) / std for value in expected], atol=1e-7)


# ---- GAE and PPO


def test_gae_has_the_advantages_worked_by_hand():
    # δ = (0 + 0.5 · 2 - 1, 4 - 2) = (0, 2), and A_0 = 0 + 0.5 · 0.5 · 2
    found = compute_generalized_advantages(
        np.array([0.0, 4.0]), np.array([1.0, 2.0]), np.array([2]), gamma=0.5, lam=0.5
    )
    np.testing.assert_array_equal(found, [0.5, 2.0])


def test_a_length_adaptive_lambda_depends_on_the_length_of_each_completion():
    # α = 0.5: lengths 1, 2 and 4 have λ = max(0, 1 - 2), 1 - 1 and 1 - 1/2
    lengths = np.array([1, 2, 4])
    np.testing.assert_array_equal(policy_lam(lengths, Ppo(length_adaptive_lam=0.5)), [0, 0, 0.5])
    assert policy_lam(lengths, Ppo(lam=0.9)) == 0.9
    # only the last token has a reward, and the values are 0, so advantages are powers of λ
    rewards = np.array([1.0, *[0, 1], *[0, 0, 0, 1]])
    found = compute_generalized_advantages(
        rewards, np.zeros(7), lengths, gamma=1.0, lam=policy_lam(lengths, Ppo(length_adaptive_lam=0.5))
    )
    np.testing.assert_array_equal(found, [1, *[0, 1], *[0.125, 0.25, 0.5, 1]])


@given(completions(), st.integers(0, 99), discounts)
def test_the_returns_of_the_critic_may_have_another_lambda(case: Drawn, seed: int, lam: float):
    batch = with_models(case, seed)
    plain, critic, adaptive = (
        token_advantages(batch, Ppo(whiten=False, **options))
        for options in ({"lam": lam}, {"lam": 1.0}, {"lam": lam, "critic_lam": 1.0, "length_adaptive_lam": 0.3})
    )
    decoupled = token_advantages(batch, Ppo(whiten=False, lam=lam, critic_lam=1.0))
    np.testing.assert_array_equal(decoupled.advantages_T, plain.advantages_T)
    np.testing.assert_array_equal(decoupled.returns_T, critic.returns_T)
    np.testing.assert_array_equal(adaptive.returns_T, critic.returns_T)


@given(completions(), st.integers(0, 99), discounts, discounts)
def test_ppo_agrees_with_a_loop_over_tokens(case: Drawn, seed: int, gamma: float, lam: float):
    batch = with_models(case, seed)
    advantages, returns = [], []
    values_of_rows = rows(batch.auxiliary_scores.values_T, case.lengths)
    for rewards, values in zip(loop_over_rewards(case, batch), values_of_rows, strict=True):
        deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0], strict=False)]
        row = [sum((gamma * lam) ** (i - t) * deltas[i] for i in range(t, len(deltas))) for t in range(len(deltas))]
        advantages += row
        returns += [advantage + value for advantage, value in zip(row, values, strict=True)]
    found = token_advantages(batch, Ppo(kl=K1, gamma=gamma, lam=lam, whiten=False))
    np.testing.assert_allclose(found.advantages_T, advantages, atol=1e-9)
    np.testing.assert_allclose(found.returns_T, returns, atol=1e-9)


@given(completions(), st.integers(0, 99))
def test_whitened_advantages_have_mean_0_and_deviation_1_over_trained_tokens(case: Drawn, seed: int):
    batch = with_models(case, seed)
    for algorithm in (ReinforcePlusPlus(kl=K1), Ppo(kl=K1)):
        found_T = token_advantages(batch, algorithm).advantages_T[np.repeat(batch.counted_N, case.lengths)]
        if len(found_T) and found_T.any():
            assert found_T.mean() == pytest.approx(0, abs=1e-9)
            assert found_T.std() == pytest.approx(1, abs=1e-9)


@given(completions(steps=False), st.integers(-20, 20), st.integers(1, 16))
def test_a_normalised_batch_does_not_depend_on_shift_and_scale_of_rewards(case: Drawn, shift: int, scale: int):
    moved = Drawn([shift + scale * reward for reward in case.rewards], case.lengths, case.groups)
    for algorithm in (REINFORCE, ReinforcePlusPlusBaseline()):
        plain, other = (token_advantages(experience(each), algorithm).advantages_T for each in (case, moved))
        np.testing.assert_allclose(np.nan_to_num(other), np.nan_to_num(plain), atol=1e-7)


def test_a_batch_is_normalised_over_the_trained_completions():
    batch = experience(Drawn([1, 0, 100], [1, 1, 1]), counted_N=np.array([True, True, False]))
    np.testing.assert_allclose(token_advantages(batch, REINFORCE).advantages_T[:2], [1, -1], rtol=1e-12)


@pytest.mark.parametrize("algorithm", [Capo(), REINFORCE, ReinforcePlusPlusBaseline()])
def test_equal_rewards_give_no_advantages(algorithm):
    found = token_advantages(experience(Drawn([0.1, 0.1, 0.1, NAN], [2, 1, 4, 2])), algorithm)
    assert not np.nan_to_num(found.advantages_T).any()


# ---- length


def test_lengths_near_the_limit_are_penalised_in_proportion():
    # limit 10, buffer 4, penalty 2: up to 6 tokens nothing, 8 tokens half, 10 tokens all; summed: (1 | 0 | -1)
    batch = experience(Drawn([1, 1, 1], [6, 8, 10]), max_new_tokens=10)
    overlong = Overlong(buffer=4, penalty=2)
    found = token_advantages(batch, ReinforcePlusPlus(kl=None, overlong=overlong))
    sums = np.repeat([1.0, 0.0, -1.0], [6, 8, 10])
    np.testing.assert_allclose(found.advantages_T, (sums - sums.mean()) / sums.std(), rtol=1e-12)
    assert found.metrics == {"overlong_penalty_mean": 1.0}
    capo = token_advantages(batch, Capo(overlong=overlong))
    np.testing.assert_allclose(capo.advantages_T, found.advantages_T, rtol=1e-12)  # one group, so the same here
