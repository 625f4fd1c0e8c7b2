"""Episodes: their tokens and log-probs, and environments that hang, crash, return nonsense or are killed."""

import json

import numpy as np
import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.engines import TransformersEngine
from rheostat.models.engines.local.continuous import ContinuousDecoder
from rheostat.models.engines.local.engine import HuggingFaceEngine
from tests.support.episodes import (
    STOPS,
    decode_turns,
    forward_logprobs,
    index_rows,
    require_equal_rows,
    split_turns,
    target_environment,
)
from tests.support.policies import small_tokenizer
from tests.support.rollout_workers import digest


def test_sampled_tokens_are_kept_and_the_answers_of_the_environment_follow_each_turn(episodes):
    num_longer = 0
    for row in episodes.play_rows(target_environment()):
        lengths, end = [], 0
        for number, (turn, completion, answer) in enumerate(split_turns(row)):
            end = answer.stop
            assert len(row["completion_tokens"][completion]) == turn["tokens"] > 0
            assert all(value < 0 for value in row["logprobs"][completion])
            assert row["logprobs"][answer] == [0.0] * turn["observation"]
            if turn["observation"]:
                assert small_tokenizer().decode(row["completion_tokens"][answer]).startswith(f"[{number} ")
            lengths += [(version, n) for version, n in ((0, turn["tokens"]), (-1, turn["observation"])) if n]
        assert end == len(row["completion_tokens"])
        assert [(each["policy_version"], each["tokens"]) for each in row["segments"]] == lengths
        num_longer += len(row["turns"]) > 1
    assert num_longer > 5


def test_log_probs_equal_those_of_a_forward_pass_over_the_whole_episode(episodes):
    table = read_shard(episodes.store, episodes.play(target_environment()).shards[0])
    for computed, recorded in forward_logprobs(episodes.policy, table):
        np.testing.assert_allclose(computed, recorded, atol=2e-5)


@pytest.mark.thorough
def test_one_and_four_processes_give_equal_bits_and_two_batches_equal_episodes(episodes):
    one, four, two_batches = (
        episodes.play(target_environment(**settings))
        for settings in ({"processes": 1}, {"processes": 4}, {"batches": 2})
    )
    assert digest(one) == digest(four)
    require_equal_rows(episodes.read_rows(*one.shards), episodes.read_rows(*two_batches.shards))


@pytest.mark.thorough
def test_at_a_free_pace_episodes_are_equal_and_do_not_wait_for_each_other(episodes, tmp_path):
    require_equal_rows(
        episodes.play_rows(target_environment(), rows=(7, 2)),
        episodes.play_rows(target_environment(pace="free"), rows=(7, 2)),
    )
    for pace, seconds in (("rounds", 1), ("free", 60)):
        (marks := tmp_path / pace).mkdir()
        awaited = target_environment("Awaited", options={"marks": str(marks)}, step_seconds=seconds, pace=pace)
        episodes.play(awaited, rows=(7, 2))
        assert (marks / "waited").exists() is (pace == "free")


def test_an_engine_may_repeat_all_independent_episodes(episodes, monkeypatch):
    def run_twice(decoder, work):
        with decoder:
            work(decoder.generate)
            return work(decoder.generate)

    settings = target_environment(pace="free")
    once = episodes.play_rows(settings)
    monkeypatch.setattr(ContinuousDecoder, "run_interleaved", run_twice)
    require_equal_rows(episodes.play_rows(settings), once)


class RoundsOnly(HuggingFaceEngine):
    """Engine that cannot batch concurrent calls."""

    batch_continuously = None


class RoundsOnlyTransformers(TransformersEngine):
    implementation = f"{__name__}:RoundsOnly"


def test_a_free_pace_is_refused_by_an_engine_that_does_not_batch_concurrent_calls(episodes):
    with pytest.raises(BadInput, match=r"environment\.pace = 'free'.*transformers.*`batch_continuously`"):
        episodes.play(target_environment(pace="free"), RoundsOnlyTransformers())


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "OSError: the backend is down"),
        ("exit", "exit code 7"),
        ("hang", "did not respond within 0.5 s"),
        ("lie", "returned 5"),
    ],
)
def test_a_failing_environment_loses_only_the_episodes_that_it_runs(episodes, how, reason):
    settings = target_environment("Bad", options={"how": how}, step_seconds=0.5 if how == "hang" else 20)
    good = index_rows(episodes.play_rows(target_environment(), rows=(7, 2, 11)))
    rows = episodes.play_rows(settings, rows=(7, 2, 11))
    failed = [row for row in rows if row["finish_reason"] == "failed"]
    assert failed
    for row in failed:
        assert reason in row["turns"][-1]["error"]
        length = len(row["completion_tokens"])
        assert row["completion_tokens"] == good[row["prompt_row"], row["sample"]]["completion_tokens"][:length]
    others = index_rows([row for row in rows if row["finish_reason"] != "failed"])
    require_equal_rows([*others.values()], [good[name] for name in others])


def test_a_process_that_is_killed_from_outside_costs_no_episode(episodes, tmp_path):
    undisturbed = episodes.play(target_environment("Bad", options={"how": "", "marks": str(tmp_path)}))
    (tmp_path / "marks").mkdir()
    options = {"how": "killed once", "marks": str(tmp_path / "marks")}
    killed = episodes.play(target_environment("Bad", options=options))
    assert [*(tmp_path / "marks").iterdir()]
    assert digest(killed) == digest(undisturbed)


def test_the_first_message_of_an_environment_belongs_to_the_prompt(episodes):
    for row in episodes.play_rows(target_environment("Opens")):
        assert small_tokenizer().decode(row["prompt_tokens"]).startswith(f"{row['prompt']}begin ")


def test_an_environment_gets_the_answer_and_the_other_columns_of_its_problem(episodes):
    num_answers = 0
    for row in episodes.play_rows(target_environment("Knows")):
        (_, answer), *_ = decode_turns(row)
        problem = json.dumps({"answer": row["answer"], "number": row["prompt_row"]})
        assert answer in ("", f"[{problem}]")
        num_answers += bool(answer)
    assert num_answers > 5


def test_the_numbers_of_turns_and_tokens_are_limited(episodes):
    rows = episodes.play_rows(target_environment(max_turns=2, turn_tokens=6))
    assert max(len(row["turns"]) for row in rows) == 2
    assert max(turn["tokens"] for row in rows for turn in row["turns"]) == 6
    assert {row["finish_reason"] for row in rows} == {"turns", "length"}
    assert max(len(row["completion_tokens"]) for row in rows) <= STOPS.max_new_tokens
