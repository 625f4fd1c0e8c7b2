"""Episodes of agents in rollout shards: a row contains the branches of an episode, and can be read back as a tree."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch

from rheostat.infra.errors import Damaged
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.agents.branches import EpisodeRecord
from rheostat.models.agents.stored_branches import Ending, continues, fill, read, read_records
from rheostat.models.config.algorithms import Capo, DrGrpo, Grpo, Ppo
from rheostat.models.config.reward_terms import EnvironmentReward
from rheostat.models.credit.assign import CreditRule, credit_completions, turn_metrics
from rheostat.models.credit.inputs import TermColumns
from rheostat.models.engines.protocol import Completion
from rheostat.models.judges.verdicts import Judgement
from rheostat.models.judges.votes import read_episodes
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import ForwardInput, TokenLogprobs
from rheostat.models.modeling.policy import load_policy
from rheostat.models.records.model_input import ModelInput, rollout_inputs
from rheostat.models.records.schemas import ESTIMATE_SCHEMA, PROMPT_SCHEMA, FinishReason, score_schema
from rheostat.models.records.turn_prompts import split_at_prompts
from rheostat.models.rewards.environment import environment_rewards, find_turn_texts, read_turns, returns_to_go
from rheostat.models.rollouts.groups import ChatMessage, Group, PartialCompletion, Segment, build_table, read_groups
from rheostat.models.text.steps import Spans
from tests.support.episodes import forward_logprobs
from tests.support.policies import write_policy

PROMPT, SUBAGENT = (50, 51), (60, 61, 62)
TURNS = [
    # parent, new context, sampled tokens, policy version
    (None, PROMPT, (1, 2), 4),
    (None, SUBAGENT, (3,), 4),
    (0, (52, 53), (4, 5, 6), 4),
    (0, (54,), (7,), 5),  # a second request that continues turn 0
    (1, (63,), (8, 9), 5),
    (2, (), (10,), 5),  # continues the tokens without new context
]
BRANCHES = [[0, 2, 5], [1, 4], [3]]
WHOLE = [
    [*PROMPT, 1, 2, 52, 53, 4, 5, 6, 10],
    [*SUBAGENT, 3, 63, 8, 9],
    [*PROMPT, 1, 2, 54, 7],
]
"""All tokens of each branch."""
PROBLEM = ChatMessage(role="user", content="problem", name=None)
MESSAGES = tuple(ChatMessage(role=role, content=role[0], name=None) for role in ("user", "assistant", "tool"))
DONE = Ending(FinishReason.STOP, reward=1.0, rewards={1: 0.25, 9: 7.0}, messages=MESSAGES)
DRAFT = PartialCompletion(seed=11, input=ModelInput.from_prompt([40, 41]))


def sample_turn(tokens, reason=FinishReason.STOP):
    return Completion(tuple(tokens), tuple(-token / 8 for token in tokens), "", reason)


def record_turns(turns=TURNS, *, seed=DRAFT.seed):
    record = EpisodeRecord()
    for parent, context, tokens, version in turns:
        number = record.open_turn(record.place_after(parent, context), seed=seed)
        record.extend_turn(number, sample_turn(tokens), version)
        record.describe_turn(number, text=f"turn {decode(tokens)}", calls=number, errors=number // 2)
    return record


def decode(tokens):
    return " ".join(map(str, tokens))


def store(record, ending=DONE, draft=DRAFT):
    return fill(record, draft, ending, decode=decode)


def build_rollouts(*drafts):
    """Return a rollout table with one group."""
    return build_table([Group(0, "id", "problem", "answer", drafts, chat=(PROBLEM,))])


def reread(table, tmp_path):
    """Write a table as a rollout shard, and return its groups."""
    store = open_store(str(tmp_path))
    prompt = {"prompt_id": "id", "text": "problem", "tokens": [40, 41], "answer": "answer", "columns": "{}"}
    prompts = pa.Table.from_pylist([{**prompt, "images": []}], PROMPT_SCHEMA)
    return read_groups(read_shard(store, write_shard(store, table, kind="rollouts", metadata={})), prompts)


# ---- rows


def test_a_row_contains_the_branches_with_their_prompts_and_the_tree_of_turns():
    [row] = build_rollouts(store(record_turns())).to_pylist()
    assert row["prompt_tokens"] == [*PROMPT]
    assert row["completion_tokens"] == [*WHOLE[0][2:], *WHOLE[1], *WHOLE[2]]
    segments = [(each["policy_version"], each["tokens"]) for each in row["segments"]]
    first, second, third = [(4, 2), (-1, 2), (4, 3), (5, 1)], [(-2, 3), (4, 1), (-1, 1), (5, 2)], [(-2, 5), (5, 1)]
    assert segments == first + second + third
    assert [turn["order"] for turn in row["turns"]] == [number for branch in BRANCHES for number in branch]
    assert [turn["parent"] for turn in row["turns"]] == [None, 0, 2, None, 1, 0]
    assert [turn["observation"] for turn in row["turns"]] == [2, 0, 3, 1, 5, 0]
    assert [turn["reward"] for turn in row["turns"]] == [None, None, 1.0, 0.25, None, None]
    assert [turn["text"] for turn in row["turns"]][:2] == ["turn 1 2", "turn 4 5 6"]
    assert row["completion"] == "1 2 52 53 4 5 6 10\n3 63 8 9\n7"
    assert (row["messages"], row["seed"], row["finish_reason"]) == ([PROBLEM, *MESSAGES], 11, "stop")


def test_a_record_is_read_back_from_a_shard(tmp_path):
    record = record_turns()
    record.open_turn(record.place_after(5, (70,)), seed=11)  # a request without an answer is not stored
    [group] = reread(build_rollouts(store(record), store(EpisodeRecord())), tmp_path)
    found, empty = map(read, group.drafts)
    assert found.turns() == record_turns().turns()
    assert [[turn.number for turn in branch] for branch in found.branches()] == BRANCHES
    assert empty.turns() == []
    assert group.drafts[0].messages == MESSAGES


def test_a_cut_episode_continues_in_the_turn_that_was_cut_and_with_the_seed_of_its_request(tmp_path):
    record = record_turns(TURNS[:4])
    number = record.open_turn(record.place_after(1, (63,)), seed=11)
    record.extend_turn(number, sample_turn((8,), FinishReason.CUT), 5)
    cut = store(record, Ending(FinishReason.CUT, replayed=frozenset({0})))
    [group] = reread(build_rollouts(cut), tmp_path)
    assert (group.is_finished, group.drafts[0].num_generated) == (False, 8)
    assert [turn.replayed for turn in group.drafts[0].turns] == [True, False, False, False, False]
    again = read(group.drafts[0])
    assert again.turn(number) == record.turn(number)
    again.extend_turn(number, sample_turn((9,)), 6)
    assert again.open_turn(again.place_after(2, ()), seed=11) == 5
    again.extend_turn(5, sample_turn((10,)), 6)
    assert again.turn(number).segments == (Segment(5, 1), Segment(6, 1))
    whole = store(again)
    assert whole.input.completion.tolist() == store(record_turns()).input.completion.tolist()
    assert continues(read(whole), read(cut), version=6)


def test_equal_requests_of_different_branches_are_read_back_in_order_of_time():
    other_branch = (
        None,
        (*PROMPT, 1, 2, 52, 53),
        (7,),
        4,
    )  # the same tokens as the request of turn 2, but a new prompt
    record = record_turns([*TURNS[:2], other_branch, TURNS[2]])
    assert [record.turn(number).occurrence for number in (2, 3)] == [0, 1]
    assert read(store(record)).turns() == record.turns()


def test_an_episode_that_fails_before_its_first_request_keeps_its_prompt_and_names_the_error():
    failed = store(EpisodeRecord(), Ending(FinishReason.FAILED, error="exit code 3"), draft=store(record_turns()))
    assert (failed.input.tokens.tolist(), failed.segments, failed.logprobs) == ([*PROMPT], (), ())
    assert [(turn.error, turn.order) for turn in failed.turns] == [("exit code 3", None)]
    late = store(record_turns(), Ending(FinishReason.FAILED, error="out of memory"))
    assert [turn.order for turn in late.turns if turn.error] == [5]


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row["turns"][1].update(parent=None),
        lambda row: row["turns"][3].update(order=0),
        lambda row: row["turns"][5].update(parent=1),
        lambda row: row["turns"][5].update(parent=7),
        lambda row: row["turns"][0].update(tokens=1),
        lambda row: row["turns"][2].update(observation=2),
        lambda row: row["turns"].pop(),
        lambda row: row["turns"][1].update(order=None),
        lambda row: row["segments"][1].update(policy_version=4),
        lambda row: row["segments"][0].update(policy_version=-1),
        lambda row: (row["turns"][0].update(tokens=3), row["turns"][1].update(tokens=2)),
        lambda row: row["completion_tokens"].__setitem__(-2, 55) or row["completion_tokens"].__setitem__(-4, 55),
    ],
)
def test_turns_that_contradict_the_tokens_of_their_row_are_refused(change):
    table = build_rollouts(store(record_turns()))
    rows = table.to_pylist()
    change(rows[0])
    with pytest.raises(Damaged, match="contradict the tokens and segments of its row"):
        read_records(pa.Table.from_pylist(rows, table.schema))


def test_a_turn_with_tokens_that_no_policy_sampled_is_refused():
    table = build_rollouts(store(record_turns(TURNS[:3])))
    rows = table.to_pylist()
    assert (rows[0]["turns"][0]["tokens"], rows[0]["turns"][0]["observation"]) == (2, 2)
    rows[0]["turns"][0].update(tokens=4, observation=0)
    with pytest.raises(Damaged, match="contradict the tokens and segments of its row"):
        read_records(pa.Table.from_pylist(rows, table.schema))


# ---- training


def test_each_branch_is_a_training_sequence_and_each_sampled_token_is_trained_once():
    rows, row_K = split_at_prompts(build_rollouts(store(record_turns())))
    inputs = rollout_inputs(rows)
    assert row_K.tolist() == [0, 0, 0]
    assert [each.tokens.tolist() for each in inputs] == WHOLE
    trained = [each.tokens[each.trained_positions].tolist() for each in inputs]
    sampled = [token for _, _, tokens, _ in TURNS for token in tokens]
    assert sorted(token for row in trained for token in row) == sorted(sampled)
    assert trained == [[1, 2, 4, 5, 6, 10], [3, 8, 9], [7]]


def test_log_probs_are_those_of_a_forward_pass_of_each_branch(tmp_path):
    write_policy(tmp_path / "policy")
    forward = TokenLogprobs(load_policy(tmp_path / "policy", device="cpu", dtype=torch.float32).eval(), temperature=1.0)

    def score(context, tokens):
        sequence = ModelInput.from_prompt(context).append_completion(tokens)
        with torch.no_grad():
            microbatch = ForwardInput.from_microbatch(lay_out([sequence]), torch.device("cpu"), shares=False)
            return tuple(forward(microbatch).tolist())

    record = EpisodeRecord()
    for parent, context, tokens, version in TURNS:
        place = record.place_after(parent, context)
        number = record.open_turn(place, seed=11)
        logprobs = score(record.context_of(number).tolist(), tokens)
        record.extend_turn(number, Completion(tokens, logprobs, "", FinishReason.STOP), version)
    rows, _ = split_at_prompts(build_rollouts(store(record)))
    pairs = [*forward_logprobs(tmp_path / "policy", rows)]
    assert len(pairs) == 3
    for computed, stored in pairs:
        np.testing.assert_allclose(stored, computed, rtol=0, atol=2e-5)


def in_order_of_time():
    """Return a row with the sampled tokens of the episode in order of time, without branches."""
    draft = DRAFT
    for _, _, tokens, version in TURNS:
        draft = draft.append_completion(sample_turn(tokens), version)
    return replace(draft, finish_reason=FinishReason.STOP)


OTHER = [(None, PROMPT, (20, 21), 4), (None, SUBAGENT, (22,), 5)]
"""Turns of the other episode of the group."""
TIMES = [[number for number, turn in enumerate(turns) for _ in turn[2]] for turns in (TURNS, OTHER)]
"""Number of the turn of each sampled token, in order of time."""


def assign_credit(algorithm, *drafts, values):
    """Return the samples of two episodes with rewards of their turns, in which the critic's values are `values`."""
    table = build_rollouts(*drafts)
    episodes = read_turns(table)
    scores, estimates = [], []
    for sample, (turns, draft) in enumerate(zip(episodes, drafts, strict=True)):
        place = {"prompt_row": 0, "sample": sample}
        if turns:
            starts = np.cumsum([0, *(turn.tokens + turn.observation for turn in turns)])[:-1].tolist()
            numbers = [float(turn.order) for turn in turns]
        else:  # tokens in order of time
            times = TIMES[sample]
            starts = [0, *(at for at, (one, other) in enumerate(pairwise(times), start=1) if one != other)]
            numbers = [float(times[at]) for at in starts]
        scores.append(
            place | {"reward": 1.0 - sample, "reward_numeric": 1.0 - sample, "reward_turns": 0.0}
            | {"spans_turns": starts, "values_turns": [number - sample for number in numbers]}
        )  # fmt: skip
        completion = draft.input.completion.tolist()
        estimates.append(place | {"values": [values.get(token, 0.0) for token in completion]})
    rule = CreditRule(terms=(TermColumns("numeric"), TermColumns("turns", is_process=True)), algorithm=algorithm,
                      policy_version=6)  # fmt: skip
    score_table = pa.Table.from_pylist(scores, score_schema(("numeric", "turns"), ("turns",)))
    critic = [pa.Table.from_pylist(estimates, ESTIMATE_SCHEMA)] if algorithm.value_model is not None else []
    return credit_completions([table], [score_table], rule, auxiliary_scores=critic).samples.to_pylist()


