"""Episodes of a policy whose template rewrites the past: each turn is written after a prompt of its own."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from infra.store.bundles import publish_bundle
from infra.store.shards import ShardRef, read_shard, write_shard
from infra.store.storage import open_store
from models.config.algorithms import Capo
from models.config.engines import SamplingConfig, TransformersEngine
from models.config.environments import EpisodeSettings, TargetEnvironment, ToolsEnvironment
from models.config.rewards import ScoringConfig
from models.data.problems import Message
from models.modeling.layout import lay_out
from models.modeling.logprobs import ForwardInput, TokenLogprobs
from models.modeling.policy import load_policy
from models.records.model_input import rollout_inputs
from models.records.schemas import PROMPT_SCHEMA, ROLLOUT_SCHEMA
from models.records.turn_prompts import cut_at_prompts
from models.records.versions import ModelVersion
from models.records.work import CreditWork, RolloutWork, ScoredShard, ScoringWork
from models.text.tokenizer import tokenize_prompts
from models.workers.rollout import RolloutWorker
from models.workers.scoring import ScoringWorker
from tests.support.chat_templates import tokenizer_of
from tests.support.interleaving import InterleavingTransformers
from tests.support.policies import write_chat_policy
from tests.support.rollout_workers import ENGINE, digest

SAMPLING = SamplingConfig(max_new_tokens=120)
LIKELY = {"<|im_end|>": 0.1, "</think>": 0.1, "<think>": 0.03}
"""So that turns end, and most of them have thoughts, which the template leaves out once a message of a user follows."""
CHATS = [(Message("system", "Think."), Message("user", f"How many are {n} and 2?")) for n in range(6)]
ECHO = {"parser": "none", "turn_tokens": 12, "history": "per_turn", "processes": 2}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Play a shard of chats."""
    home = tmp_path_factory.mktemp("played")
    write_chat_policy(home / "policy", "qwen-3", likely=LIKELY)
    store = open_store(f"{home}/run")
    prompts = tokenize_prompts(list(CHATS), tokenizer_of("qwen-3"), sources=["here"] * len(CHATS))
    columns = {
        "prompt_id": [f"{row:016x}" for row in range(len(CHATS))],
        "text": [prompt.text for prompt in prompts],
        "tokens": [prompt.input.tokens for prompt in prompts],
        "images": [[]] * len(CHATS),
        "answer": ["2"] * len(CHATS),
        "messages": [[{"role": m.role, "content": m.text, "name": None} for m in chat] for chat in CHATS],
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

    def run(settings: EpisodeSettings, engine: TransformersEngine = ENGINE, **changes: object):
        worker = RolloutWorker(str(home), "run", engine, 1, environment=settings)
        try:
            return worker.generate(replace(work, **changes))
        finally:
            worker.close()

    run.store, run.home, run.work = store, home, work
    return run


def echo(**settings: object) -> TargetEnvironment:
    return TargetEnvironment(target="tests.support.games:Echo", **{**ECHO, **settings})


@pytest.fixture(scope="module")
def shard(played) -> ShardRef:
    [shard] = played(echo(options={"reward": 1.0})).shards
    return shard


@pytest.fixture(scope="module")
def table(played, shard) -> pa.Table:
    return read_shard(played.store, shard)


def test_every_prompt_is_what_the_template_renders_of_the_messages_before_it(table):
    tokenizer, told, forgotten = tokenizer_of("qwen-3"), 0, 0
    cut, place = cut_at_prompts(table)
    parts = iter(cut["prompt_tokens"].to_pylist())
    for row in table.to_pylist():
        assert row["messages"][:2] == [
            {"role": m.role, "content": m.text, "name": None} for m in CHATS[row["prompt_row"]]
        ]
        chat = [{"role": each["role"], "content": each["content"]} for each in row["messages"]]
        turns = [at for at, message in enumerate(chat) if message["role"] == "assistant"]
        assert len(turns) == len(row["turns"])
        for at in turns:
            expected = tokenizer.apply_chat_template(
                chat[:at], tokenize=True, return_dict=False, add_generation_prompt=True
            )
            assert next(parts) == expected
            told += at != turns[0]
            forgotten += any("</think>" in each["content"] for each in chat[:at] if each["role"] == "assistant")
            assert "</think>" not in tokenizer.decode(expected)
    assert next(parts, None) is None and len(place) > len(table)
    assert told > 10 and forgotten > 5


def test_log_probs_are_those_of_the_turn_after_its_own_prompt_by_a_forward_pass_of_its_own(played, table):
    cut, _ = cut_at_prompts(table)
    forward = TokenLogprobs(
        load_policy(played.home / "policy", device="cpu", dtype=torch.float32).eval(), temperature=1.0
    )
    for read, logprobs in zip(rollout_inputs(cut), cut["logprobs"].to_pylist(), strict=True):
        with torch.no_grad():
            found = forward(ForwardInput.of(lay_out([read]), torch.device("cpu"), shares=False)).numpy()
        np.testing.assert_allclose(found, np.array(logprobs), atol=2e-5)


def test_turns_have_draws_of_their_own(table):
    """One seed for all turns of an episode would have them begin alike."""
    cut, _ = cut_at_prompts(table)
    firsts: dict[tuple[int, int], list[int]] = {}
    for row in cut.to_pylist():
        firsts.setdefault((row["prompt_row"], row["sample"]), []).append(row["completion_tokens"][0])
    several = [tokens for tokens in firsts.values() if len(tokens) > 1]
    assert sum(len(set(tokens)) > 1 for tokens in several) > len(several) / 2


def test_segments_and_turns_tell_what_stands_where_and_the_text_has_all_that_was_said(table):
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


def test_the_same_work_gives_the_same_bits_with_any_number_of_processes_and_the_same_episodes_on_any_engine(played):
    one, four, paced = played(echo(processes=1)), played(echo(processes=4)), played(echo(), InterleavingTransformers())
    assert digest(one) == digest(four)
    rows, others = (read_shard(played.store, each.shards[0]).to_pylist() for each in (one, paced))
    for row, other in zip(rows, others, strict=True):
        assert row.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-5)  # batches have other neighbours
        assert row == other


