"""Episodes of the package verifiers with a taskset of the user: turns, rewards, failures and time limits."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from rheostat.infra.environments.find import find_python
from rheostat.infra.errors import BadInput
from rheostat.infra.processes.agents import AgentHosts
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.models.agents.runtime import describe_agent
from rheostat.models.config.agents import VerifiersEnvironment
from rheostat.models.config.data import VerifiersData
from rheostat.models.config.rollout import PartialRollout
from rheostat.models.data.problems import load_problems
from rheostat.models.records.versions import ModelVersion
from rheostat.tasks.views.query import query_runs
from tests.support.episodes import chat_episodes, index_rows
from tests.support.jobs import ROOT
from tests.support.policies import write_chat_policy

pytestmark = [pytest.mark.verifiers, pytest.mark.timeout(600)]
TASKSETS = str(Path(__file__).parents[2] / "support" / "tasksets")
TASKSET = {"id": "letters_taskset"}


@pytest.fixture(autouse=True)
def _user_folder(monkeypatch):
    """Folder of a user with a taskset and a harness."""
    find_python("verifiers", None)
    monkeypatch.syspath_prepend(TASKSETS)


@pytest.fixture(scope="module")
def episodes(home):
    return chat_episodes(home, max_new_tokens=3500)


def play(episodes, harness, **choices):
    """Run the episodes of two tasks and return their rows by task."""
    settings, shard = prepare(episodes, harness, **choices)
    rows = episodes.play_rows(settings, prompts=shard)
    return [[row for row in rows if row["prompt_row"] == number] for number in (2, 3)]


def prepare(episodes, harness, *, fails="", harness_options=(), agent_seconds=300, **options):
    """Return settings and the prompt shard of two tasks, the first of which fails in the way `fails`."""
    taskset = {**TASKSET, "options": {"fails": fails}}
    data = VerifiersData(taskset=taskset, heldout_fraction=0.0001)
    tasks = {each.columns["task"]["number"]: each for each in load_problems(data, "train", 0)}
    prompts = read_shard(episodes.store, episodes.work.prompts)
    columns = [json.dumps({"task": tasks[row].columns["task"]}) for row in range(prompts.num_rows)]
    prompts = prompts.set_column(prompts.column_names.index("columns"), "columns", pa.array(columns))
    shard = write_shard(episodes.store, prompts, kind="prompts", metadata={})
    settings = VerifiersEnvironment(
        taskset=taskset,
        harness={"id": harness, "options": dict(harness_options)},
        runtime={"type": "subprocess"},
        options={"agent": {"max_turns": 3, **options}},
        turn_tokens=20,
        parser="hermes",
        agent_seconds=agent_seconds,
    )
    return settings, shard


@pytest.mark.parametrize("harness", ["null", "bash"])
def test_the_rewards_of_a_taskset_are_those_of_the_policys_turns(episodes, harness):
    for row in [row for rows in play(episodes, harness) for row in rows]:
        assert row["finish_reason"] in ("stop", "length"), row["turns"][-1]["error"]
        assert row["turns"][-1]["reward"] == 2 * len(row["messages"][-1]["content"].strip())
        assert any("bash tool" in each["content"] for each in row["messages"]) == (harness == "bash")
        assert row["turns"][0]["tokens"] <= 20


def test_episodes_that_are_cut_continue_with_their_stored_turns(episodes):
    settings, shard = prepare(episodes, "bash")
    partial = PartialRollout(tokens=12, max_staleness=1)
    first = episodes.play(settings, prompts=shard, partial=partial)
    policy = ModelVersion(version=1, weights=episodes.work.policy.weights)
    continued = {"rows": (), "continued": first.shards[1], "iteration": episodes.work.iteration + 1}
    second = episodes.play(settings, prompts=shard, partial=partial, policy=policy, **continued)
    cut = {name: row for name, row in index_rows(episodes.read_rows(first.shards[1])).items() if row["turns"]}
    rows = index_rows(episodes.read_rows(second.shards[0]))
    assert "dropped_tokens" not in second.metrics
    for name, row in rows.items():
        assert row["finish_reason"] in ("stop", "length"), row["turns"][-1]["error"]
        begun = cut[name]["completion_tokens"] if cut[name]["finish_reason"] == "cut" else row["completion_tokens"]
        assert row["completion_tokens"][: len(begun)] == begun
    assert any(turn["replayed"] for row in rows.values() for turn in row["turns"])


@pytest.mark.parametrize(
    ("fails", "expected"), [("setup", "RuntimeError: no such repository"), ("reward", "no tests were found")]
)
def test_a_failing_task_fails_only_its_own_episodes_with_a_reason(episodes, fails, expected):
    failing, working = play(episodes, "null", fails=fails)
    for row in failing:
        assert row["finish_reason"] == "failed"
        assert expected in row["turns"][-1]["error"]
    assert [row["finish_reason"] for row in working] != ["failed"] * 2
    assert all(row["turns"][-1]["reward"] is not None for row in working)


def test_an_episode_that_a_time_limit_of_verifiers_ends_is_scored(episodes):
    for row in [row for rows in play(episodes, "hanging_harness", timeout={"rollout": 5}) for row in rows]:
        assert [turn["reward"] for turn in row["turns"]] == [2 * len(row["turns"][0]["text"].strip())]


def test_a_harness_beyond_the_time_limit_is_stopped_with_all_its_processes(episodes):
    seconds = f"3600.{os.getpid()}"
    rows = play(episodes, "hanging_harness", harness_options={"seconds": seconds}, agent_seconds=5)
    errors = {row["turns"][-1]["error"] for two in rows for row in two}
    assert errors == {"the agent ran longer than 5 s (rollout.environment.agent_seconds)"}
    assert not [each for each in psutil.process_iter(["cmdline"]) if seconds in (each.info["cmdline"] or [])]


def test_the_tasks_of_a_taskset_are_divided_into_two_splits():
    data = VerifiersData(taskset={**TASKSET, "options": {"tasks": None}}, limit=40, heldout_fraction=0.3)
    splits = [load_problems(data, split, 0) for split in ("train", "heldout")]
    numbers = [{each.columns["task"]["number"] for each in split} for split in splits]
    assert numbers[0] | numbers[1] == {*range(40)}
    assert not numbers[0] & numbers[1] and min(map(len, numbers)) > 4
    assert splits[0][0].prompt[0].text == f"Write {min(numbers[0])} letters."


@pytest.mark.parametrize(
    ("taskset", "expected"),
    [
        ({"id": "leters_taskset"}, "data.taskset 'leters_taskset': there is no .*, did you mean 'letters_taskset'"),
        ({**TASKSET, "options": {"taks": 3}}, "taks: Extra inputs are not permitted"),
        ({**TASKSET, "options": {"tasks": None}}, "the taskset has no end. Set data.limit"),
        ({**TASKSET, "options": {"tasks": 0}}, "has 0 tasks"),
        ({"id": "hanging_harness"}, "exports no Taskset subclass"),
    ],
)
def test_a_taskset_that_cannot_be_read_is_named_in_one_line(taskset, expected):
    with pytest.raises(BadInput, match=expected) as refused:
        load_problems(VerifiersData(taskset=taskset), "train", 0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"harness": {"id": "bahs"}}, "rollout.environment: there is no harness 'bahs': .*, did you mean 'bash'"),
        ({"runtime": {"type": "subproces"}}, "agent.runtime: .*'subprocess'"),
        ({"options": {"agent": {"max_turn": 3}}}, "max_turn"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_named_in_one_line(changes, expected, tmp_path):
    settings = VerifiersEnvironment(**{"taskset": TASKSET, "runtime": {"type": "subprocess"}, **changes})
    hosts = AgentHosts(*describe_agent(settings), tmp_path)
    with pytest.raises(BadInput, match=expected) as refused:
        hosts.check()
    hosts.close()
    assert "\n" not in str(refused.value)


def test_the_example_of_the_page_trains(tmp_path, monkeypatch):
    """The policy is tiny, and the run has one iteration."""
    page = (ROOT / "docs/verifiers.md").read_text()
    [module, job] = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "toml"))
    (tmp_path / "letters_taskset.py").write_text(module)
    (tmp_path / "job.toml").write_text(job)
    write_chat_policy(tmp_path / "policy", "qwen-2.5", likely={"<|im_end|>": 0.05})
    monkeypatch.chdir(tmp_path)
    settings = ["policy.path=policy", "iterations=1", "rollout.prompts=2", "rollout.group_size=2"]
    settings += ["rollout.environment.turn_tokens=8", "rollout.sampling.max_new_tokens=985"]
    command = [sys.executable, "-m", "rheostat", "train", "job.toml", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    rows = query_runs("runs", "select finish_reason, reward from rollouts", names=["letters"]).to_pylist()
    assert len(rows) == 4 and {row["finish_reason"] for row in rows} <= {"stop", "length"}
    assert all(row["reward"] is not None for row in rows)
