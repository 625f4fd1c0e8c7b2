"""The tool `python`, which runs programs of a policy in a sandbox: errors of a program are returned to the policy."""

from dataclasses import replace
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.processes.episodes import EpisodeRequest
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.environments import PythonEnvironment, ToolsEnvironment
from rheostat.models.environments.pool import EnvironmentPool, start_process
from rheostat.models.environments.runtime import tool_schemas
from rheostat.models.text.calls import Call, ParsedTurn
from rheostat.models.workers.rollout import RolloutWorker
from tests.support.environments import episode_with_calls
from tests.support.rollout_workers import ENGINE, digest, example
from tests.support.sandboxes import needs_sandbox

PYTHON = PythonEnvironment(step_seconds=3, memory_mib=256)
STOPS = SamplingConfig(max_new_tokens=60, stop=("a", "e", "o", " "))


def run_codes(*codes: str, name: str = "python") -> EpisodeRequest:
    return episode_with_calls(*(Call(name, {"code": code}) for code in codes))


@pytest.fixture(scope="module")
def tool():
    running = start_process(PYTHON)
    running.ready()
    yield running
    running.kill()


def run_programs(tool, *codes: str) -> list[str]:
    step, failure = tool.step(run_codes(*codes))
    assert failure is None
    return [message.content for message in step.messages]


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("2**10", "1024\n"),
        ("print('a')\nx = 6\nx * 7", "a\n42\n"),
        ("None", "(no output)"),
        ("x = 1", "(no output)"),
        ("import sys\nprint('in time', file=sys.stderr)", "in time\n"),
        ("print(1)\n1/0", '1\nTraceback (most recent call last):\n  File "program.py", line 2, in <module>\n    1/0\n'),
        ("x =", '  File "program.py", line 1\n    x =\n'),
        ("f(", "SyntaxError: '(' was never closed\n"),
        ("exit(3)", "Error: its process ended with exit code 3"),
        ("import time\ntime.sleep(99)", "Error: it took longer than 3 s"),
        ("print('x' * 2_000_000)", "x\nError: its process wrote more than 1048576 bytes"),
        ("bytearray(1 << 30)", "MemoryError\n"),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "Error: its process was killed by SIGKILL"),
    ],
)
def test_a_call_returns_its_output_and_value_or_how_it_ended(tool, code: str, output: str):
    [found, after] = run_programs(tool, code)[0], run_programs(tool, "6 * 7")
    assert found.startswith(output) or found.endswith(output)
    assert after == ["42\n"]


@needs_sandbox
@pytest.mark.parametrize("code", ["while True: pass", "import time\ntime.sleep(99)"])
def test_a_program_that_uses_up_its_time_keeps_its_output_and_the_next_call_is_answered(code: str):
    hasty = start_process(PYTHON.model_copy(update={"step_seconds": 1}))
    try:
        assert run_programs(hasty, f"print(1)\n{code}") == ["1\nError: it took longer than 1 s"]
        assert run_programs(hasty, "6 * 7") == ["42\n"]
    finally:
        hasty.kill()


@needs_sandbox
def test_calls_are_answered_in_order_and_share_no_state(tool):
    first, second, third = run_programs(
        tool, "x = 5\nopen('left', 'w').close()", "x", "import os\nos.path.exists('left')"
    )
    assert (first, third) == ("(no output)", "False\n")
    assert second.endswith("NameError: name 'x' is not defined\n")


@needs_sandbox
def test_the_calls_of_a_turn_share_one_time_limit(tool):
    waits = "import time\ntime.sleep(2)"
    late = "Error: it took longer than 3 s", "Error: no time is left in this turn"
    *some, last = run_programs(tool, "1", *[waits] * 4)
    assert some[0] == "1\n"
    assert last == late[1]
    assert all(each in ("(no output)", *late) for each in some[1:])


