"""Credit and update where an environment wrote part of a completion: as if its tokens were not there."""

import numpy as np
import pyarrow as pa
import pytest

from models.config.algorithms import Capo, Grpo, Ppo, ReinforcePlusPlus
from models.config.reward_terms import EnvironmentReward
from models.credit.assign import CreditRule, credit_completions
from models.credit.inputs import TermColumns
from models.judges.verdicts import Judgement
from models.modeling.layout import TrainingSample, lay_out_samples
from models.records.model_input import ModelInput
from models.records.schemas import ESTIMATE_SCHEMA, ROLLOUT_SCHEMA, score_schema
from models.rewards.environment import given, returns_to_go
from models.rollouts.groups import TurnRecord
from models.text.steps import Spans

# Two groups of two episodes: what the policy (+) and the environment (-) wrote, in turn.
PARTS = [[(3, "+"), (2, "-"), (1, "+")], [(2, "+")], [(1, "+"), (4, "-"), (2, "+"), (1, "-"), (2, "+")], [(4, "+")]]
REWARDS = [1.0, 0.0, 0.25, 2.0]
MASKS = [np.repeat([who == "+" for _, who in parts], [count for count, _ in parts]) for parts in PARTS]


def tables(*, alone: bool) -> tuple[pa.Table, pa.Table, pa.Table]:
    """The episodes, their scores and what models say; `alone`: without what the environment wrote."""
    random = np.random.default_rng(0)
    rollouts, scores, estimates = [], [], []
    for number, (parts, mask) in enumerate(zip(PARTS, MASKS, strict=True)):
        place = {"prompt_row": number // 2, "sample": number % 2}
        logprobs, values = -random.random(len(mask)), random.random(len(mask))
        keep = mask if alone else np.ones(len(mask), bool)
        starts = [0, *np.flatnonzero(np.diff(mask.astype(int)) > 0) + 1]
        steps = [float(index) - number for index in range(len(starts))]
        if alone:
            starts = [int(mask[:start].sum()) for start in starts]
        segments = [
            {"policy_version": 5 if who == "+" else -1, "tokens": n} for n, who in parts if who == "+" or not alone
        ]
        rollouts.append(place | {
            "prompt_tokens": [1, 2], "images": [], "completion_tokens": [7] * int(keep.sum()), "finish_reason": "stop",
            "logprobs": np.where(mask, logprobs, 0.0)[keep].tolist(), "segments": segments,
        })  # fmt: skip
        scores.append(place | {"reward": REWARDS[number], "reward_numeric": REWARDS[number], "reward_steps": 0.0,
                               "spans_steps": starts, "values_steps": steps})  # fmt: skip
        estimates.append(place | {"values": np.where(mask, values, 0.0)[keep].tolist()})
    return (
        pa.Table.from_pylist(rollouts, ROLLOUT_SCHEMA),
        pa.Table.from_pylist(scores, score_schema(("numeric", "steps"), ("steps",))),
        pa.Table.from_pylist(estimates, ESTIMATE_SCHEMA),
    )


@pytest.mark.parametrize("algorithm", [Grpo(), ReinforcePlusPlus(), Capo(), Ppo()], ids=lambda each: each.known_as)
def test_credit_is_that_of_the_policys_tokens_alone(algorithm):
    terms = (TermColumns("numeric"), TermColumns("steps", is_process=True))
    rule = CreditRule(terms=terms, algorithm=algorithm, policy_version=6)
    found = []
    for alone in (False, True):
        rollouts, scores, estimates = tables(alone=alone)
        critic = [estimates] if algorithm.value_model is not None else []
        found.append(credit_completions([rollouts], [scores], rule, estimates=critic))
    whole, bare = (credit.samples.to_pylist() for credit in found)
    for row, plain, mask in zip(whole, bare, MASKS, strict=True):
        assert [age == -1 for age in row["staleness"]] == (~mask).tolist()
        for name in ("advantages", "staleness", "logprobs", *(("values", "returns") if critic else ())):
            values = np.array(row[name])
            assert values[mask].tolist() == plain[name]
            assert name == "staleness" or not values[~mask].any()
    assert any(any(row["advantages"]) for row in whole)


def test_what_an_environment_wrote_is_read_and_is_no_target():
    read = ModelInput.given([1, 2]).continued([3, 4]).answered([8, 9]).continued([5])
    numbers = np.array([1, 2, 3], np.float32)
    sample = TrainingSample(input=read, logprobs=-numbers, advantages=numbers, staleness=np.zeros(3, np.int16))
    batch = lay_out_samples([sample], [1.0])
    assert batch.reads.tokens_BT.tolist() == [[1, 2, 3, 4, 8, 9, 5]]
    assert batch.reads.targets_N.tolist() == [3, 4, 5]
    assert batch.reads.positions_N.tolist() == [1, 2, 5]
    assert batch.weights_N.tolist() == [1.0] * 3


def turns(*rewards: float | None) -> tuple[TurnRecord, ...]:
    return tuple(TurnRecord(tokens=3, observation=2, reward=reward) for reward in rewards)


def test_an_environments_own_reward_is_the_sum_or_the_last_of_its_turns():
    episodes = [turns(1.0, None, 4.0), turns(None), ()]
    assert given(episodes, EnvironmentReward()) == [
        Judgement(5.0, None), Judgement(0.0, None), Judgement(0.0, None),
    ]  # fmt: skip
    assert given(episodes, EnvironmentReward(aggregate="last"))[0] == Judgement(4.0, None)


def test_a_turn_is_worth_what_it_and_later_ones_earned():
    assert given([turns(1.0, None, 4.0)], EnvironmentReward(per="turn", gamma=0.5)) == [
        Spans((0, 5, 10), (1 + 0.25 * 4, 0.5 * 4, 4.0))
    ]
    assert returns_to_go([], 0.5) == ()
