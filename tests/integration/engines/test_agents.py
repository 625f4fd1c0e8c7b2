"""Episodes of agents: their turns and rewards, and agents that fail, hang, flood or try to leave their sandbox."""

import multiprocessing
import signal
import sys
from http.server import HTTPServer

import numpy as np
import psutil
import pytest

from rheostat.infra.errors import BadInput, StoreFailed, WorkerLost
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.shards import read_shard
from rheostat.models.agents.runtime import check_agent
from rheostat.models.config.agents import AgentEnvironment
from rheostat.models.engines.local.continuous import ContinuousDecoder
from tests.support.chat_templates import tokenizer_of
from tests.support.episodes import agent, chat_episodes, errors_of, forward_logprobs

PROGRAM = "tests/support/agents.py"


@pytest.fixture(scope="module")
def agents(home):
    return chat_episodes(home, max_new_tokens=2000)


def test_the_turns_of_an_agent_are_recorded_with_its_rewards(agents):
    rows = agents.play_rows(agent())
    assert [len(row["turns"]) for row in rows] == [3] * 4
    for row in rows:
        lengths = [turn["tokens"] for turn in row["turns"]]
        assert max(lengths) <= 20
        assert sum(lengths) == sum(each["tokens"] for each in row["segments"] if each["policy_version"] == 0)
        last = row["messages"][-1]
        assert [turn["reward"] for turn in row["turns"]] == [0.5, None, len(last["content"])]
        assert [turn["parent"] for turn in row["turns"]] == [None, 0, 1]
        assert (last["role"], last["content"]) == ("assistant", row["turns"][-1]["text"])


def test_log_probs_of_an_agents_turns_equal_those_of_a_forward_pass(agents):
    table = read_shard(agents.store, agents.play(agent("talk_async")).shards[0])
    assert {len(row["turns"]) for row in table.to_pylist()} == {3}
    for computed, recorded in forward_logprobs(agents.policy, table):
        np.testing.assert_allclose(computed, recorded, atol=2e-4)


def test_equal_seeds_give_equal_turns_with_and_without_other_agents(agents):
    alone = [row["turns"][0]["text"] for row in agents.play_rows(agent(open_episodes=1))]
    together = [row["turns"][0]["text"] for row in agents.play_rows(agent())]
    assert alone == together and len({*alone}) > 1


NEVER = "the agent ended without a turn of the policy. Check that it sends its requests to OPENAI_BASE_URL"


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raise", "the agent failed: RuntimeError: no idea"),
        ("exit", "the agent failed: its process ended with exit code 7: about to fail"),
        ("kill", "the agent failed: its process was killed by SIGKILL: about to fail"),
        ("flood", "the agent sent more than 200 requests that were refused"),
        ("foreign", "the agent failed: HTTPError: HTTP Error 401: Unauthorized"),
        ("never", NEVER),
        ("infinite", "the result of the agent must be a finite number, but it is inf"),
        ("key", "the result of the agent has the unknown key 'rewards_', did you mean 'rewards'?"),
        ("object", "the agent failed: TypeError: Object of type object is not JSON serializable"),
        ("large", "the agent failed: its result is larger than 1048576 bytes"),
    ],
)
def test_a_failing_agent_fails_only_its_own_episode_with_a_reason(agents, how, expected):
    rows = agents.play_rows(agent("fail", options={"how": how}))
    assert errors_of(rows) == {2: expected, 3: None}
    assert [row["finish_reason"] for row in rows if row["prompt_row"] == 2] == ["failed"] * 2


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("how", ["hoard", "sleep", "spawn"])
def test_agents_that_exceed_a_limit_are_stopped_with_all_their_processes(agents, how, tmp_path):
    limits = {"memory_mib": 300} if how == "hoard" else {"agent_seconds": 10}
    rows = agents.play_rows(agent("fail", options={"how": how, "mark": str(tmp_path)}, **limits))
    expected = {
        "hoard": "the agent failed: its processes took more than 300 MiB of memory",
    }.get(how, "the agent ran longer than 10 s (rollout.environment.agent_seconds)")
    assert errors_of(rows) == {2: expected, 3: None}
    running = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    assert not [each for each in running if str(tmp_path) in each]


def test_agents_run_again_if_the_process_that_started_them_is_killed(agents, tmp_path):
    rows = agents.play_rows(agent("kill_host", options={"marks": str(tmp_path)}))
    assert (tmp_path / "killed").exists()
    assert errors_of(rows) == {2: None, 3: None}
    undisturbed = agents.play_rows(agent("kill_host", options={"marks": str(tmp_path)}))
    assert [row["completion_tokens"] for row in rows] == [row["completion_tokens"] for row in undisturbed]


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("", None),
        ("link", "the agent failed: its result is not valid JSON: result.json: Too many levels of symbolic links"),
        ("directory", "the agent failed: its result is not valid JSON: result.json is not a regular file"),
        ("pipe", "the agent failed: its result is not valid JSON: result.json is not a regular file"),
    ],
)
def test_a_program_is_an_agent(agents, how, expected):
    settings = AgentEnvironment(command=(sys.executable, PROGRAM, how), turn_tokens=20, parser="hermes")
    rows = agents.play_rows(settings)
    errors = {*errors_of(rows).values()}
    if expected is None:
        assert errors == {None}
        assert [row["turns"][0]["reward"] for row in rows] == [len(row["turns"][0]["text"]) for row in rows]
    else:
        [error] = errors
        assert error.startswith(expected)