@pytest.mark.parametrize("algorithm", [Grpo(), Capo(), Ppo(gamma=0.9)], ids=lambda each: each.label)
def test_credit_of_branches_is_that_of_their_tokens_in_order_of_time(algorithm):
    values = {token: token / 32 for token in range(1, 23)}
    names = ["advantages", *(["returns"] if algorithm.value_model is not None else [])]
    other = replace(DRAFT.append_completion(sample_turn((20, 21)), 4).append_completion(sample_turn((22,)), 5),
                    finish_reason=FinishReason.STOP)  # fmt: skip
    whole = assign_credit(algorithm, in_order_of_time(), other, values=values)
    branched = assign_credit(algorithm, store(record_turns()), store(record_turns(OTHER)), values=values)
    assert (len(whole), len(branched)) == (2, 5)
    assert [row["tokens"] for row in branched][:3] == WHOLE
    for name in names:
        expected, found = {}, {}
        for rows, numbers in ((whole, expected), (branched, found)):
            for row in rows:
                completion = row["tokens"][row["num_prompt_tokens"] :]
                own = zip(completion, row[name], row["staleness"], strict=True)
                numbers |= {token: number for token, number, age in own if age >= 0}
        assert found == pytest.approx(expected, abs=1e-6)
        assert len(found) == 13 and len({*found.values()}) > 1