def test_a_sequence_has_at_most_what_max_new_tokens_leaves_and_all_turns_together_may_have_more(played):
    room = 48
    found = played(echo(turn_tokens=20), sampling=SamplingConfig(max_new_tokens=room))
    whole = read_shard(played.store, found.shards[0])
    cut, place = cut_at_prompts(whole)
    first = np.array([len(tokens) for tokens in whole["prompt_tokens"].to_pylist()])
    lengths = [len(row["prompt_tokens"]) + len(row["completion_tokens"]) for row in cut.to_pylist()]
    assert all(length - first[row] <= room for length, row in zip(lengths, place, strict=True))
    assert "length" in whole["finish_reason"].to_pylist()
    tight = played(echo(max_turns=3), sampling=SAMPLING, rows=(0,))
    assert read_shard(played.store, tight.shards[0]).num_rows == 4


def test_answers_of_tools_follow_the_calls_that_they_answer(played):
    tools = ToolsEnvironment(
        tools=("tests.support.games:price",), parser="tests.integration.engines.test_own_prompts:always_calls",
        turn_tokens=24, processes=1, history="per_turn",
    )  # fmt: skip
    tokenizer = tokenizer_of("qwen-3")
    rows = read_shard(played.store, played(tools, sampling=SamplingConfig(max_new_tokens=900)).shards[0]).to_pylist()
    table, _ = cut_at_prompts(pa.Table.from_pylist(rows, ROLLOUT_SCHEMA))
    later = [tokenizer.decode(tokens) for tokens in table["prompt_tokens"].to_pylist()]
    called = [text for text in later if "<tool_response>" in text]
    assert called, [row["turns"] for row in rows]
    assert all(
        '<tool_call>\n{"name": "price", "arguments": {"item": "bread"}}\n</tool_call>' in text
        and "<tool_response>\n5 crowns\n</tool_response>" in text
        for text in called
    )


def always_calls(text):
    from models.text.calls import Call, ParsedTurn

    return ParsedTurn("", (Call("price", {"item": "bread"}),))


def test_scores_and_credit_are_of_episodes_and_samples_of_their_turns(played, shard, table):
    store = played.store
    scoring = ScoringConfig.model_validate({"rewards": [{"kind": "environment", "per": "turn", "gamma": 1.0}]})
    worker = ScoringWorker(str(played.home), "run", scoring, Capo())
    try:
        work = ScoringWork(iteration=3, rollouts=shard, tokenizer=played.work.policy.weights)
        [scores] = worker.score(work).shards
        pair = ScoredShard(rollouts=shard, scores=scores)
        [samples] = worker.credit(CreditWork(iteration=3, shards=(pair,), policy_version=2)).shards
    finally:
        worker.close()
    returns = [row["values_environment"] for row in read_shard(store, scores).to_pylist()]
    for row, found in zip(table.to_pylist(), returns, strict=True):
        given = [turn["reward"] or 0.0 for turn in row["turns"]]
        assert found == [sum(given[at:]) for at in range(len(given))]
    cut, _ = cut_at_prompts(table)
    learnt = read_shard(store, samples).to_pylist()
    assert [row["tokens"] for row in learnt] == [
        row["prompt_tokens"] + row["completion_tokens"] for row in cut.to_pylist()
    ]
    assert [row["logprobs"] for row in learnt] == cut["logprobs"].to_pylist()
    assert any(len(set(row["advantages"])) > 1 or any(row["advantages"]) for row in learnt)
