"""Feedback: texts about completions that rewards return with their scores."""

import json
import re

import pytest

from rheostat.infra.plain_values import MAX_FEEDBACK
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.reward_terms import CodeReward, RegexReward, TargetReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.judges.verdicts import Judgement
from rheostat.models.records.schemas import FEEDBACK_COLUMN, score_schema
from rheostat.models.records.work import ScoringWork
from rheostat.models.rewards.code import CodeJudge
from rheostat.models.rewards.evaluate import Case, Verdict
from rheostat.models.rewards.scores import Scores, combine_results
from rheostat.models.rollouts.forgotten import Prompts, erase_prompts
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.sandboxes import needs_sandbox

TOLD = TargetReward(name="told", target="tests.support.rewards:explained", feedback=True)
SHORT = RegexReward(name="short", pattern="^.{0,9}$")


def score(store, worker, *completions: str):
    """Return the score table of completions of one prompt."""
    rows = [rollout(0, sample, text) for sample, text in enumerate(completions)]
    work = ScoringWork(iteration=1, rollouts=write_rollouts(store, *rows))
    return read_shard(store, worker.score(work).shards[0])


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bubblewrap", marks=needs_sandbox)])
def test_the_texts_of_all_rewards_are_one_column_in_the_order_of_the_rewards(store, make_worker, sandbox):
    loud = TargetReward(name="loud", target=TOLD.target, options={"prefix": "Loud: "}, feedback=True)
    table = score(store, make_worker(loud, SHORT, TOLD, sandbox=sandbox), "too large", "", "no {x}")
    assert table.schema.remove_metadata() == score_schema(("loud", "short", "told"), has_feedback=True)
    assert table.column_names[-1] == FEEDBACK_COLUMN
    assert table["reward"].to_pylist() == [19.0, 1.0, 13.0]
    assert table[FEEDBACK_COLUMN].to_pylist() == ["Loud: too large\ntoo large", None, "Loud: no {x}\nno {x}"]


def test_a_long_text_loses_its_end_and_half_a_character_becomes_a_replacement_character(store, make_worker):
    table = score(store, make_worker(TOLD), "exact", "long", "half")
    exact, long, half = table[FEEDBACK_COLUMN].to_pylist()
    assert exact == "é" * MAX_FEEDBACK
    assert long == "é" * (MAX_FEEDBACK - 1) + "…"
    assert half == "half \ufffd"


def test_a_score_without_a_text_is_missing_and_other_texts_are_kept(store, make_worker):
    plain = TargetReward(name="plain", target=TOLD.target)
    worker = make_worker(TOLD, TargetReward(name="strict", target="tests.support.rewards:pair_or_not", feedback=True))
    table = score(store, worker, "number", "three", "bytes", "nan", "pair")
    assert table["reward"].to_pylist() == [None] * 4 + [4.0 + 1.0]
    assert table[FEEDBACK_COLUMN].to_pylist() == ["number", "three", "bytes", "nan", "pair\nfine"]
    errors = table["error"].to_pylist()
    wanted = "strict: expected a float and a text, because `feedback` of this reward is true, found "
    assert errors[:3] == [f"{wanted}0.5", f"{wanted}(0.5, 'a', 'b')", f"{wanted}(0.5, b'a')"]
    assert errors[3] == "strict: expected a finite float, found nan"
    assert score(store, make_worker(plain), "pair")["error"].to_pylist() == ["plain: expected a float, found tuple"]


def test_texts_of_code_and_functions_are_in_the_order_of_the_rewards_and_failed_episodes_have_none():
    scoring = ScoringConfig(rewards=(CodeReward(feedback=True), TOLD))
    ruled = [Verdict((1.0,), None, {"told": "second"})] * 2
    others = {"code": [Judgement(0.0, None, feedback="first")] * 2}
    found = combine_results(ruled, others, scoring, starts=[None] * 2, failures=[None, "it is down"])
    assert found == [Scores((0.0, 1.0), None, "first\nsecond"), Scores((None, None), "environment: it is down")]


