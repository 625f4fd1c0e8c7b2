"""Attacks on the sandbox: none gets a score, sees a secret or leaves anything behind, and the next is judged.

They come by three doors: a reward function, the policy's tool `python`, and code that unit tests are run on.
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

from infra.errors import BadInput
from infra.processes.episodes import Asked
from models.config.environments import PythonEnvironment
from models.config.reward_terms import CodeReward, NumericReward, TargetReward
from models.config.rewards import ScoringConfig
from models.environments.pool import started
from models.rewards.code import CodeJudge
from models.rewards.evaluate import Case, Evaluator, check_rewards
from tests.support import hostile_rewards
from tests.support.sandboxes import needs_sandbox

OBEDIENT = TargetReward(name="obedient", target="tests.support.rewards:obedient")
ESCAPES = {
    "exit": "SystemExit: 0",
    "hard_exit": "its process ended with exit code 0",
    "kill_parent": "its process was killed by SIGKILL",
    "kill_all": "its process was killed by SIGKILL",
    "lie": "expected a float, found Liar",
    "forge": "its process (ended with exit code 0|wrote what is no answer)",
    "killing_program": "its process was killed by SIGKILL",
    "poison": "its process wrote what is no answer",
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
"""What each attack ends in: a number that it is worth, or the reason that there is none."""
EXHAUSTING = {
    "loop": "no value after 2 s",
    "output": "no value after 2 s",
    "answer": "its process wrote more than 16777216 bytes",
}
TOLD = {
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
"""What the policy reads of each attack."""


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def attacked(attacks: dict[str, object], port: int, secret: Path) -> dict[str, object]:
    """What each attack ended in, twice each; after each, a completion is judged as always."""
    reward = TargetReward(target="tests.support.hostile_rewards:hostile", options={"port": port})
    evaluator = Evaluator(ScoringConfig(rewards=(reward,), sandbox="bubblewrap", timeout_seconds=2))
    before = set(psutil.Process().children(recursive=True))
    found: dict[str, object] = {}
    try:
        for attack in attacks:
            texts = (attack, "0.25", attack, "0.5")
            [first, quarter, again, half] = evaluator.evaluate([Case(str(secret), text, "") for text in texts])
            assert (quarter.values, half.values) == ((0.25,), (0.5,)), attack
            assert again == first, attack
            found[attack] = first.values[0] if first.error is None else first.error.removeprefix("target: ")
    finally:
        evaluator.close()
    assert set(psutil.Process().children(recursive=True)) == before
    left = secret.name.rpartition("-")[2]
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", left]] == []
    return found


def check(found: dict[str, object], expected: dict[str, object]) -> None:
    for attack, end in expected.items():
        value = found[attack]
        assert re.fullmatch(str(end), str(value)) if isinstance(end, str) else value == end, (attack, value)


@pytest.fixture
def secret(tmp_path: Path, monkeypatch) -> Path:
    """A file that no reward has to do with; its name tells this test's processes from others'."""
    monkeypatch.setenv("API_KEY", "canary")
    path = tmp_path / f"secret-{100000 + os.getpid()}"
    path.write_text("canary")
    return path


@needs_sandbox
def test_no_attack_escapes_and_what_comes_next_is_judged(port: int, secret: Path):
    check(attacked(ESCAPES, port, secret), ESCAPES)
    assert [path.name for path in secret.parent.iterdir()] == [secret.name]


@needs_sandbox
@pytest.mark.slow
def test_no_attack_exhausts_the_machine(port: int, secret: Path):
    check(attacked(EXHAUSTING, port, secret), EXHAUSTING)


def programs(secret: Path, port: int) -> Iterator[tuple[str, str]]:
    """Every attack as a program of a policy, which shows 1.0 where it succeeds."""
    source = inspect.getsource(hostile_rewards).replace("Path(__file__)", "Path('/tmp/program')")
    for attacks in TOLD:
        for attack in attacks.split("|"):
            yield attack, f"{source}\nfound = hostile({str(secret)!r}, {attack!r}, '', port={port})\n"


@needs_sandbox
def test_no_program_of_a_policy_escapes_and_what_comes_next_is_answered(port: int, secret: Path):
    tool = started(PythonEnvironment(step_seconds=5, memory_mib=1024))

    def said(code: str) -> str:
        call = {"name": "python", "arguments": {"code": code}, "error": ""}
        step, failure = tool.step(Asked("0", problem={}, seed=0, turns=({"text": "", "calls": [call]},)))
        assert failure is None
        return step.messages[0].content

    expected = {attack: words for attacks, words in TOLD.items() for attack in attacks.split("|")}
    before = set(psutil.Process().children(recursive=True))
    try:
        found = {}
        for attack, program in programs(secret, port):
            found[attack] = said(f"{program}found")
            assert said("6 * 7") == "42\n", attack
    finally:
        tool.kill()
    assert set(psutil.Process().children(recursive=True)) == before
    assert {attack for attack, words in expected.items() if not re.fullmatch(words, found[attack])} == set()
    assert [path.name for path in secret.parent.iterdir()] == [secret.name]


@needs_sandbox
def test_no_code_under_test_escapes_or_passes_and_what_comes_next_is_judged(port: int, secret: Path):
    reward = CodeReward(test_seconds=5, memory_mib=1024)
    judge = CodeJudge(ScoringConfig(rewards=(reward,)))
    tests = '[{"input": "", "output": "1.0"}]'
    before = set(psutil.Process().children(recursive=True))
    try:
        for attack, program in programs(secret, port):
            texts = (f"```python\n{code}\n```" for code in (f"{program}print(found)", "print(1.0)"))
            found = judge.judge([Case("", text, tests) for text in texts])["code"]
            assert [(each.value, each.error) for each in found] == [(0.0, None), (1.0, None)], attack
    finally:
        judge.close()
    assert set(psutil.Process().children(recursive=True)) == before
    assert [path.name for path in secret.parent.iterdir()] == [secret.name]


@needs_sandbox
def test_values_and_reasons_are_those_without_a_sandbox_also_in_another_python():
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


def refusal(**settings: object) -> str:
    with pytest.raises(BadInput) as refused:
        check_rewards(ScoringConfig(rewards=(OBEDIENT,), **settings))
    return str(refused.value)


def test_a_sandbox_that_cannot_be_had_is_refused_by_name(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "scoring.sandbox: expected bubblewrap's command bwrap on the PATH" in refusal(sandbox="bubblewrap")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    told = refusal(sandbox="bubblewrap")
    assert "bubblewrap does not work here (bwrap: No permissions to create new namespace)" in told


def test_an_interpreter_that_is_none_or_too_old_is_refused(tmp_path: Path):
    assert f"found '{tmp_path}/python': No such file or directory" in refusal(python=f"{tmp_path}/python")
    assert "found '/bin/cat': it does not run as a Python" in refusal(python="/bin/cat")
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\necho \'[[3, 8], "/usr", "/usr", ""]\'\n')
    old.chmod(0o755)
    assert f"expected Python 3.9 or newer, found 3.8 at '{old}'" in refusal(python=str(old))
