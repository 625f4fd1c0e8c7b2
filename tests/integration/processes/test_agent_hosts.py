"""Processes that start agents: what happens to agents, helpers and results if processes end at a bad time."""

import os
import select
import signal
import time
import uuid

import psutil
import pytest

from rheostat.infra.processes.agents import AgentHosts, AgentOrder
from rheostat.models.agents.runtime import describe_agent
from tests.support.episodes import agent


@pytest.fixture
def open_hosts(tmp_path):
    """Function that opens hosts of an agent of tests/support/agents.py."""
    opened = []

    def open_hosts(name):
        opened.append(AgentHosts(*describe_agent(agent(name)), tmp_path))
        return opened[-1]

    yield open_hosts
    for hosts in opened:
        hosts.close()


def start(hosts, episode, do="", **fields):
    hosts.start(AgentOrder(episode, {"do": do, **fields}, seed=1, url="http://127.0.0.1:1/v1", key="-"))


def wait(hosts, number):
    """Return the ends of agents, by episode, when there are this many."""
    ends, until = {}, time.monotonic() + 60
    while len(ends) < number and time.monotonic() < until:
        ends |= {end.episode: end for end in hosts.wait(0.1, lambda _, listener: listener.close())}
    return ends


def wait_until_ready(hosts):
    until = time.monotonic() + 60
    while not hosts.has_started("") and time.monotonic() < until:
        assert hosts.wait(0.1, lambda _, listener: listener.close()) == []
    assert hosts.has_started("")


def processes_with(mark):
    """Return the running processes with an argument."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_result_that_was_sent_before_the_process_of_the_agents_was_killed_is_kept(open_hosts, tmp_path):
    hosts = open_hosts("act")
    start(hosts, "slow", "sleep")
    wait_until_ready(hosts)
    start(hosts, "fast", "write", path=str(tmp_path / "done"))
    child = hosts._hosts[""].child
    assert select.select([child.output], [], [], 60)[0], "the result was not sent"
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its end and the result are read together
    ends = wait(hosts, 2)
    assert (ends["fast"].result, ends["fast"].is_lost) == (1, False)
    assert ends["slow"].is_lost


def test_a_result_that_is_nested_too_deeply_costs_its_own_episode_alone(open_hosts):
    hosts = open_hosts("act")
    start(hosts, "deep", "nest")
    start(hosts, "other", "")
    ends = wait(hosts, 2)
    assert "nested too deeply" in ends["deep"].error and not ends["deep"].is_lost
    assert ends["other"].result == 1


def test_processes_that_the_object_of_an_agent_has_started_serve_all_agents(open_hosts):
    hosts = open_hosts("Helped")
    for episode in "abc":
        start(hosts, episode)
        assert wait(hosts, 1)[episode].result is True
        time.sleep(0.6)  # limits are checked meanwhile


def test_an_agent_that_is_stopped_before_it_was_started_does_not_run(open_hosts, tmp_path):
    hosts = open_hosts("act")
    start(hosts, "stopped", "write", path=str(tmp_path / "stopped"))
    hosts.stop("stopped")
    start(hosts, "run", "write", path=str(tmp_path / "run"))
    assert [*wait(hosts, 1)] == ["run"]
    assert (tmp_path / "run").exists() and not (tmp_path / "stopped").exists()


def test_processes_of_agents_end_with_the_process_that_started_the_agents(open_hosts):
    mark, hosts = uuid.uuid4().hex, open_hosts("act")
    start(hosts, "lost", "lose", mark=mark)
    assert wait(hosts, 1)["lost"].is_lost
    assert psutil.wait_procs(processes_with(mark), timeout=5)[1] == []


def test_all_descendants_of_an_agent_end_with_it(open_hosts):
    mark, hosts = uuid.uuid4().hex, open_hosts("act")
    start(hosts, "daemon", "daemon", mark=mark)
    assert wait(hosts, 1)["daemon"].result == 1
    assert processes_with(mark) == []
