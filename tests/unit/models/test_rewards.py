"""Rewards: what they call right, what they refuse, and that one completion cannot harm another."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from infra import runner
from infra.errors import BadInput, WorkerFailed, WorkerLost
from infra.processes.child import MOST_ENDS
from models.config.reward_terms import BuiltInReward, MathReward, NumericReward, RegexReward, TargetReward
from models.config.rewards import RewardConfig, ScoringConfig
from models.rewards.evaluate import Case, Evaluator, Verdict, check_rewards
from models.rewards.rules import build_reward
from tests.support.jobs import is_alive, wait_for

OBEDIENT = TargetReward(name="obedient", target="tests.support.rewards:obedient")


def judge(reward: BuiltInReward, completion: str, answer: str) -> float:
    return build_reward(reward)("prompt", completion, answer)


def evaluate(completions: list[str], *rewards: RewardConfig, timeout_seconds: float = 10) -> list[Verdict]:
    evaluator = Evaluator(ScoringConfig(rewards=rewards, timeout_seconds=timeout_seconds))
    try:
        return evaluator.evaluate([Case("prompt", completion, "#### 1") for completion in completions])
    finally:
        evaluator.close()


def reward_processes() -> list[psutil.Process]:
    """Processes in which rewards run, that this one has started."""
    return [child for child in psutil.Process().children() if runner.__file__ in child.cmdline()]


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
        check_rewards(ScoringConfig(rewards=(reward,)))


def test_a_module_that_needs_another_is_told_from_one_that_is_misspelt(tmp_path: Path, monkeypatch):
    (tmp_path / "needy_reward.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadInput, match="needs 'not_installed_here', which is not installed"):
        check_rewards(ScoringConfig(rewards=(TargetReward(target="needy_reward:reward"),)))


def test_a_target_is_called_with_its_options():
    [verdict] = evaluate(["four"], TargetReward(target="tests.support.rewards:length", options={"scale": 2}))
    assert verdict == Verdict((8.0,), None)


def test_each_harmful_completion_is_missing_with_its_reason_and_no_other_is():
    completions = ["1", "raise", "2", "nan", "exit", "3", "hang", "none", "4", "crash", "inf", "leave", "5", "words"]
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
        "crash": "obedient: its process was killed by SIGSEGV",
        "inf": "obedient: expected a finite float, found inf",
        "leave": "obedient: SystemExit: 3",
        "words": "obedient: ValueError: could not convert string to float: 'words'",
    }


def test_terms_before_the_guilty_one_keep_their_values():
    length = TargetReward(name="length", target="tests.support.rewards:length")
    last = RegexReward(pattern=".")
    verdicts = evaluate(["exit", "7"], length, OBEDIENT, last)
    assert verdicts[0].values == (4.0, None, None)
    assert verdicts[0].error == "obedient: its process ended with exit code 0"
    assert verdicts[1] == Verdict((1.0, 7.0, 1.0), None)


def test_a_process_that_was_killed_while_idle_costs_no_completion():
    evaluator = Evaluator(ScoringConfig(rewards=(OBEDIENT,)))
    try:
        assert evaluator.evaluate([Case("", "1", "")]) == [Verdict((1.0,), None)]
        [child] = reward_processes()
        child.kill()
        child.wait()
        assert evaluator.evaluate([Case("", "2", "")]) == [Verdict((2.0,), None)]
    finally:
        evaluator.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP])
def test_a_signal_from_elsewhere_in_the_middle_of_a_completion_changes_no_verdict(sent: signal.Signals):
    evaluator = Evaluator(ScoringConfig(rewards=(OBEDIENT,), timeout_seconds=1.5))
    try:
        evaluator.start()
        [child] = reward_processes()
        struck = threading.Timer(0.3, child.send_signal, (sent,))
        struck.start()
        verdicts = evaluator.evaluate([Case("", text, "") for text in ("1", "slow", "2")])
        struck.join()
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        evaluator.close()
    assert verdicts == [Verdict((number,), None) for number in (1.0, 5.0, 2.0)]


def test_kills_from_elsewhere_are_no_verdict_when_they_come_again(tmp_path: Path):
    told = tmp_path / "pids"
    told.touch()
    striking = threading.Thread(target=kill_told, args=(told, MOST_ENDS - 1))
    striking.start()
    verdicts = evaluate([str(told)], TargetReward(target="tests.support.rewards:tell_pid_and_wait"))
    striking.join()
    assert verdicts == [Verdict((3.0,), None)]
    assert len(set(told.read_text().split())) == MOST_ENDS, "a process each time"


def kill_told(told: Path, times: int) -> None:
    """Kill each of the first processes that tell their ids in a file."""
    for number in range(times):
        assert wait_for(lambda: len(told.read_text().splitlines()) > number, seconds=60)  # noqa: B023
        os.kill(int(told.read_text().split()[number]), signal.SIGKILL)


@pytest.mark.parametrize(("harm", "sent"), [("kill", "SIGKILL"), ("stop", "SIGSTOP")])
def test_a_completion_whose_process_is_ended_each_time_is_a_lost_worker_that_names_it_and_no_verdict(harm, sent):
    evaluator = Evaluator(ScoringConfig(rewards=(OBEDIENT,), timeout_seconds=0.5))
    ends = rf"ended 4 times in a row, by {', '.join([sent] * 4)}\. Who did it .* memory .* scoring\.sandbox"
    try:
        with pytest.raises(WorkerLost, match=f"judges iteration 3, prompt 1, sample 0 was {ends}"):
            evaluator.evaluate([Case("", "1", ""), Case("", harm, "", where="iteration 3, prompt 1, sample 0")])
    finally:
        evaluator.close()


BUSY = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(flush=True)
end = time.monotonic() + 3
while time.monotonic() < end:
    pass
"""