def test_tokens_of_branches_that_were_not_sampled_have_no_credit():
    rows = assign_credit(DrGrpo(), store(record_turns()), store(record_turns(OTHER)), values={})
    for row in rows:
        for advantage, logprob, age in zip(row["advantages"], row["logprobs"], row["staleness"], strict=True):
            assert (age == -1) <= (advantage == 0 and logprob == 0)
    assert [row["staleness"] for row in rows][:3] == [[2, 2, -1, -1, 2, 2, 2, 1], [2, -1, 1, 1], [1]]


def test_metrics_count_branches_and_separate_their_prompts_from_observations():
    metrics = turn_metrics(build_rollouts(store(record_turns()), store(record_turns(OTHER))))
    assert metrics["turns_mean"] == (6 + 2) / 2
    assert metrics["branches_mean"] == (3 + 2) / 2
    assert metrics["turn_prompt_tokens_mean"] == (3 + 5 + 3) / 2
    assert metrics["observation_tokens_mean"] == (2 + 1) / 2


# ---- rewards


def test_rewards_of_turns_are_summed_in_order_of_time():
    ending = Ending(FinishReason.STOP, reward=1.0, rewards={number: float(number) for number in range(5)})
    episodes = read_turns(build_rollouts(store(record_turns(), ending)))
    by_time = returns_to_go([0.0, 1.0, 2.0, 3.0, 4.0, 1.0], 0.5)
    rows = [number for branch in BRANCHES for number in branch]
    [spans] = environment_rewards(episodes, EnvironmentReward(per="turn", gamma=0.5))
    assert spans == Spans((0, 4, 7, 11, 13, 20), tuple(by_time[number] for number in rows))
    assert environment_rewards(episodes, EnvironmentReward()) == [Judgement(11.0, None)]
    assert environment_rewards(episodes, EnvironmentReward(aggregate="last")) == [Judgement(1.0, None)]


def test_a_reward_of_the_whole_episode_is_added_to_that_of_its_last_turn():
    filled = store(record_turns(), Ending(FinishReason.STOP, reward=1.0, rewards={5: 0.5}))
    assert [turn.reward for turn in filled.turns if turn.reward is not None] == [1.5]


def test_functions_and_judges_receive_the_texts_of_turns():
    texts = [
        ("user", "u"),
        ("assistant", "example"),
        ("user", "q"),
        ("assistant", "a"),
        ("tool", "t"),
        ("assistant", "b"),
    ]
    messages = tuple(ChatMessage(role=role, content=text, name=None) for role, text in texts)
    filled = store(record_turns(TURNS[:3]), replace(DONE, messages=messages))
    table = build_rollouts(filled)
    [turns] = read_turns(table)
    assert find_turn_texts(turns, messages) == ("turn 1 2", "turn 4 5 6", "turn 3")
    assert read_episodes(table) == [(("assistant", "a"), ("tool", "t"), ("assistant", "b"))]
