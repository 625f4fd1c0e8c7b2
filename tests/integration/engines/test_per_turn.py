"""Episodes whose chat template changes earlier messages, so that each turn has a separate prompt."""

import json

import numpy as np
import pyarrow as pa
import pytest

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Capo
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.environments import ToolsEnvironment
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.data.problems import Message
from rheostat.models.records.schemas import PROMPT_SCHEMA, ROLLOUT_SCHEMA
from rheostat.models.records.turn_prompts import split_at_prompts
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import CreditWork, RolloutWork, ScoredShard, ScoringWork
from rheostat.models.text.tokenizer import tokenize_prompts
from rheostat.models.workers.scoring import ScoringWorker
from tests.support.chat_templates import tokenizer_of
from tests.support.episodes import Episodes, forward_logprobs, require_equal_rows, target_environment
from tests.support.policies import write_chat_policy
from tests.support.rollout_workers import digest

SAMPLING = SamplingConfig(max_new_tokens=120)
LIKELY = {"<|im_end|>": 0.1, "</think>": 0.1, "<think>": 0.03}
"""Probabilities with which turns end and most turns have thoughts. The template omits thoughts before the last user
message."""
CHATS = [(Message("system", "Think."), Message("user", f"How many are {n} and 2?")) for n in range(6)]


def echo(**settings: object):
    return target_environment(prompts="chat", history="per_turn", **settings)


@pytest.fixture(scope="module")
def episodes(tmp_path_factory) -> Episodes:
    home = tmp_path_factory.mktemp("chats")
    write_chat_policy(home / "policy", "qwen-3", likely=LIKELY)
    store = open_store(f"{home}/run")
    prompts = tokenize_prompts(list(CHATS), tokenizer_of("qwen-3"), sources=["here"] * len(CHATS))
    columns = {
        "prompt_id": [f"{row:016x}" for row in range(len(CHATS))],
        "text": [prompt.text for prompt in prompts],
        "tokens": [prompt.input.tokens for prompt in prompts],
        "images": [[]] * len(CHATS),
        "answer": ["2"] * len(CHATS),
        "messages": [[as_dict(message) for message in chat] for chat in CHATS],
        "columns": [json.dumps({})] * len(CHATS),
    }
    work = RolloutWork(
        iteration=3,
        policy=ModelVersion(version=2, weights=publish_bundle(store, home / "policy", prefix="policies")),
        prompts=write_shard(store, pa.table(columns, schema=PROMPT_SCHEMA), kind="prompts", metadata={}),
        rows=(0, 1, 2, 4, 5),
        group_size=4,
        sampling=SAMPLING,
        seed=5,
    )
    return Episodes(home, work)


def as_dict(message: Message) -> dict[str, object]:
    return {"role": message.role, "content": message.text, "name": None}


@pytest.fixture(scope="module")
def shard(episodes) -> ShardRef:
    [shard] = episodes.play(echo(options={"reward": 1.0})).shards
    return shard


@pytest.fixture(scope="module")
def table(episodes, shard) -> pa.Table:
    return read_shard(episodes.store, shard)


def test_the_prompt_of_a_turn_is_the_template_rendered_with_the_messages_before_it(table):
    tokenizer, num_later, num_without_thoughts = tokenizer_of("qwen-3"), 0, 0
    cut, place = split_at_prompts(table)
    parts = iter(cut["prompt_tokens"].to_pylist())
    for row in table.to_pylist():
        assert row["messages"][:2] == [as_dict(message) for message in CHATS[row["prompt_row"]]]
        chat = [{"role": each["role"], "content": each["content"]} for each in row["messages"]]
        turns = [at for at, message in enumerate(chat) if message["role"] == "assistant"]
        assert len(turns) == len(row["turns"])
        for at in turns:
            expected = tokenizer.apply_chat_template(
                chat[:at], tokenize=True, return_dict=False, add_generation_prompt=True
            )
            assert next(parts) == expected
            num_later += at != turns[0]
            num_without_thoughts += any(
                "</think>" in each["content"] for each in chat[:at] if each["role"] == "assistant"
            )
            assert "</think>" not in tokenizer.decode(expected)
    assert next(parts, None) is None and len(place) > len(table)
    assert num_later > 10 and num_without_thoughts > 5


def test_log_probs_equal_those_of_a_forward_pass_over_the_prompt_and_tokens_of_the_turn(episodes, table):
    cut, _ = split_at_prompts(table)
    for computed, recorded in forward_logprobs(episodes.policy, cut):
        np.testing.assert_allclose(computed, recorded, atol=2e-5)