def test_time_counts_only_as_far_as_the_machine_gives_any():
    """The reward needs 0.4 s of a processor that eight others want, too."""
    reward = TargetReward(target="tests.support.rewards:in_a_queue", options={"seconds": 0.4})
    evaluator = Evaluator(ScoringConfig(rewards=(reward,), timeout_seconds=1))
    pipe = {"stdout": subprocess.PIPE, "start_new_session": True}
    try:
        evaluator.start()
        processes = reward_processes()
        others = [subprocess.Popen([sys.executable, "-c", BUSY], **pipe) for _ in range(8)]
        for other in others:
            other.stdout.readline()
        [verdict] = evaluator.evaluate([Case("", "", "")])
    finally:
        for other in others:
            other.communicate()
        left = reward_processes()
        evaluator.close()
    assert left == processes, "it was not judged again"
    assert verdict.error is None
    assert verdict.values[0] > 1, "it was kept waiting"


def test_a_process_that_dies_while_it_imports_is_started_again(tmp_path: Path, monkeypatch):
    dying = "import os, pathlib\ntry:\n    pathlib.Path(__file__).with_name('died').touch(exist_ok=False)\n"
    dying += "except FileExistsError:\n    pass\nelse:\n    os.kill(os.getpid(), 9)\n"
    (tmp_path / "mortal.py").write_text(dying + "def reward(prompt, completion, answer): return 1\n")
    (tmp_path / "dead.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert evaluate([""], TargetReward(target="mortal:reward")) == [Verdict((1.0,), None)]
    with pytest.raises(WorkerFailed, match=r"rewards \('target',\): while importing them, its process ended with exit"):
        evaluate([""], TargetReward(target="dead:reward"))


def test_a_process_that_ends_in_other_ways_each_time_is_a_lost_worker(tmp_path: Path):
    reward = TargetReward(target="tests.support.rewards:killed_in_turns")
    with pytest.raises(WorkerLost, match="4 times in a row, by SIGKILL, SIGTERM, signal 40, SIGUSR1"):
        evaluate([str(tmp_path / "turns")], reward)


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
    while any(is_alive(int(pid)) for pid in path.read_text().split()):
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.05)
