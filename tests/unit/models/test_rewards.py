"""Rewards: their values, and that a completion cannot change the score of another completion."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from rheostat.infra import runner
from rheostat.infra.errors import WorkerFailed, WorkerLost
from rheostat.infra.processes import clock
from rheostat.infra.processes.child import MAX_ENDS
from rheostat.models.config.reward_terms import BuiltInReward, NumericReward, RegexReward, TargetReward
from rheostat.models.config.rewards import RewardConfig, ScoringConfig
from rheostat.models.rewards.evaluate import Case, Evaluator, Verdict
from rheostat.models.rewards.rules import build_reward
from tests.support.jobs import is_alive, wait_for

OBEDIENT = TargetReward(name="obedient", target="tests.support.rewards:obedient")


def judge(reward: BuiltInReward, completion: str, answer: str) -> float:
    return build_reward(reward)("prompt", completion, answer)


def cases_of(*completions: str) -> list[Case]:
    return [Case("prompt", completion, "#### 1") for completion in completions]


def reward_processes() -> list[psutil.Process]:
    """Return the processes of rewards that this process has started."""
    return [child for child in psutil.Process().children() if runner.__file__ in child.cmdline()]


@pytest.fixture
def start_evaluator() -> Iterator[Callable[..., Evaluator]]:
    """Function that builds evaluators, which are closed after the test."""
    with ExitStack() as stack:

        def start(*rewards: RewardConfig, timeout_seconds: float = 10) -> Evaluator:
            evaluator = Evaluator(ScoringConfig(rewards=rewards, timeout_seconds=timeout_seconds))
            stack.callback(evaluator.close)
            return evaluator

        yield start


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


def test_a_bare_reference_is_read_in_full_if_the_pattern_matches_only_a_part():
    assert judge(NumericReward(pattern=r"(\d+)"), "17", "-17") == 0.0


def test_a_pattern_is_found_anywhere():
    reward = RegexReward(pattern=r"<answer>.*</answer>")
    assert [judge(reward, text, "") for text in ("so <answer>1</answer>.", "1")] == [1.0, 0.0]


def test_a_target_is_called_with_its_options(start_evaluator):
    reward = TargetReward(target="tests.support.rewards:length", options={"scale": 2})
    assert start_evaluator(reward).evaluate(cases_of("four")) == [Verdict((8.0,), None)]


def test_each_harmful_completion_is_missing_with_its_reason_and_no_other_is(start_evaluator):
    completions = ["1", "raise", "2", "nan", "exit", "3", "hang", "none", "4", "crash", "inf", "leave", "5", "words"]
    verdicts = start_evaluator(OBEDIENT, timeout_seconds=1).evaluate(cases_of(*completions))
    assert {text: verdict.values[0] for text, verdict in zip(completions, verdicts, strict=True)} == {
        **dict.fromkeys(completions), "1": 1.0, "2": 2.0, "3": 3.0, "4": 4.0, "5": 5.0
    }  # fmt: skip
    reasons = {
        "raise": "RuntimeError: cannot judge <object object at 0x…>",
        "nan": "finite float.* nan",
        "exit": "exit code 0",
        "hang": "no score.* 1 s",
        "none": "float.* NoneType",
        "crash": "SIGSEGV",
        "inf": "finite float.* inf",
        "leave": "SystemExit: 3",
        "words": "ValueError: could not convert string to float: 'words'",
    }
    errors = {text: verdict.error for text, verdict in zip(completions, verdicts, strict=True) if verdict.error}
    assert errors.keys() == reasons.keys()
    assert all(re.search(f"^obedient: .*{reasons[text]}$", error) for text, error in errors.items()), errors


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(("is_starved", "reason"), [(False, "its process closed the pipe"), (True, "SIGSEGV")])
def test_a_process_that_dies_while_other_processes_use_the_cpus_is_known_by_its_signal(
    start_evaluator, monkeypatch, is_starved, reason
):
    monkeypatch.setattr(clock, "_usage", lambda pid: (0.0, is_starved))
    [verdict] = start_evaluator(OBEDIENT, timeout_seconds=3).evaluate(cases_of("close"))
    assert re.search(f"{reason}$", verdict.error)


def test_terms_before_the_one_that_fails_keep_their_values(start_evaluator):
    length = TargetReward(name="length", target="tests.support.rewards:length")
    verdicts = start_evaluator(length, OBEDIENT, RegexReward(pattern=".")).evaluate(cases_of("exit", "7"))
    assert verdicts[0].values == (4.0, None, None)
    assert re.search("^obedient: .*exit code 0$", verdicts[0].error)
    assert verdicts[1] == Verdict((1.0, 7.0, 1.0), None)


def test_control_characters_are_escaped_in_the_output_of_a_reward_function(start_evaluator, capfd):
    evaluator = start_evaluator(TargetReward(target="tests.support.rewards:printing"))
    assert evaluator.evaluate(cases_of("\x1b[2Jhere")) == [Verdict((0.0,), None)]
    shown: list[str] = []
    assert wait_for(lambda: shown.append(capfd.readouterr().err) or "here" in "".join(shown))
    assert "".join(shown) == "\\u001b[2Jhere\n"


def test_a_process_that_was_killed_while_idle_costs_no_completion(start_evaluator):
    evaluator = start_evaluator(OBEDIENT)
    assert evaluator.evaluate(cases_of("1")) == [Verdict((1.0,), None)]
    [child] = reward_processes()
    child.kill()
    child.wait()
    assert evaluator.evaluate(cases_of("2")) == [Verdict((2.0,), None)]


@pytest.mark.parametrize(
    ("sent", "times"),
    [
        *((each, 1) for each in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP)),
        (signal.SIGKILL, MAX_ENDS - 1),
    ],
)
def test_signals_from_elsewhere_in_the_middle_of_a_completion_change_no_verdict(
    start_evaluator, sent, times, tmp_path: Path
):
    path = tmp_path / "pids"
    path.touch()
    target = "tests.support.rewards:wait_for_signals"
    reward = TargetReward(target=target, options={"path": str(path), "signals": times})
    sender = threading.Thread(target=send_to_each, args=(path, times, sent))
    sender.start()
    verdicts = start_evaluator(reward, timeout_seconds=1.5).evaluate(cases_of("1", "wait", "2"))
    sender.join()
    assert verdicts == [Verdict((number,), None) for number in (1.0, 3.0, 2.0)]
    *ended, last = map(int, path.read_text().split())
    assert len({*ended, last}) == times + 1, "each attempt has another process"
    assert is_alive(last)
    assert not any(map(is_alive, ended))


def send_to_each(path: Path, times: int, sent: signal.Signals) -> None:
    """Send a signal to each of the first processes that write their ids to a file."""
    for number in range(times):
        assert wait_for(lambda: len(path.read_text().splitlines()) > number, seconds=60)  # noqa: B023
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text().split()[number]), sent)


@pytest.mark.parametrize(("harm", "sent"), [("kill", "SIGKILL"), ("stop", "SIGSTOP")])
def test_a_completion_whose_process_is_ended_each_time_is_a_lost_worker_and_no_verdict(start_evaluator, harm, sent):
    evaluator = start_evaluator(OBEDIENT, timeout_seconds=0.5)
    case = Case("", harm, "", where="iteration 3, prompt 1, sample 0")
    ends = rf"ended 4 times in a row \({', '.join([sent] * 4)}\).* memory .* scoring\.sandbox"
    with pytest.raises(WorkerLost, match=f"iteration 3, prompt 1, sample 0 .*{ends}"):
        evaluator.evaluate([*cases_of("1"), case])


BUSY = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(flush=True)
while True:
    pass
"""


