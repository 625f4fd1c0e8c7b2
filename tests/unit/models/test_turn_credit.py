"""Credit, samples and weights of episodes: the tokens of environments and of prompts between turns change nothing."""

import numpy as np
import pyarrow as pa
import pytest

from rheostat.infra.store.shards import write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Capo, DrGrpo, Grpo, Ppo, ReinforcePlusPlus
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy_losses import ConstantMean, PpoClip, SequenceMean, TokenMean
from rheostat.models.config.reward_terms import EnvironmentReward
from rheostat.models.credit.assign import Credit, CreditRule, credit_completions
from rheostat.models.credit.comparison import compare_advantages
from rheostat.models.credit.inputs import TermColumns
from rheostat.models.judges.verdicts import Judgement
from rheostat.models.modeling.batching import Sequences, plan_steps
from rheostat.models.modeling.layout import TrainingSample, lay_out_samples
from rheostat.models.records.model_input import TURN_PROMPT, ModelInput, rollout_inputs
from rheostat.models.records.schemas import ESTIMATE_SCHEMA, ROLLOUT_SCHEMA, TERM_REWARD, score_schema
from rheostat.models.records.turn_prompts import count_turn_prompts, split_at_prompts
from rheostat.models.rewards.environment import environment_rewards, returns_to_go
from rheostat.models.rollouts.groups import TurnRecord
from rheostat.models.text.steps import Spans
from rheostat.models.training.samples import open_samples
from rheostat.models.training.step_plans import build_batches

Episode = list[tuple[int, list[int]]]
"""Policy version and tokens of each segment in order."""
POLICY, ENVIRONMENT = 5, -1
PROMPT = [1, 2]
# Two groups of two episodes. Tokens of the policy are below 50, those of prompts between turns are 50 and more.
PROMPTS = [PROMPT, [50, 51, 52], [53, 54, 55, 56]]
TURNS = [[[11, 12, 13], [14]], [[21, 22]], [[31], [32, 33], [34, 35]], [[41, 42, 43, 44]]]


def build_episode(turns: list[list[int]], between: int | None) -> Episode:
    """Build an episode; `between` is the version of the tokens before each later turn, None for no such tokens."""
    segments = [(POLICY, turns[0])]
    for tokens, turn in zip(PROMPTS[1:], turns[1:], strict=False):
        segments += [(POLICY, turn)] if between is None else [(between, tokens), (POLICY, turn)]
    return segments


ALONE, WITH_PROMPTS, WITH_ENVIRONMENT = (
    [build_episode(turns, between) for turns in TURNS] for between in (None, TURN_PROMPT, ENVIRONMENT)
)
REWARDS = [1.0, 0.0, 0.25, 2.0]
CENTRED = [0.5, -0.5, -0.875, 0.875]
"""Rewards less the mean of the two episodes of the group, for any number of turns."""
NUMERIC, STEPS = TermColumns("numeric"), TermColumns("turns", is_process=True)
ALGORITHMS = [Grpo(), ReinforcePlusPlus(), Capo(), Ppo()]


def masks_of(episodes: list[Episode]) -> list[np.ndarray]:
    """Return for each episode which tokens the policy generated."""
    return [np.concatenate([[version == POLICY] * len(tokens) for version, tokens in each]) for each in episodes]


