"""Attacks on the sandbox: no attack gets a score, reads a secret or leaves anything behind, and work continues.

Attacks come from a reward function, from the policy's tool `python`, and from code that unit tests run.
"""

import inspect
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.processes.episodes import EpisodeRequest
from rheostat.infra.processes.sandbox import switches_user
from rheostat.models.config.environments import PythonEnvironment
from rheostat.models.config.reward_terms import CodeReward, NumericReward, TargetReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.environments.pool import start_process
from rheostat.models.rewards.code import CodeJudge
from rheostat.models.rewards.evaluate import Case, Evaluator, check_rewards
from tests.support import hostile_rewards
from tests.support.jobs import wait_for
from tests.support.sandboxes import needs_sandbox

OBEDIENT = TargetReward(name="obedient", target="tests.support.rewards:obedient")
ESCAPES = {
    "exit": "SystemExit: 0",
    "hard_exit": "its process ended with exit code 0",
    "kill_parent": "its process was killed by SIGKILL",
    "kill_all": "its process was killed by SIGKILL",
    "lie": "expected a float, found tests.support.hostile_rewards.Liar",
    "forge": "its process (ended with exit code 0|wrote something other than a valid response)",
    "killing_program": "its process was killed by SIGKILL",
    "poison": "its process wrote something other than a valid response",
    "sentinel": 0.0,
    "secret": 0.0,
    "parent": 0.0,
    "ptrace": 0.0,
    "symlink": 0.0,
    "network": 0.0,
    "write": 0.0,
    "orphans": 0.0,
    "program": 0.0,
    "memory": "MemoryError:",
    "large_file": "OSError: .* (File too large|No space left on device)",
    "many_files": "OSError: .* No space left on device",
    "bomb": "its process started more than 64",
}
"""Reward of each attack, or the reason why it has none."""
EXHAUSTING = {
    "loop": "the reward returned no score within 2 s",
    "output": "the reward returned no score within 2 s",
    "answer": "its process wrote more than 16777216 bytes",
}
OUTPUTS = {
    "kill_parent|kill_all": r"Error: its process was killed by SIGKILL",
    "exit|hard_exit": r"\(no output\)",
    "killing_program": r"1\.0\nError: its process was killed by SIGKILL",
    "lie": r"<.*Liar object at .*>\n",
    "forge": r"(?s).*",
    "poison|sentinel|secret|parent|ptrace|symlink|network|write|orphans|program": r"0\.0\n",
    "memory": r"(?s)Traceback .*MemoryError\n",
    "large_file|many_files": r"(?s)Traceback .*OSError: .*\n",
    "bomb": r"(?s).*Error: its process started more than 64",
    "hoard": r"Error: its processes took more than 1024 MiB of memory",
    "flood": r"(?s).*Error: its process wrote more than 1048576 bytes",
}
"""Output of each attack that the policy reads."""


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def secret(tmp_path: Path, monkeypatch) -> Path:
    """File that no reward may read. Its name distinguishes the processes of this test from others."""
    monkeypatch.setenv("API_KEY", "canary")
    path = tmp_path / f"secret-{100000 + os.getpid()}"
    path.write_text("canary")
    return path


@pytest.fixture
def no_traces(secret: Path) -> Iterator[None]:
    """Check that the test leaves no process behind, and no file next to the secret."""
    before = set(psutil.Process().children(recursive=True))
    yield
    sleep = ["sleep", secret.name.rpartition("-")[2]]
    assert wait_for(lambda: set(psutil.Process().children(recursive=True)) == before)
    assert wait_for(lambda: not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == sleep])
    assert [path.name for path in secret.parent.iterdir()] == [secret.name]