def test_forgetting_a_prompt_removes_the_feedback_on_its_completions(store, make_worker):
    table = score(store, make_worker(TOLD), "quotes the prompt", "")
    emptied, _ = erase_prompts(table, Prompts(frozenset(), frozenset({0})))
    assert emptied[FEEDBACK_COLUMN].to_pylist() == ["", None]
    assert emptied["reward"].to_pylist() == table["reward"].to_pylist()


def explain(code: str | None, answer: str, *, value: str = "share") -> tuple[float | None, str]:
    """Return score and feedback of a completion with this code."""
    reward = CodeReward(value=value, test_seconds=1, memory_mib=256, feedback=True)
    judge = CodeJudge(ScoringConfig(rewards=(reward,)))
    try:
        [found] = judge.judge([Case("", "Words" if code is None else f"```python\n{code}\n```", answer)])["code"]
    finally:
        judge.close()
    return found.value, found.feedback


RUNS = json.dumps([{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in (1, 2, 30)])
ASSERTS = "import math\nassert double(2) == 4\nassert double(math.inf) == math.inf\nassert double('a') == 'aa'"


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "answer", "score", "pattern"),
    [
        ("print(2 * int(input()))", RUNS, 1.0, ""),
        (None, RUNS, 0.0, "The answer contains no code block."),
        (
            "n = int(input())\nprint(2 * n if n < 2 else [n])",
            RUNS,
            1 / 3,
            "A test failed. Input:\n2\nExpected output:\n4\nOutput:\n\\[2\\]",
        ),
        (
            "n = int(input())\nprint(object() if n < 2 else 1 / 0)",
            RUNS,
            0.0,
            "A test failed. Input:\n1\nExpected output:\n2\nOutput:\n<object object at 0x…>",
        ),
        (
            "n = int(input())\nprint(2 * n // (30 - n))",
            '[{"input": "30", "output": "0"}]',
            0.0,
            "A test failed. Input:\n30\nExpected output:\n0\nOutput:\nTraceback .*line 2.*\n"
            "ZeroDivisionError: .*\nError:\nits process ended with exit code 1",
        ),
        (
            "print(0, flush=True)\nwhile True: pass",
            RUNS,
            0.0,
            "A test failed. Input:\n1\nExpected output:\n2\nError:\nit took longer than 1 s",
        ),
        ("def double(x): return x + x", ASSERTS, 1.0, ""),
        (
            "def double(x): return 2 * x if x != 'a' else 'no'",
            ASSERTS,
            2 / 3,
            "This test failed:\nassert double\\('a'\\) == 'aa'\nOutput:\nTraceback .*\nAssertionError\n"
            "Error:\nits process ended with exit code 1",
        ),
        (
            "def double(x): return 1 / 0",
            ASSERTS,
            0.0,
            "This test failed:\nassert double\\(2\\) == 4\nOutput:\nTraceback .*line 1, in double\n.*"
            "ZeroDivisionError: division by zero\nError:\n.*",
        ),
    ],
    ids=range(9),
)
def test_the_feedback_of_code_is_its_first_failed_test(code, answer, score, pattern):
    value, feedback = explain(code, answer)
    assert value == pytest.approx(score)
    assert re.fullmatch(pattern, feedback, re.S), feedback


@needs_sandbox
def test_long_inputs_and_outputs_in_the_feedback_of_code_lose_their_middle():
    runs = json.dumps([{"input": "a" + "1" * 5000 + "b", "output": "c" + "2" * 5000 + "d"}])
    value, feedback = explain("print('e' + '3' * 5000 + 'f')", runs, value="all")
    assert value == 0.0
    assert re.fullmatch("A test failed. Input:\na1+…1+b\nExpected output:\nc2+…2+d\nOutput:\ne3+…3+f", feedback), (
        feedback
    )
    assert len(feedback) < 2500
