"""The code reward: the share of unit tests that the last code block of a completion passes."""

import json
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.config.reward_terms import CodeReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.judges.verdicts import Judgement
from rheostat.models.rewards.code import CodeJudge, Statements, check_code, read_tests
from rheostat.models.rewards.evaluate import Case
from tests.support.sandboxes import needs_sandbox

ASSERTS = "import math\nassert double(2) == 4\nassert double(math.inf) == math.inf\nassert double('a') == 'aa'"
RUNS = json.dumps([{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in (1, 2, 30)])


def fenced(code: str) -> str:
    return f"Like this:\n\n```python\n{code}\n```\nThat is all."


@pytest.fixture(scope="module", params=["share", "all"])
def judged(request):
    reward = CodeReward(value=request.param, test_seconds=1, memory_mib=256)
    judge = CodeJudge(ScoringConfig(rewards=(reward,)))

    def value(completion: str, answer: str) -> tuple[float | None, str | None]:
        [found] = judge.judge([Case("", completion, answer)])["code"]
        return found.value if reward.value == "share" else {0.0: 0.0, 1.0: 1.0}[found.value], found.error

    value.all = request.param == "all"
    yield value
    judge.close()


@pytest.mark.thorough_after(1)
@needs_sandbox
@pytest.mark.parametrize(
    ("code", "answer", "share"),
    [
        ("def double(x): return x + x", ASSERTS, 1.0),
        ("def double(x): return 2 * x if x != 'a' else 0", ASSERTS, 2 / 3),
        ("def double(x): return 4", ASSERTS, 1 / 3),
        ("double = 5", ASSERTS, 0.0),
        ("def double(x):", ASSERTS, 0.0),
        ("import sys\nsys.exit(0)", ASSERTS, 0.0),
        ("import os\nos._exit(0)", ASSERTS, 0.0),
        ("def double(x):\n    import os\n    os._exit(0)", ASSERTS, 0.0),
        ("def double(x):\n    while x == 'a': pass\n    return x + x", ASSERTS, 2 / 3),
        ("def double(x): return bytearray(1 << 30)", ASSERTS, 0.0),
        ("if __name__ == '__main__': raise SystemExit\ndef double(x): return x + x", ASSERTS, 1.0),
        (
            "def double(x): return x + x",
            "def check(f):\n    for n in range(9):\n        assert f(n) == 2 * n\ncheck(double)",
            1,
        ),
        ("print(2 * int(input()))", RUNS, 1.0),
        ("n = int(input())\nprint(2 * n if n < 9 else 'many', ' ')", RUNS, 2 / 3),
        ("n = int(input())\nprint(2 * n)\nassert n < 2", RUNS, 1 / 3),
        ("n = int(input())\nwhile n == 2: pass\nprint(2 * n)", RUNS, 1 / 3),
        ("print(2)", RUNS, 1 / 3),
    ],
)
def test_the_reward_of_code_is_the_share_of_tests_that_it_passes(judged, code: str, answer: str, share: float):
    expected = float(share == 1) if judged.all else pytest.approx(share)
    assert judged(fenced(code), answer) == (expected, None)


@needs_sandbox
def test_the_last_code_block_counts_and_text_without_a_block_gets_zero(judged):
    right, wrong = fenced("print(2 * int(input()))"), fenced("print(0)")
    assert judged(wrong + right, RUNS) == (1.0, None)
    assert judged(right + wrong, RUNS) == (0.0, None)
    assert judged("print(2 * int(input()))", RUNS) == (0.0, None)
    assert judged("1. So:\n   ```\n   for _ in [0]:\n       print(2 * int(input()))\n   ```", RUNS) == (1.0, None)


@needs_sandbox
def test_a_failure_of_the_sandbox_makes_a_reward_missing_and_the_next_completion_is_judged(monkeypatch):
    judge = CodeJudge(ScoringConfig(rewards=(CodeReward(),)))
    case = Case("", fenced("print(2 * int(input()))"), RUNS)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("rheostat.models.rewards.code.SOLUTION", "no/such/folder")
            [failed] = judge.judge([case])["code"]
        assert failed.value is None
        assert "FileNotFoundError" in failed.error
        assert judge.judge([case])["code"] == [Judgement(1.0, None)]
    finally:
        judge.close()


def test_tests_are_asserts_or_pairs_of_input_and_output():
    assert read_tests(ASSERTS) == Statements(
        (
            ("import math", False),
            ("assert double(2) == 4", True),
            ("assert double(math.inf) == math.inf", True),
            ("assert double('a') == 'aa'", True),
        )
    )
    assert [(pair.input, pair.output) for pair in read_tests(RUNS)] == [
        ("1\n", "2\n"),
        ("2\n", "4\n"),
        ("30\n", "60\n"),
    ]


def test_the_code_reward_is_refused_if_bubblewrap_is_not_installed(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    scoring = ScoringConfig(rewards=(CodeReward(name="tests"),))
    with pytest.raises(BadInput, match=r"reward 'tests' .*bwrap"):
        check_code(scoring)