@needs_sandbox
@pytest.mark.parametrize(("attacks", "seconds"), [(ESCAPES, 10), pytest.param(EXHAUSTING, 2, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("no_traces")
def test_no_reward_function_escapes_or_exhausts_the_machine_and_the_next_completion_is_judged(
    attacks, seconds, port, secret
):
    reward = TargetReward(target="tests.support.hostile_rewards:hostile", options={"port": port})
    evaluator = Evaluator(ScoringConfig(rewards=(reward,), sandbox="bubblewrap", timeout_seconds=seconds))
    try:
        for attack, expected in attacks.items():
            texts = (attack, "0.25", attack, "0.5")
            [first, quarter, again, half] = evaluator.evaluate([Case(str(secret), text, "") for text in texts])
            assert (quarter.values, half.values) == ((0.25,), (0.5,)), attack
            assert again == first, attack
            if isinstance(expected, str):
                assert re.fullmatch(expected, first.error.removeprefix("target: ")), (attack, first)
            else:
                assert (first.values, first.error) == ((expected,), None), attack
    finally:
        evaluator.close()


def programs(secret: Path, port: int) -> Iterator[tuple[str, str]]:
    """Yield every attack as a program of a policy. The program sets `found` to 1.0 if the attack succeeds."""
    source = inspect.getsource(hostile_rewards).replace("Path(__file__)", "Path('/tmp/program')")
    for attacks in OUTPUTS:
        for attack in attacks.split("|"):
            yield attack, f"{source}\nfound = hostile({str(secret)!r}, {attack!r}, '', port={port})\n"


@pytest.mark.smoke
@pytest.mark.system
@needs_sandbox
@pytest.mark.usefixtures("no_traces")
def test_no_program_of_a_policy_escapes_and_the_next_call_is_answered(port: int, secret: Path):
    tool = start_process(PythonEnvironment(step_seconds=60, memory_mib=1024))  # no program is ended by its time

    def run(code: str) -> str:
        call = {"name": "python", "arguments": {"code": code}, "error": ""}
        step, failure = tool.step(EpisodeRequest("0", problem={}, seed=0, turns=({"text": "", "calls": [call]},)))
        assert failure is None
        return step.messages[0].content

    expected = {attack: output for attacks, output in OUTPUTS.items() for attack in attacks.split("|")}
    try:
        outputs = {}
        for attack, program in programs(secret, port):
            outputs[attack] = run(f"{program}found")
            assert run("6 * 7") == "42\n", attack
    finally:
        tool.kill()
    assert {attack for attack, output in expected.items() if not re.fullmatch(output, outputs[attack])} == set()


@pytest.mark.smoke
@pytest.mark.system
@needs_sandbox
@pytest.mark.usefixtures("no_traces")
def test_no_code_under_test_escapes_or_passes_and_the_next_completion_is_judged(port: int, secret: Path):
    judge = CodeJudge(ScoringConfig(rewards=(CodeReward(test_seconds=5, memory_mib=1024),)))
    tests = '[{"input": "", "output": "1.0"}]'
    try:
        for attack, program in programs(secret, port):
            texts = (f"```python\n{code}\n```" for code in (f"{program}print(found)", "print(1.0)"))
            verdicts = judge.judge([Case("", text, tests) for text in texts])["code"]
            assert [(each.value, each.error) for each in verdicts] == [(0.0, None), (1.0, None)], attack
    finally:
        judge.close()


@needs_sandbox
def test_the_sandbox_and_another_python_give_the_same_values_and_reasons():
    cases = [Case("", text, "") for text in ("1", "raise", "words", "exit", "crash", "none", "2")]
    verdicts = []
    for settings in ({}, {"sandbox": "bubblewrap"}, {"sandbox": "bubblewrap", "python": shutil.which("python3")}):
        evaluator = Evaluator(ScoringConfig(rewards=(NumericReward(weight=0), OBEDIENT), **settings))
        try:
            verdicts.append(evaluator.evaluate([Case(case.prompt, case.completion, "1") for case in cases]))
        finally:
            evaluator.close()
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert [verdict.values[1] for verdict in verdicts[0]] == [1.0, None, None, None, None, None, 2.0]


def refusal(reward: TargetReward = OBEDIENT, **settings: object) -> str:
    with pytest.raises(BadInput) as refused:
        check_rewards(ScoringConfig(rewards=(reward,), **settings))
    return str(refused.value)


@needs_sandbox
@pytest.mark.skipif(not switches_user(), reason="this needs root")
def test_in_a_job_that_runs_as_root_a_folder_that_only_root_can_read_is_refused(tmp_path: Path, monkeypatch):
    (tmp_path / "judging.py").write_text("def judge(prompt, completion, answer): return 1.0")
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    message = refusal(TargetReward(target="judging:judge"), sandbox="bubblewrap")
    assert all(part in message for part in ("runs as root", f"cannot read {tmp_path}", f"chmod -R o+rX {tmp_path}"))


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_sandbox_that_is_missing_or_does_not_work_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    message = refusal(sandbox="bubblewrap")
    assert "scoring.sandbox" in message and "bwrap" in message
    write_script(tmp_path / "bwrap", "echo 'bwrap: No permissions to create new namespace' >&2\nexit 1")
    assert "bwrap: No permissions to create new namespace" in refusal(sandbox="bubblewrap")


def test_an_interpreter_that_is_too_old_is_refused(tmp_path: Path):
    old = tmp_path / "python3.8"
    write_script(old, """echo '[[3, 8], "/usr", "/usr", ""]'""")
    message = refusal(python=str(old))
    assert all(part in message for part in ("scoring.python", "3.9", "3.8", str(old)))