def build_tables(episodes: list[Episode]) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Build rollouts, scores and values of a critic; tokens of the policy have the same numbers in every form."""
    rollouts, scores, estimates = [], [], []
    random = np.random.default_rng(0)
    for number, (segments, mask) in enumerate(zip(episodes, masks_of(episodes), strict=True)):
        place = {"prompt_row": number // 2, "sample": number % 2}
        logprobs, values = np.zeros((2, len(mask)))
        logprobs[mask], values[mask] = (-random.random(20))[: mask.sum()], random.random(20)[: mask.sum()]
        ends = np.cumsum([len(tokens) for _, tokens in segments]).tolist()
        # a turn begins with its prompt, or after the tokens of an environment
        starts = [0] + [
            begin
            for (before, _), (version, _), begin in zip(segments, segments[1:], ends, strict=False)
            if version == TURN_PROMPT or (version == POLICY and before != TURN_PROMPT)
        ]
        rollouts.append(place | {
            "prompt_tokens": PROMPT, "images": [], "finish_reason": "stop", "logprobs": logprobs.tolist(),
            "completion_tokens": [token for _, tokens in segments for token in tokens],
            "segments": [{"policy_version": version, "tokens": len(tokens)} for version, tokens in segments],
        })  # fmt: skip
        scores.append(place | {
            "reward": REWARDS[number], "reward_numeric": REWARDS[number], "reward_turns": 0.0, "spans_turns": starts,
            "values_turns": [float(turn - number) for turn in range(len(starts))],
        })  # fmt: skip
        estimates.append(place | {"values": values.tolist()})
    return (
        pa.Table.from_pylist(rollouts, ROLLOUT_SCHEMA),
        pa.Table.from_pylist(scores, score_schema(("numeric", "turns"), ("turns",))),
        pa.Table.from_pylist(estimates, ESTIMATE_SCHEMA),
    )


def assign_credit(algorithm, episodes: list[Episode] = WITH_PROMPTS, *, terms=(NUMERIC,)) -> Credit:
    rollouts, scores, estimates = build_tables(episodes)
    critic = [estimates] if algorithm.value_model is not None else []
    rule = CreditRule(terms=terms, algorithm=algorithm, policy_version=6)
    return credit_completions([rollouts], [scores], rule, auxiliary_scores=critic)


# ---- credit


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: each.label)
def test_credit_is_that_of_the_tokens_of_the_policy_alone(algorithm):
    forms = (WITH_ENVIRONMENT, WITH_PROMPTS, ALONE)
    whole, cut, alone = (assign_credit(algorithm, each, terms=(NUMERIC, STEPS)).samples.to_pylist() for each in forms)
    assert (len(whole), len(cut), len(alone)) == (4, 7, 4)
    names = ["advantages", "logprobs", *(("values", "returns") if algorithm.value_model is not None else ())]
    for row, plain, mask in zip(whole, alone, masks_of(WITH_ENVIRONMENT), strict=True):
        assert [age == -1 for age in row["staleness"]] == (~mask).tolist()
        assert np.array(row["staleness"])[mask].tolist() == plain["staleness"]
        for name in names:
            values = np.array(row[name])
            assert values[mask].tolist() == plain[name]
            assert not values[~mask].any()
    for name in names:
        assert [value for row in cut for value in row[name]] == [value for row in alone for value in row[name]]
    assert any(any(row["advantages"]) for row in whole)


def test_each_turn_is_a_sample_with_its_prompt_and_the_tokens_sampled_after_the_prompt():
    rollouts, *_ = build_tables(WITH_PROMPTS)
    samples = assign_credit(DrGrpo()).samples.to_pylist()
    expected = [
        (number // 2, number % 2, [*prompt, *turn], len(prompt))
        for number, turns in enumerate(TURNS)
        for turn, prompt in zip(turns, PROMPTS, strict=False)
    ]
    assert [(row["prompt_row"], row["sample"], row["tokens"], row["num_prompt_tokens"]) for row in samples] == expected
    logprobs = [
        value
        for row in rollouts.to_pylist()
        for value, token in zip(row["logprobs"], row["completion_tokens"], strict=True)
        if token < 50
    ]
    assert [value for row in samples for value in row["logprobs"]] == logprobs
    assert {age for row in samples for age in row["staleness"]} == {1}


def test_every_turn_has_the_advantage_of_its_episode_among_the_episodes_of_its_group():
    expected = [[CENTRED[number]] * len(turn) for number, turns in enumerate(TURNS) for turn in turns]
    assert [row["advantages"] for row in assign_credit(DrGrpo()).samples.to_pylist()] == expected
    for row, found in zip(expected, assign_credit(Grpo()).samples.to_pylist(), strict=True):
        assert found["advantages"] == pytest.approx(np.sign(row), abs=1e-5)  # the deviation is the distance to the mean


def test_every_turn_of_an_episode_has_the_score_of_the_episode():
    rollouts, scores, _ = build_tables(WITH_PROMPTS)
    rule = CreditRule(terms=(NUMERIC,), algorithm=Grpo(), policy_version=6, sample_term="numeric")
    found = credit_completions([rollouts], [scores], rule).samples[TERM_REWARD].to_pylist()
    assert found == [REWARDS[number] for number, turns in enumerate(TURNS) for _ in turns]


def test_metrics_count_episodes_and_the_prompts_of_their_turns():
    rollouts, scores, _ = build_tables(WITH_PROMPTS)
    rows = rollouts.to_pylist()
    for row, turns in zip(rows, TURNS, strict=True):
        observations = [*map(len, PROMPTS[1 : len(turns)]), 0]
        row["turns"] = [
            {"tokens": len(turn), "observation": observation, "calls": 0, "errors": 0}
            for turn, observation in zip(turns, observations, strict=True)
        ]
    table = pa.Table.from_pylist(rows, ROLLOUT_SCHEMA)
    rule = CreditRule(terms=(NUMERIC,), algorithm=Grpo(), policy_version=6)
    found = credit_completions([table], [scores], rule).metrics
    assert (found["samples"], found["completions"], found["groups"]) == (7, 4, 2)
    assert found["length_mean"] == (4 + 2 + 5 + 4) / 4
    assert found["turn_prompt_tokens_mean"] == (3 + 0 + 7 + 0) / 4
    assert "observation_tokens_mean" not in found


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        (TokenMean(), [1 / 15] * 4),
        (SequenceMean(), [1 / 16, 1 / 8, 1 / 20, 1 / 16]),
        (ConstantMean(length=10), [1 / 40] * 4),
    ],
    ids=["token", "sequence", "constant"],
)
def test_losses_are_divided_by_episodes_and_their_tokens_and_not_by_samples(aggregation, weights, tmp_path):
    store = open_store(str(tmp_path))
    opened = open_samples(store, [write_shard(store, assign_credit(DrGrpo()).samples, kind="samples", metadata={})])
    config = UpdateConfig(loss=PpoClip(aggregation=aggregation))
    plans = plan_steps(opened.sequences(None), minibatches=1, ranks=1, microbatch_tokens=16, seed=0)
    [batches] = build_batches(opened, plans, config=config, rank=0)
    assert len(batches) > 1, "turns of an episode are in several micro-batches"
    loss = -sum(float(batch.weights_N @ batch.advantages_N) for batch in batches)  # if all ratios are 1
    lengths = [sum(map(len, turns)) for turns in TURNS]
    by_hand = -sum(w * n * a for w, n, a in zip(weights, lengths, CENTRED, strict=True))
    assert loss == pytest.approx(by_hand, abs=1e-7)
    if isinstance(aggregation, TokenMean):
        assert by_hand == pytest.approx(-0.125 / 15)


def test_rows_are_cut_only_at_prompts_of_turns():
    rollouts, *_ = build_tables(WITH_PROMPTS)
    rows, place = split_at_prompts(rollouts)
    assert place.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert count_turn_prompts(rollouts).tolist() == [1, 0, 2, 0]
    inputs = rollout_inputs(rows)
    assert [each.completion.tolist() for each in inputs] == [turn for turns in TURNS for turn in turns]
    assert [each.prompt.tolist() for each in inputs] == [p for t in TURNS for p in PROMPTS[: len(t)]]
    without_prompts, _, _ = build_tables(ALONE)
    assert split_at_prompts(without_prompts)[0] is without_prompts


def test_samples_of_a_completion_are_compared_turn_by_turn():
    samples, other = (assign_credit(algorithm).samples for algorithm in (Grpo(), DrGrpo()))
    assert compare_advantages(samples, samples)["coinciding"] == 7
    assert compare_advantages(samples, samples)["correlation"] == pytest.approx(1)
    assert compare_advantages(samples.slice(0, 4), other)["coinciding"] == 4


@pytest.mark.parametrize(("prompts", "load"), [([4, 4, 4], 4 + 1 + 2 + 5), ([4, 4, 7], 4 + 7 + 1 + 2 + 2)])
def test_a_plan_counts_prompts_of_one_length_as_shared_and_others_separately(prompts, load):
    sequences = Sequences(lengths=[5, 6, 9], prompts=prompts, groups=[0] * 3, patches=[0] * 3)
    assert sequences.count_load((0, 1, 2)) == load


def test_tokens_of_an_environment_are_inputs_and_no_targets():
    read = ModelInput.from_prompt([1, 2]).append_completion([3, 4]).append_observation([8, 9]).append_completion([5])
    numbers = np.array([1, 2, 3], np.float32)
    sample = TrainingSample(input=read, logprobs=-numbers, advantages=numbers, staleness=np.zeros(3, np.int16))
    batch = lay_out_samples([sample], [1.0])
    assert batch.microbatch.tokens_BT.tolist() == [[1, 2, 3, 4, 8, 9, 5]]
    assert batch.microbatch.targets_N.tolist() == [3, 4, 5]
    assert batch.microbatch.positions_N.tolist() == [1, 2, 5]
    assert batch.weights_N.tolist() == [1.0] * 3


# ---- rewards of environments


def record_turns(*rewards: float | None) -> tuple[TurnRecord, ...]:
    return tuple(TurnRecord(tokens=3, observation=2, reward=reward) for reward in rewards)


def test_the_reward_of_an_environment_is_the_sum_or_the_last_of_its_turns():
    episodes = [record_turns(1.0, None, 4.0), record_turns(None), ()]
    assert environment_rewards(episodes, EnvironmentReward()) == [Judgement(value, None) for value in (5.0, 0.0, 0.0)]
    assert environment_rewards(episodes, EnvironmentReward(aggregate="last"))[0] == Judgement(4.0, None)


def test_the_value_of_a_turn_is_the_discounted_sum_of_its_reward_and_later_ones():
    found = environment_rewards([record_turns(1.0, None, 4.0)], EnvironmentReward(per="turn", gamma=0.5))
    assert found == [Spans((0, 5, 10), (1 + 0.25 * 4, 0.5 * 4, 4.0))]
    assert returns_to_go([], 0.5) == ()