@needs_sandbox
def test_a_turn_without_a_call_ends_the_episode_and_a_wrong_call_does_not(tool):
    step, _ = tool.step(episode_with_calls(text="42"))
    assert (step.done, step.messages) == (True, ())
    step, _ = tool.step(run_codes("1", name="pyton"))
    assert (step.done, step.messages[0].content) == (False, "Error: no tool 'pyton'; the tools are python")
    assert run_programs(tool, 5) == ["Error: python: expected a text as code"]


@needs_sandbox
def test_every_process_prints_a_set_in_the_same_order(tool):
    other = start_process(PYTHON)
    try:
        found = [run_programs(each, "set('abcdefgh')") for each in (tool, other)]
    finally:
        other.kill()
    assert found[0] == found[1]


@needs_sandbox
def test_prompts_show_the_tool():
    [schema] = tool_schemas(PYTHON)
    assert schema["function"]["name"] == "python"
    assert schema["function"]["parameters"]["required"] == ["code"]


@needs_sandbox
def test_a_failure_of_the_sandbox_fails_the_episode(tool, monkeypatch):
    """Use a program that does not exist, so that starting it fails as on a machine without free processes."""
    monkeypatch.setattr("rheostat.models.environments.python.PROGRAM", "no/such/folder")
    step, failure = tool.step(run_codes("1"))
    assert step is None
    assert failure.startswith("the sandbox failed: FileNotFoundError")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (PYTHON, "rollout.environment kind 'python'"),
        (ToolsEnvironment(tools=("tests.support.games:price",), sandbox="bubblewrap"), "rollout.environment.sandbox"),
    ],
)
def test_without_bubblewrap_an_environment_is_refused_with_the_setting_that_requires_it(
    settings, key, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = EnvironmentPool(settings)
    with pytest.raises(BadInput, match=f"{key}: .* bwrap is not on the PATH"):
        pool.answer([EpisodeRequest("0", problem={}, seed=0)], [0])


@needs_sandbox
def test_tools_in_the_sandbox_return_the_same_answers_and_read_no_other_files(tmp_path: Path):
    (tmp_path / "secret").write_text("canary")
    reads = episode_with_calls(Call("read", {"path": str(tmp_path / "secret")}), Call("price", {"item": "bread"}))
    settings = ToolsEnvironment(tools=("tests.support.games:price", "tests.support.games:read"))
    said = []
    for sandbox in ("none", "bubblewrap"):
        pool = EnvironmentPool(settings.model_copy(update={"sandbox": sandbox, "processes": 1}))
        try:
            [answered] = pool.answer([reads], [0])
        finally:
            pool.close()
        said.append([message.content for message in answered.step.messages])
    assert said == [["canary", "5 crowns"], ["Error: No such file or directory", "5 crowns"]]


def measuring(text: str) -> ParsedTurn:
    """Treat any text of the policy as a program, also text that is not valid Python."""
    code = f"print(len({text!r}))" if len(text) % 3 else text
    return ParsedTurn(text, (Call("python", {"code": code}),))


@needs_sandbox
def test_episodes_with_python_do_not_depend_on_the_number_of_processes(tmp_path: Path):
    store = open_store(f"{tmp_path}/run")
    work = replace(example(store, tmp_path / "policy"), sampling=STOPS, rows=(7,))
    more = {"prompts": "text", "parser": f"{__name__}:measuring", "turn_tokens": 12, "observation_tokens": 16}
    digests = []
    for processes in (1, 2):
        settings = PythonEnvironment(processes=processes, max_turns=3, **more)
        worker = RolloutWorker(str(tmp_path), "run", ENGINE, 1, environment=settings)
        try:
            outcome = worker.generate(work)
        finally:
            worker.close()
        digests.append(digest(outcome))
    assert digests[0] == digests[1]
    rows = read_shard(store, outcome.shards[0]).to_pylist()
    assert {row["finish_reason"] for row in rows} <= {"turns", "length"}
    assert sum(turn["observation"] > 0 for row in rows for turn in row["turns"]) > 2