def test_an_agent_in_a_sandbox_reaches_only_the_policy(agents, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_WORKER", "x")
    monkeypatch.setenv("SECRET_OF_AGENT", "y")
    with HTTPServer(("127.0.0.1", 0), None) as other:
        options = {"port": other.server_port, "folder": str(tmp_path)}
        settings = {"sandbox": "bubblewrap", "options": options, "variables": ("SECRET_OF_AGENT",)}
        rows = agents.play_rows(agent("look", **settings), rows=(2,), group_size=2)
    for error in errors_of(rows).values():
        found = error.removeprefix("the agent failed: RuntimeError: ")
        assert '"variables": ["SECRET_OF_AGENT"]' in found
        assert '"port": false' in found and '"writes": false' in found
    assert [len(row["turns"]) for row in rows] == [1, 1]


def test_a_killed_worker_loses_no_ended_episode_and_no_answered_request(agents, tmp_path):
    options = {"journals": f"{agents.home}/run/episodes", "marks": str(tmp_path)}
    settings = agent("kill_worker", options=options)
    worker = multiprocessing.get_context("spawn").Process(target=agents.play, args=(settings,))
    worker.start()
    worker.join(300)
    assert worker.exitcode == -signal.SIGKILL
    rows = agents.play_rows(settings)
    replayed = [[turn["replayed"] for turn in row["turns"]] for row in rows]
    assert replayed == [[False], [False], [True, True, False], [True, True, False]]
    assert errors_of(rows) == {2: None, 3: None}
    assert not agents.store.entries("episodes/")
    undisturbed = agents.play_rows(settings)
    assert [row["completion_tokens"] for row in rows] == [row["completion_tokens"] for row in undisturbed]
    assert {turn["replayed"] for row in undisturbed for turn in row["turns"]} == {False}


def test_an_error_of_the_engine_is_raised_and_ends_no_episode(agents, monkeypatch):
    """The agents fail at once, because their requests do."""

    def generate(*_):
        raise WorkerLost("the engine is lost")

    monkeypatch.setattr(ContinuousDecoder, "generate", generate)
    with pytest.raises(WorkerLost, match="the engine is lost"):
        agents.play(agent())
    assert [entry.key for entry in agents.store.entries("episodes/") if entry.key.endswith("end.json")] == []


def test_a_turn_that_the_journal_cannot_store_is_an_error_of_the_store_and_not_of_the_agent(agents, monkeypatch):
    put, full = LocalStore.put, [True]

    def put_unless_full(self, key, *arguments, **options):
        if full and key.startswith("episodes/") and not key.endswith("end.json"):
            raise StoreFailed("no space left on the device")
        return put(self, key, *arguments, **options)

    monkeypatch.setattr(LocalStore, "put", put_unless_full)
    with pytest.raises(StoreFailed, match="no space left"):
        agents.play(agent())
    full.clear()
    assert not [error for error in errors_of(agents.play_rows(agent())).values() if error]


def test_an_object_of_a_class_serves_all_episodes_each_in_a_copy(agents):
    rows = agents.play_rows(agent("Counter", options={"start": 4}))
    assert [row["turns"][0]["reward"] for row in rows] == [5.0] * 4


def test_requests_beyond_the_limits_of_an_episode_are_refused(agents):
    rows = agents.play_rows(agent(max_requests=2))
    assert [len(row["turns"]) for row in rows] == [2] * 4
    assert {*errors_of(rows).values()} == {"the agent failed: HTTPError: HTTP Error 400: Bad Request"}


def test_a_missing_function_program_variable_or_interpreter_is_named(agents):
    cases = {
        "tests.support.agents' has no attribute 'talk_', did you mean 'talk'": agent("talk_"),
        "is called with the arguments": agent("user"),
        "no program 'not-there' on the PATH": AgentEnvironment(command=("not-there",)),
        "the environment variable 'NOT_THERE' is not set": agent(variables=("NOT_THERE",)),
    }
    for expected, settings in cases.items():
        with pytest.raises(BadInput, match=expected):
            agents.play(settings)


@pytest.mark.parametrize("sandbox", ["bubblewrap", "none"])
def test_the_check_before_a_run_imports_a_sandboxed_agent_in_its_sandbox(tmp_path, sandbox):
    settings = agent("Writes", options={"path": str(tmp_path / "written")}, sandbox=sandbox)
    if sandbox == "none":
        check_agent(settings, tokenizer_of("qwen-2.5"), ())
    else:
        with pytest.raises(BadInput, match=r"agents:Writes.*the object could not be created: [A-Za-z]*Error: "):
            check_agent(settings, tokenizer_of("qwen-2.5"), ())
    assert (tmp_path / "written").exists() == (sandbox == "none")
