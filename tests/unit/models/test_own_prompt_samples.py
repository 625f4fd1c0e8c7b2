"""Credit, samples and weights of episodes whose turns have prompts of their own, by numbers worked by hand."""

import numpy as np
import pyarrow as pa
import pytest

from infra.store.shards import write_shard
from infra.store.storage import open_store
from models.config.algorithms import Capo, DrGrpo, Grpo, Ppo, ReinforcePlusPlus
from models.config.objectives import ConstantMean, PpoClip, SequenceMean, TokenMean, UpdateConfig
from models.credit.assign import CreditRule, credit_completions
from models.credit.comparison import compare_advantages
from models.credit.inputs import TermColumns
from models.modeling.batching import Sequences, plan_steps
from models.records.model_input import RENDERED, rollout_inputs
from models.records.schemas import ESTIMATE_SCHEMA, ROLLOUT_SCHEMA, score_schema
from models.records.turn_prompts import cut_at_prompts, turn_prompts
from models.training.samples import open_samples
from models.training.update_steps import prepare

# Two groups of two episodes. Of each the turns that the policy wrote; their prompts are 50, 51, …
TURNS = [[[11, 12, 13], [14]], [[21, 22]], [[31], [32, 33], [34, 35]], [[41, 42, 43, 44]]]
PROMPTS = [[1, 2], [50, 51, 52], [53, 54, 55, 56]]
REWARDS = [1.0, 0.0, 0.25, 2.0]
NUMERIC = TermColumns("numeric")
CENTRED = [0.5, -0.5, -0.875, 0.875]
"""Rewards less the mean of their group's two episodes, however many turns they have."""


