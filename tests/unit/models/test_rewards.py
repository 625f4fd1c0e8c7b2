"""Rewards: what they call right, what they refuse, and that one completion cannot harm another."""

import multiprocessing
import signal
import time
from pathlib import Path

import pytest

from infra.errors import BadInput
from models.config.reward_terms import MathReward, NumericReward, RegexReward, TargetReward
from models.config.rewards import RewardConfig, ScoringConfig
from models.rewards.evaluate import Evaluator, Verdict
from models.rewards.rules import build_reward, check_reward
from models.rewards.values import Case

OBEDIENT = TargetReward(name="obedient", target="tests.support.rewards:obedient")


def judge(reward: RewardConfig, completion: str, answer: str) -> float:
    return build_reward(reward)("prompt", completion, answer)


def evaluate(completions: list[str], *rewards: RewardConfig, timeout_seconds: float = 10) -> list[Verdict]:
    evaluator = Evaluator(ScoringConfig(rewards=rewards, timeout_seconds=timeout_seconds))
    try:
        return evaluator.evaluate([Case("prompt", completion, "#### 1") for completion in completions])
    finally:
        evaluator.close()


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("16+3=19 #### 19", "#### 19", 1.0),
        ("#### 18 no, #### 19", "#### 19", 1.0),
        ("#### 19 no, #### 18", "#### 19", 0.0),
        ("#### 1,000", "1000.0", 1.0),
        ("#### -3.50", "-3.5", 1.0),
        ("#### 0.1", "0.10000000000000001", 0.0),
        ("19", "#### 19", 0.0),
        ("", "17", 0.0),
    ],
)
def test_the_last_number_in_the_expected_form_is_the_answer(completion: str, answer: str, reward: float):
    assert judge(NumericReward(), completion, answer) == reward


def test_a_reference_without_a_number_is_an_error_and_not_a_wrong_answer():
    with pytest.raises(ValueError, match="no number in the reference 'seventeen'"):
        judge(NumericReward(), "#### 17", "seventeen")


def test_a_bare_reference_is_read_whole_where_the_pattern_would_read_a_part():
    assert judge(NumericReward(pattern=r"(\d+)"), "17", "-17") == 0.0


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("$x + 1$", "1 + x", 1.0),
        (r"$\frac{2}{3}$", r"\frac{1}{2}", 0.0),
        ("I do not know", "2", 0.0),
        (r"$\frac{1}{$", "2", 0.0),
    ],
)
def test_mathematics_is_right_when_it_is_equal(completion: str, answer: str, reward: float):
    assert judge(MathReward(), completion, answer) == reward


def test_mathematics_needs_no_alarm_and_so_no_main_thread():
    [verdict] = evaluate([r"\boxed{1}"], MathReward(name="maths"))
    assert verdict == Verdict((1.0,), None)


def test_a_pattern_is_found_anywhere():
    reward = RegexReward(pattern=r"<answer>.*</answer>")
    assert [judge(reward, text, "") for text in ("so <answer>1</answer>.", "1")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (RegexReward(pattern="(unclosed"), r"'\(unclosed' is not a regular expression"),
        (NumericReward(pattern=r"\d+"), "expected a group"),
        (TargetReward(target="tests.support.reward:length"), "did you mean 'tests.support.rewards'"),
        (TargetReward(target="tests.support.rewards:lenght"), "did you mean 'length'"),
        (TargetReward(target="tests.support.rewards:NUMBER"), "expected a function"),
        (TargetReward(target="tests.support.rewards:asynchronous"), "expected a function that returns a float"),
        (TargetReward(target="tests.support.rewards:two_arguments"), "too many positional arguments"),
        (TargetReward(target="tests.support.rewards:length", options={"scal": 2}), "'scal'"),
        (TargetReward(target="numpyy.linalg:norm"), "did you mean 'numpy'"),
    ],
)
def test_a_reward_that_cannot_work_is_bad_input_before_anything_starts(reward: RewardConfig, message: str):
    with pytest.raises(BadInput, match=message):
        check_reward(reward)


def test_a_module_that_needs_another_is_told_from_one_that_is_misspelt(tmp_path: Path, monkeypatch):
    (tmp_path / "needy_reward.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match="needs 'not_installed_here', which is not installed"):
        check_reward(TargetReward(target="needy_reward:reward"))


def test_a_target_is_called_with_its_options():
    assert judge(TargetReward(target="tests.support.rewards:length", options={"scale": 2}), "four", "") == 8.0


def test_each_harmful_completion_is_missing_with_its_reason_and_no_other_is():
    completions = ["1", "raise", "2", "nan", "exit", "3", "hang", "none", "4", "kill", "inf", "leave", "5", "words"]
    verdicts = evaluate(completions, OBEDIENT, timeout_seconds=1)
    assert {text: verdict.values[0] for text, verdict in zip(completions, verdicts, strict=True)} == {
        **dict.fromkeys(completions), "1": 1.0, "2": 2.0, "3": 3.0, "4": 4.0, "5": 5.0
    }  # fmt: skip
    assert {text: verdict.error for text, verdict in zip(completions, verdicts, strict=True) if verdict.error} == {
        "raise": "obedient: RuntimeError: cannot judge <object object at 0x…>",
        "nan": "obedient: expected a finite float, found nan",
        "exit": "obedient: its process ended with exit code 0",
        "hang": "obedient: no value after 1 s",
        "none": "obedient: expected a float, found NoneType",
        "kill": "obedient: its process was killed by SIGKILL",
        "inf": "obedient: expected a finite float, found inf",
        "leave": "obedient: SystemExit: 3",
        "words": "obedient: ValueError: could not convert string to float: 'words'",
    }


def test_terms_before_the_guilty_one_keep_their_values():
    length = TargetReward(name="length", target="tests.support.rewards:length")
    last = RegexReward(pattern=".")
    verdicts = evaluate(["kill", "7"], length, OBEDIENT, last)
    assert verdicts[0].values == (4.0, None, None)
    assert verdicts[0].error == "obedient: its process was killed by SIGKILL"
    assert verdicts[1] == Verdict((1.0, 7.0, 1.0), None)


def test_a_process_that_was_killed_while_idle_costs_no_completion():
    evaluator = Evaluator(ScoringConfig(rewards=(OBEDIENT,)))
    try:
        assert evaluator.evaluate([Case("", "1", "")]) == [Verdict((1.0,), None)]
        [child] = [child for child in multiprocessing.active_children() if child.name == "rewards"]
        child.kill()
        child.join()
        assert evaluator.evaluate([Case("", "2", "")]) == [Verdict((2.0,), None)]
    finally:
        evaluator.close()


def test_values_of_an_interrupted_call_never_reach_the_next_one():
    evaluator = Evaluator(ScoringConfig(rewards=(OBEDIENT,), timeout_seconds=2))
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        evaluator.evaluate([Case("", "1", "")])
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            evaluator.evaluate([Case("", "hang", ""), Case("", "1", "")])
        assert evaluator.evaluate([Case("", "2", "")]) == [Verdict((2.0,), None)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        evaluator.close()


def test_what_a_reward_started_is_killed_with_it(tmp_path: Path):
    reward = TargetReward(target="tests.support.rewards:leave_pid_and_hang")
    path = tmp_path / "pids"
    [verdict] = evaluate([str(path)], reward, timeout_seconds=2)
    assert verdict.error == "target: no value after 2 s"
    deadline = time.monotonic() + 5
    while any(alive(int(pid)) for pid in path.read_text().split()):
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Return whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