@pytest.mark.thorough
def test_only_processor_time_of_a_reward_counts_against_its_time_limit(start_evaluator):
    """The reward needs 0.4 s of a processor that it shares with five other processes."""
    reward = TargetReward(target="tests.support.rewards:in_a_queue", options={"seconds": 0.4})
    evaluator = start_evaluator(reward, timeout_seconds=1)
    evaluator.start()
    processes = reward_processes()
    with ExitStack() as stack:
        for _ in range(5):
            busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, start_new_session=True)
            stack.callback(busy.communicate)
            stack.callback(busy.kill)
            busy.stdout.readline()
        [verdict] = evaluator.evaluate([Case("", "", "")])
    assert reward_processes() == processes, "the completion was judged once"
    assert verdict.error is None
    assert verdict.values[0] > 1, "the reward had to wait"


def test_a_process_that_dies_during_its_imports_is_started_again(start_evaluator, tmp_path: Path, monkeypatch):
    dying = "import os, pathlib\ntry:\n    pathlib.Path(__file__).with_name('died').touch(exist_ok=False)\n"
    dying += "except FileExistsError:\n    pass\nelse:\n    os.kill(os.getpid(), 9)\n"
    (tmp_path / "mortal.py").write_text(dying + "def reward(prompt, completion, answer): return 1\n")
    (tmp_path / "dead.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert start_evaluator(TargetReward(target="mortal:reward")).evaluate(cases_of("")) == [Verdict((1.0,), None)]
    with pytest.raises(WorkerFailed, match=r"'target'.*import.*ended with exit"):
        start_evaluator(TargetReward(target="dead:reward")).evaluate(cases_of(""))


def test_a_process_that_ends_in_another_way_each_time_is_a_lost_worker(start_evaluator, tmp_path: Path):
    reward = TargetReward(target="tests.support.rewards:killed_in_turns")
    with pytest.raises(WorkerLost, match=r"4 times in a row \(SIGKILL, SIGTERM, signal 40, SIGUSR1\)"):
        start_evaluator(reward).evaluate(cases_of(str(tmp_path / "turns")))


def test_values_of_an_interrupted_call_never_reach_the_next_one(start_evaluator):
    evaluator = start_evaluator(OBEDIENT, timeout_seconds=2)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        evaluator.evaluate(cases_of("1"))
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            evaluator.evaluate(cases_of("hang", "1"))
        assert evaluator.evaluate(cases_of("2")) == [Verdict((2.0,), None)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_processes_that_a_reward_started_are_killed_with_it(start_evaluator, tmp_path: Path):
    reward = TargetReward(target="tests.support.rewards:leave_pid_and_hang")
    path = tmp_path / "pids"
    [verdict] = start_evaluator(reward, timeout_seconds=2).evaluate(cases_of(str(path)))
    assert re.search("^target: .*no score.* 2 s$", verdict.error)
    assert wait_for(lambda: not any(is_alive(int(pid)) for pid in path.read_text().split()))