def test_turns_of_an_episode_are_sampled_with_different_seeds(table):
    """With one seed for all turns of an episode most turns would begin with the same token."""
    cut, _ = split_at_prompts(table)
    firsts: dict[tuple[int, int], list[int]] = {}
    for row in cut.to_pylist():
        firsts.setdefault((row["prompt_row"], row["sample"]), []).append(row["completion_tokens"][0])
    several = [tokens for tokens in firsts.values() if len(tokens) > 1]
    assert sum(len(set(tokens)) > 1 for tokens in several) > len(several) / 2


def test_segments_and_turns_cover_the_completion_and_its_text_has_every_message(table):
    for row in table.to_pylist():
        lengths = [
            part for turn in row["turns"] for part in ((2, turn["tokens"]), (-2, turn["observation"])) if part[1]
        ]
        assert [(each["policy_version"], each["tokens"]) for each in row["segments"]] == lengths
        at = 0
        for version, length in lengths:
            assert (version == -2) == (row["logprobs"][at : at + length] == [0.0] * length)
            at += length
        assert at == len(row["completion_tokens"])
        for message in row["messages"][2:]:
            if message["role"] == "user":
                assert f"\n{message['content']}\n" in row["completion"]
        assert row["prompt"] not in row["completion"]


@pytest.mark.thorough
def test_one_and_four_processes_give_equal_bits_and_a_free_pace_equal_episodes(episodes):
    one, four = episodes.play(echo(processes=1)), episodes.play(echo(processes=4))
    assert digest(one) == digest(four)
    require_equal_rows(episodes.read_rows(*one.shards), episodes.play_rows(echo(pace="free")))


def test_max_new_tokens_limits_each_turn_together_with_the_growth_of_its_prompt(episodes):
    limit = 48
    [shard] = episodes.play(echo(turn_tokens=20), sampling=SamplingConfig(max_new_tokens=limit)).shards
    whole = read_shard(episodes.store, shard)
    cut, place = split_at_prompts(whole)
    first = np.array([len(tokens) for tokens in whole["prompt_tokens"].to_pylist()])
    lengths = [len(row["prompt_tokens"]) + len(row["completion_tokens"]) for row in cut.to_pylist()]
    assert all(length - first[row] <= limit for length, row in zip(lengths, place, strict=True))
    assert "length" in whole["finish_reason"].to_pylist()
    assert len(episodes.play_rows(echo(max_turns=3), rows=(0,))) == 4


def test_the_answer_of_a_tool_follows_its_call(episodes):
    tools = ToolsEnvironment(
        tools=("tests.support.games:price",), parser="tests.support.environments:always_calls",
        turn_tokens=24, processes=1, history="per_turn",
    )  # fmt: skip
    tokenizer = tokenizer_of("qwen-3")
    rows = episodes.play_rows(tools, sampling=SamplingConfig(max_new_tokens=900))
    table, _ = split_at_prompts(pa.Table.from_pylist(rows, ROLLOUT_SCHEMA))
    later = [tokenizer.decode(tokens) for tokens in table["prompt_tokens"].to_pylist()]
    called = [text for text in later if "<tool_response>" in text]
    assert called, [row["turns"] for row in rows]
    assert all(
        '<tool_call>\n{"name": "price", "arguments": {"item": "bread"}}\n</tool_call>' in text
        and "<tool_response>\n5 crowns\n</tool_response>" in text
        for text in called
    )


def test_episodes_get_scores_and_credit_and_each_turn_becomes_a_sample(episodes, shard, table):
    store = episodes.store
    scoring = ScoringConfig.model_validate({"rewards": [{"kind": "environment", "per": "turn", "gamma": 1.0}]})
    worker = ScoringWorker(str(episodes.home), "run", scoring, Capo())
    try:
        work = ScoringWork(iteration=3, rollouts=shard, tokenizer=episodes.work.policy.weights)
        [scores] = worker.score(work).shards
        pair = ScoredShard(rollouts=shard, scores=scores)
        [samples] = worker.credit(CreditWork(iteration=3, shards=(pair,), policy_version=2)).shards
    finally:
        worker.close()
    returns = [row["values_environment"] for row in read_shard(store, scores).to_pylist()]
    for row, values in zip(table.to_pylist(), returns, strict=True):
        rewards = [turn["reward"] or 0.0 for turn in row["turns"]]
        assert values == [sum(rewards[at:]) for at in range(len(rewards))]
    cut, _ = split_at_prompts(table)
    trained = read_shard(store, samples).to_pylist()
    assert [row["tokens"] for row in trained] == [
        row["prompt_tokens"] + row["completion_tokens"] for row in cut.to_pylist()
    ]
    assert [row["logprobs"] for row in trained] == cut["logprobs"].to_pylist()
    assert any(len(set(row["advantages"])) > 1 or any(row["advantages"]) for row in trained)
