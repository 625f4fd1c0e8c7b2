"""Results of agents, the limits of an episode, and errors of the engine."""

from concurrent.futures import CancelledError

import pytest

from rheostat.models.agents.episodes import read_result
from rheostat.models.agents.runtime import GuardedGenerate, find_limits
from rheostat.models.config.agents import AgentEnvironment
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.environments.clock import EnvironmentClock
from rheostat.models.rollouts.groups import Group


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, (None, {})),
        (2, (2.0, {})),
        ({}, (None, {})),
        ({"reward": 0.5}, (0.5, {})),
        (True, (1.0, {})),
        ({"reward": False, "rewards": {"0": True}}, (0.0, {0: 1.0})),
        ({"reward": None, "rewards": {"0": 1, "12": -0.5}}, (None, {0: 1.0, 12: -0.5})),
    ],
)
def test_rewards_are_read_from_the_result_of_an_agent(result, expected):
    assert read_result(result) == expected


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("1", "must return None, a number or an object, but it returned '1'"),
        ([1], r"must return None, a number or an object, but it returned \[1\]"),
        (float("nan"), "the result of the agent must be a finite number, but it is nan"),
        (10**400, "the result of the agent must be a finite number"),
        ({"reward": "1"}, "reward of the agent must be a finite number, but it is '1'"),
        ({"score": 1}, "unknown key 'score'"),
        ({"rewards": {"first": 1}}, "keys are the numbers of turns"),
        ({"rewards": {"-1": 1}}, "keys are the numbers of turns"),
        ({"rewards": [1]}, "keys are the numbers of turns"),
        ({"rewards": {"0": None}}, r"rewards\[0\] of the agent must be a finite number"),
    ],
)
def test_results_of_another_form_are_refused(result, message):
    with pytest.raises(ValueError, match=message):
        read_result(result)


def test_a_turn_and_the_tokens_before_it_are_no_longer_than_training_allows():
    group = Group(0, "id", "problem", "answer", drafts=(), num_prompt_tokens=3)
    settings, sampling = AgentEnvironment(target="a:b"), SamplingConfig(max_new_tokens=300)
    assert find_limits(settings, sampling, None, group).context == 303
    assert find_limits(settings, sampling, 200, group).context == 200


@pytest.mark.parametrize(("error", "is_failure"), [(CancelledError(), False), (RuntimeError("no memory"), True)])
def test_only_errors_of_the_engine_end_all_episodes(error, is_failure):
    def generate(requests, sampling):
        raise error

    guarded = GuardedGenerate(generate, EnvironmentClock())
    with pytest.raises(type(error)):
        guarded([], SamplingConfig())
    assert (guarded.failure is error) == is_failure
