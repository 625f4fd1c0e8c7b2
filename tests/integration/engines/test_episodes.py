"""Episodes: tokens in, tokens out, and environments that hang, crash, lie or are killed."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from infra.errors import BadInput
from infra.store.shards import read_shard
from infra.store.storage import open_store
from models.config.engines import SamplingConfig, TransformersEngine
from models.config.environments import TargetEnvironment
from models.modeling.layout import lay_out
from models.modeling.logprobs import ForwardInput, TokenLogprobs
from models.modeling.policy import load_policy
from models.records.model_input import rollout_inputs
from models.workers.rollout import RolloutWorker
from tests.support.interleaving import InterleavingTransformers
from tests.support.policies import small_tokenizer
from tests.support.rollout_workers import ENGINE, digest, example

STOPS = SamplingConfig(max_new_tokens=40, stop=("a", "e", "o", " ", "1", "0"))
"""A random policy seldom ends a turn of itself."""


def environment(name: str = "Echo", **settings: object) -> TargetEnvironment:
    options = settings.pop("options", {})
    more = {"prompts": "text", "parser": "none", "turn_tokens": 12, "step_seconds": 20, "processes": 2} | settings
    return TargetEnvironment(target=f"tests.support.games:{name}", options=options, **more)


@pytest.fixture
def play(tmp_path):
    """Play one shard of twenty episodes."""
    store = open_store(f"{tmp_path}/run")
    work = replace(example(store, tmp_path / "policy"), sampling=STOPS)

    def run(settings: TargetEnvironment, engine: TransformersEngine = ENGINE, **changes: object):
        worker = RolloutWorker(str(tmp_path), "run", engine, 1, environment=settings)
        try:
            return worker.generate(replace(work, **changes))
        finally:
            worker.close()

    run.store, run.folder = store, tmp_path / "policy"
    return run


def rows_of(play, outcome):
    return read_shard(play.store, outcome.shards[0]).to_pylist()


def test_what_was_sampled_stays_and_what_is_said_stands_between_the_turns(play):
    outcome = play(environment())
    tokenizer = small_tokenizer()
    several = 0
    for row in rows_of(play, outcome):
        at, turns = 0, row["turns"]
        several += len(turns) > 1
        for number, turn in enumerate(turns):
            written = row["completion_tokens"][at : at + turn["tokens"]]
            logprobs = row["logprobs"][at : at + turn["tokens"]]
            assert len(written) == turn["tokens"] > 0
            assert all(value < 0 for value in logprobs)
            at += turn["tokens"]
            said = row["completion_tokens"][at : at + turn["observation"]]
            assert row["logprobs"][at : at + turn["observation"]] == [0.0] * len(said)
            at += turn["observation"]
            if said:
                assert tokenizer.decode(said).startswith(f"[{number} ")
        assert at == len(row["completion_tokens"])
        lengths = [part for turn in turns for part in ((0, turn["tokens"]), (-1, turn["observation"])) if part[1]]
        assert [(each["policy_version"], each["tokens"]) for each in row["segments"]] == lengths
    assert several > 5


def test_log_probs_are_those_of_the_whole_stream_by_a_forward_pass_of_its_own(play):
    table = read_shard(play.store, play(environment()).shards[0])
    inputs = rollout_inputs(table)
    forward = TokenLogprobs(load_policy(play.folder, device="cpu", dtype=torch.float32).eval(), temperature=1.0)
    for read, row in zip(inputs, table.to_pylist(), strict=True):
        with torch.no_grad():
            found = forward(ForwardInput.of(lay_out([read]), torch.device("cpu"), shares=False)).numpy()
        written = np.array(row["logprobs"])[read.written - read.num_prompt_tokens]
        np.testing.assert_allclose(found, written, atol=2e-5)


def test_one_process_and_four_give_the_same_bits_and_two_batches_the_same_episodes(play):
    one, four, apart = (play(environment(**more)) for more in ({"processes": 1}, {"processes": 4}, {"batches": 2}))
    assert digest(one) == digest(four)
    for row, other in zip(rows_of(play, one), rows_of(play, apart), strict=True):
        assert row.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-5)  # batches have other neighbours
        assert row == other


def test_where_an_engine_batches_what_comes_episodes_are_the_same_and_none_waits_for_another(play, tmp_path):
    few = {"rows": (7, 2)}
    rounds, paced = play(environment(), **few), play(environment(), InterleavingTransformers(), **few)
    for row, other in zip(rows_of(play, rounds), rows_of(play, paced), strict=True):
        assert row.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-5)  # batches have other neighbours
        assert row == other
    for name, engine, seconds in (("rounds", ENGINE, 1), ("paced", InterleavingTransformers(), 60)):
        (marks := tmp_path / name).mkdir()
        play(environment("Awaited", options={"marks": str(marks)}, step_seconds=seconds), engine, **few)
        assert (marks / "waited").exists() is (name == "paced")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "OSError: the backend is down"),
        ("exit", "its process ended with exit code 7"),
        ("hang", "no answer after 0.5 s"),
        ("lie", "NoStep: expected a text or a list as messages, found 5"),
    ],
)
def test_an_environment_that_fails_loses_its_own_episodes_alone(play, how, reason):
    few = {"rows": (7, 2, 11)}
    good = {(row["prompt_row"], row["sample"]): row for row in rows_of(play, play(environment(), **few))}
    settings = environment("Bad", options={"how": how}, step_seconds=0.5)
    failed = 0
    for row in rows_of(play, play(settings, **few)):
        whole = good[row["prompt_row"], row["sample"]]
        if row["finish_reason"] == "failed":
            failed += 1
            assert row["turns"][-1]["error"] == reason
            shared = len(row["completion_tokens"])
            assert row["completion_tokens"] == whole["completion_tokens"][:shared]
        else:
            assert row.pop("logprobs") == pytest.approx(whole["logprobs"], abs=1e-5)  # batches have other neighbours
            assert row == {name: value for name, value in whole.items() if name != "logprobs"}
    assert failed > 0


def test_a_process_that_others_kill_costs_no_episode(play, tmp_path):
    undisturbed = play(environment("Bad", options={"how": "", "marks": str(tmp_path)}))
    (tmp_path / "marks").mkdir()
    killed = play(environment("Bad", options={"how": "killed once", "marks": str(tmp_path / "marks")}))
    assert [*(tmp_path / "marks").iterdir()]
    assert digest(killed) == digest(undisturbed)


def test_what_an_environment_says_first_belongs_to_the_prompt(play):
    tokenizer = small_tokenizer()
    for row in rows_of(play, play(environment("Opens"))):
        assert tokenizer.decode(row["prompt_tokens"]).startswith(f"{row['prompt']}begin ")


def test_an_environment_is_told_what_the_prompts_have_for_it(play):
    tokenizer, heard = small_tokenizer(), 0
    for row in rows_of(play, play(environment("Knows"))):
        told = json.dumps({"answer": row["answer"], "number": row["prompt_row"]})
        first, *_ = row["turns"]
        begin = first["tokens"]
        said = tokenizer.decode(row["completion_tokens"][begin : begin + first["observation"]])
        assert not said or said == f"[{told}]"
        heard += bool(said)
    assert heard > 5


def test_turns_and_tokens_are_bounded(play):
    rows = rows_of(play, play(environment(max_turns=2, turn_tokens=6)))
    assert max(len(row["turns"]) for row in rows) == 2
    assert max(turn["tokens"] for row in rows for turn in row["turns"]) == 6
    assert {row["finish_reason"] for row in rows} == {"turns", "length"}
    assert max(len(row["completion_tokens"]) for row in rows) <= STOPS.max_new_tokens


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tests.support.games:Ecko", "no attribute 'Ecko' .*did you mean 'Echo'"),
        ("tests.support.gamez:Echo", "no module 'tests.support.gamez', did you mean 'tests.support.games'"),
        ("tests.support.games:price", r"expected a class with a method step\(turn\)"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused_in_one_line(play, target, message):
    with pytest.raises(BadInput, match=message) as refused:
        play(TargetEnvironment(target=target, prompts="text", parser="none"))
    assert "\n" not in str(refused.value)
