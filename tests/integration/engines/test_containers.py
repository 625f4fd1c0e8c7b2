"""Agents in containers: what they reach, how they end, and messages about missing images and programs."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from http.server import HTTPServer
from unittest.mock import patch

import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.agents.runtime import check_agent
from rheostat.models.config.agents import AgentEnvironment
from tests.support.chat_templates import tokenizer_of
from tests.support.containers import IMAGE, MOUNTED, create_image, find_missing, list_containers, serve_docker
from tests.support.episodes import agent, chat_episodes, errors_of

pytestmark = [pytest.mark.containers, pytest.mark.skipif(bool(find_missing()), reason=find_missing())]


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory):
    with patch.dict(os.environ):
        create_image(tmp_path_factory.mktemp("podman"))
        yield


@pytest.fixture(scope="module")
def agents(home):
    return chat_episodes(home, max_new_tokens=2000)


def contained(name="talk", **settings):
    return agent(name, **{"sandbox": "podman", "image": IMAGE, "container_options": MOUNTED, **settings})


def test_an_agent_in_a_container_reaches_only_the_policy(agents, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_WORKER", "x")
    monkeypatch.setenv("SECRET_OF_AGENT", "y")
    with HTTPServer(("127.0.0.1", 0), None) as other:
        options = {"port": other.server_port, "folder": str(tmp_path)}
        settings = contained("look", options=options, variables=("SECRET_OF_AGENT",))
        rows = agents.play_rows(settings, rows=(2,), group_size=2)
    for error in errors_of(rows).values():
        found = json.loads(error.removeprefix("the agent failed: RuntimeError: "))
        assert found["variables"] == ["SECRET_OF_AGENT"]
        assert (found["port"], found["writes"], found["runner"]) == (False, False, False)
    assert not list_containers()


def test_an_agent_in_a_container_has_the_turns_and_rewards_of_one_without(agents):
    inside, outside = (agents.play_rows(settings) for settings in (contained(), agent()))
    for row, other in zip(inside, outside, strict=True):
        assert (row["completion_tokens"], row["messages"]) == (other["completion_tokens"], other["messages"])
        assert [turn["reward"] for turn in row["turns"]] == [turn["reward"] for turn in other["turns"]]


def test_a_program_in_a_container_is_an_agent(agents):
    command = ("python3", "tests/support/agents.py", "")
    settings = AgentEnvironment(
        command=command, parser="hermes", sandbox="podman", image=IMAGE, container_options=MOUNTED
    )
    rows = agents.play_rows(settings, rows=(2,))
    assert {*errors_of(rows).values()} == {None}
    assert [row["turns"][0]["reward"] for row in rows] == [len(row["turns"][0]["text"]) for row in rows]


def test_an_agent_that_hangs_or_spawns_costs_its_own_episode_and_leaves_no_container(agents, tmp_path):
    for how in ("sleep", "spawn"):
        options = {"how": how, "mark": str(tmp_path / how)}
        rows = agents.play_rows(contained("fail", options=options, agent_seconds=5), group_size=1)
        reasons = errors_of(rows)
        assert "ran longer than 5 s" in reasons[2]
        assert reasons[3] is None
    assert not list_containers()


def test_containers_end_with_a_killed_worker(agents):
    settings = contained("fail", options={"how": "sleep"}, agent_seconds=600)
    worker = multiprocessing.get_context("spawn").Process(target=agents.play, args=(settings,))
    worker.start()
    while not list_containers():
        assert worker.is_alive()
        time.sleep(0.1)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join(300)
    deadline = time.monotonic() + 300
    while list_containers():
        assert time.monotonic() < deadline, "a container continues without its worker"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"image": "localhost/not-there:1"}, r"rollout.environment.image: podman has no image 'localhost/not-there:1'"),
        ({"container_options": ()}, r"podman cannot run python3 in the image"),
        ({"container_options": (*MOUNTED, "--not-an-option")}, r"unknown flag: --not-an-option"),
    ],
)
def test_a_container_that_cannot_start_is_named_before_the_run(settings, expected):
    with pytest.raises(BadInput, match=expected):
        check_agent(contained(**settings), tokenizer_of("qwen-2.5"), ())


def test_a_function_that_cannot_be_imported_in_the_container_and_a_missing_program_are_named():
    with pytest.raises(BadInput, match="has no attribute 'talk_', did you mean 'talk'"):
        check_agent(contained("talk_"), tokenizer_of("qwen-2.5"), ())
    missing = AgentEnvironment(command=("not-there",), sandbox="podman", image=IMAGE, container_options=MOUNTED)
    with pytest.raises(BadInput, match=r"no program 'not-there' on the PATH of the image"):
        check_agent(missing, tokenizer_of("qwen-2.5"), ())


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker's client is not installed")
def test_dockers_client_starts_and_ends_containers_like_podman(agents, tmp_path):
    with serve_docker(tmp_path):
        rows = agents.play_rows(contained(sandbox="docker"), rows=(2,))
        options = {"how": "sleep"}
        late = agents.play_rows(
            contained("fail", sandbox="docker", options=options, agent_seconds=5), rows=(2,), group_size=1
        )
    assert {*errors_of(rows).values()} == {None}
    assert "ran longer than 5 s" in errors_of(late)[2]
    assert not list_containers()