def tables(*, whole: bool = True):
    """Episodes, scores and a critic's values; not `whole`: as if every turn had been written in one stream."""
    rollouts, scores, estimates = [], [], []
    random = np.random.default_rng(0)
    for number, turns in enumerate(TURNS):
        place = {"prompt_row": number // 2, "sample": number % 2}
        tokens, segments, starts, mask = [], [], [], []
        for turn, prompt in zip(turns, [[], *PROMPTS[1:]], strict=False):
            given = prompt if whole else []
            starts.append(len(tokens) + len(given) if not starts or not whole else len(tokens))
            tokens += [*given, *turn]
            mask += [False] * len(given) + [True] * len(turn)
            segments += [{"policy_version": RENDERED, "tokens": len(given)}] * bool(given)
            segments += [{"policy_version": 5, "tokens": len(turn)}]
        drawn, values = -random.random(20), random.random(20)
        logprobs = np.zeros(len(tokens))
        logprobs[mask] = drawn[: sum(mask)]
        said = np.zeros(len(tokens))
        said[mask] = values[: sum(mask)]
        rollouts.append(place | {
            "prompt_tokens": PROMPTS[0], "images": [], "completion_tokens": tokens, "finish_reason": "stop",
            "logprobs": logprobs.tolist(), "segments": segments,
        })  # fmt: skip
        steps = [float(turn - number) for turn in range(len(turns))]
        scores.append(place | {"reward": REWARDS[number], "reward_numeric": REWARDS[number], "reward_turns": 0.0,
                               "spans_turns": starts, "values_turns": steps})  # fmt: skip
        estimates.append(place | {"values": said.tolist()})
    return (
        pa.Table.from_pylist(rollouts, ROLLOUT_SCHEMA),
        pa.Table.from_pylist(scores, score_schema(("numeric", "turns"), ("turns",))),
        pa.Table.from_pylist(estimates, ESTIMATE_SCHEMA),
    )


def credited(algorithm, *, whole=True, terms=(NUMERIC,)):
    rollouts, scores, estimates = tables(whole=whole)
    critic = [estimates] if algorithm.value_model is not None else []
    rule = CreditRule(terms=terms, algorithm=algorithm, policy_version=6)
    return credit_completions([rollouts], [scores], rule, estimates=critic)


def test_each_turn_is_a_sample_of_its_own_prompt_and_the_tokens_that_were_sampled_after_it():
    rollouts, *_ = tables()
    samples = credited(DrGrpo()).samples.to_pylist()
    expected = [
        (number // 2, number % 2, [*prompt, *turn], len(prompt))
        for number, turns in enumerate(TURNS)
        for turn, prompt in zip(turns, PROMPTS, strict=False)
    ]
    assert [(row["prompt_row"], row["sample"], row["tokens"], row["num_prompt_tokens"]) for row in samples] == expected
    drawn = [
        value
        for row in rollouts.to_pylist()
        for value, token in zip(row["logprobs"], row["completion_tokens"], strict=True)
        if token < 50
    ]
    assert [value for row in samples for value in row["logprobs"]] == drawn
    assert {age for row in samples for age in row["staleness"]} == {1}


def test_a_group_has_as_many_rewards_as_episodes_and_every_turn_its_episodes_advantage():
    samples = credited(DrGrpo()).samples.to_pylist()
    expected = [[CENTRED[number]] * len(turn) for number, turns in enumerate(TURNS) for turn in turns]
    assert [row["advantages"] for row in samples] == expected
    standardised = credited(Grpo()).samples.to_pylist()
    for row, found in zip(expected, standardised, strict=True):
        assert found["advantages"] == pytest.approx(np.sign(row), abs=1e-5)  # the deviation is the distance to the mean


def test_metrics_count_episodes_and_the_prompts_of_their_turns():
    rollouts, scores, _ = tables()
    rows = rollouts.to_pylist()
    for row, turns in zip(rows, TURNS, strict=True):
        read = [*map(len, PROMPTS[1 : len(turns)]), 0]
        row["turns"] = [{"tokens": len(turn), "observation": said} for turn, said in zip(turns, read, strict=True)]
        for turn in row["turns"]:
            turn |= {"calls": 0, "errors": 0}
    table = pa.Table.from_pylist(rows, ROLLOUT_SCHEMA)
    rule = CreditRule(terms=(TermColumns("numeric"),), algorithm=Grpo(), policy_version=6)
    found = credit_completions([table], [scores], rule).metrics
    assert (found["samples"], found["completions"], found["groups"]) == (7, 4, 2)
    assert found["length_mean"] == (4 + 2 + 5 + 4) / 4
    assert found["turn_prompt_tokens_mean"] == (3 + 0 + 7 + 0) / 4
    assert "observation_tokens_mean" not in found


@pytest.mark.parametrize("algorithm", [Grpo(), ReinforcePlusPlus(), Capo(), Ppo()], ids=lambda each: each.known_as)
def test_credit_over_episodes_is_that_of_the_same_turns_in_one_stream(algorithm):
    terms = (TermColumns("numeric"), TermColumns("turns", is_process=True))
    cut, one = (credited(algorithm, whole=whole, terms=terms).samples.to_pylist() for whole in (True, False))
    assert len(cut) == 7 and len(one) == 4
    for name in ("advantages", *(("returns", "values") if algorithm.value_model is not None else ())):
        assert [value for row in cut for value in row[name]] == [value for row in one for value in row[name]]
    assert any(any(row["advantages"]) for row in cut)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        (TokenMean(), [1 / 15] * 4),
        (SequenceMean(), [1 / 16, 1 / 8, 1 / 20, 1 / 16]),
        (ConstantMean(length=10), [1 / 40] * 4),
    ],
    ids=["token", "sequence", "constant"],
)
def test_losses_are_divided_by_episodes_and_their_tokens_however_many_samples_they_are(aggregation, weights, tmp_path):
    store = open_store(str(tmp_path))
    samples = credited(DrGrpo()).samples
    opened = open_samples(store, [write_shard(store, samples, kind="samples", metadata={})])
    config = UpdateConfig(loss=PpoClip(aggregation=aggregation))
    plans = plan_steps(opened.sequences(None), minibatches=1, ranks=1, microbatch_tokens=16, seed=0)
    [batches] = prepare(opened, plans, config=config, rank=0)
    assert len(batches) > 1, "turns of an episode are in several passes"
    loss = -sum(float(batch.weights_N @ batch.advantages_N) for batch in batches)  # where all ratios are 1
    lengths = [sum(map(len, turns)) for turns in TURNS]
    by_hand = -sum(w * n * a for w, n, a in zip(weights, lengths, CENTRED, strict=True))
    assert loss == pytest.approx(by_hand, abs=1e-7)
    if isinstance(aggregation, TokenMean):
        assert by_hand == pytest.approx(-0.125 / 15)


def test_rows_are_cut_where_a_turn_has_a_prompt_and_nowhere_else():
    rollouts, *_ = tables()
    rows, place = cut_at_prompts(rollouts)
    assert place.tolist() == [0, 0, 1, 2, 2, 2, 3]
    assert turn_prompts(rollouts).tolist() == [1, 0, 2, 0]
    read = rollout_inputs(rows)
    assert [each.completion.tolist() for each in read] == [turn for turns in TURNS for turn in turns]
    assert [each.prompt.tolist() for each in read] == [p for t in TURNS for p in PROMPTS[: len(t)]]
    stream, _, _ = tables(whole=False)
    assert cut_at_prompts(stream)[0] is stream


def test_samples_of_a_completion_are_compared_turn_by_turn():
    samples = credited(Grpo()).samples
    other = credited(DrGrpo()).samples
    assert compare_advantages(samples, samples)["coinciding"] == 7
    assert compare_advantages(samples, samples)["correlation"] == pytest.approx(1)
    assert compare_advantages(samples.slice(0, 4), other)["coinciding"] == 4


def test_a_plan_takes_prompts_of_one_length_for_shared_and_counts_others_apart():
    for prompts, load in (([4, 4, 4], 4 + 1 + 2 + 5), ([4, 4, 7], 4 + 7 + 1 + 2 + 2)):
        sequences = Sequences(lengths=[5, 6, 9], prompts=prompts, groups=[0] * 3, patches=[0] * 3)
        assert sequences.load((0, 1, 2)) == load
