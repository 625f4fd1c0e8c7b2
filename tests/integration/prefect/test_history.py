"""Pruning of Prefect's history by the settings in docs/operations.md, on a real server."""

import asyncio
import re
import sqlite3

import httpx
import pytest
from prefect import flow, tags, task
from prefect.artifacts import acreate_markdown_artifact

from tests.support.in_process import prefect_at
from tests.support.jobs import PASSWORD, ROOT, prefect_server, wait_for


def documented():
    """Return the settings in the page's section on Prefect's history."""
    page = (ROOT / "docs" / "operations.md").read_text().partition("## Prefect's history")[2].partition("\n## ")[0]
    return dict(re.findall(r"^export (PREFECT_\w+)=(\S+)", page, re.MULTILINE))


@pytest.fixture
def database(tmp_path):
    """Database of a server that prunes."""
    (tmp_path / "prefect").mkdir(mode=0o700)
    return tmp_path / "prefect" / "prefect.db"


@pytest.fixture
def server(database, monkeypatch):
    for name, value in documented().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS", "1")
    with prefect_server(database.parent) as url:
        yield url


def find(server, kind, **query):
    return httpx.post(f"{server}/{kind}/filter", json=query, auth=PASSWORD, timeout=30).raise_for_status().json()


def runs_of(server, name):
    """Return the ids of a run and of its sub-flows, which have the run's name as a tag."""
    return [run["id"] for run in find(server, "flow_runs", flow_runs={"tags": {"all_": [name]}})]


def shown(server, runs):
    """Return the number of flow runs, task runs and artifacts that the server still shows for some flow runs."""
    below = {"flow_runs": {"id": {"any_": runs}}}, {"artifacts": {"flow_run_id": {"any_": runs}}}
    of_runs = {"task_runs": {"flow_run_id": {"any_": runs}}}
    kinds = (("flow_runs", below[0]), ("task_runs", of_runs), ("artifacts", below[1]))
    return tuple(len(find(server, kind, **query)) for kind, query in kinds)


def age(database, runs, *, days):
    """Change the end times of all ended flow runs to this number of days ago."""
    earlier = "UPDATE flow_run SET end_time = strftime('%Y-%m-%d %H:%M:%f', end_time, ?) WHERE id = ?"
    with sqlite3.connect(database, timeout=60) as connection:
        connection.executemany(earlier, [(f"-{days} days", run) for run in runs])


@pytest.mark.system
@pytest.mark.timeout(600)
async def test_finished_runs_are_pruned_with_their_children_and_active_runs_are_kept(server, database):
    begun, over = asyncio.Event(), asyncio.Event()

    @task
    async def generate():
        await acreate_markdown_artifact("told", key="told")

    @flow
    async def rollout():
        await generate()

    @flow
    async def train(name):
        await rollout()
        await acreate_markdown_artifact("summary", key="summary")
        if name == "going-on":
            begun.set()
            await over.wait()

    async def run(name):
        with tags(name):
            await train(name)

    async def recorded(name):
        await run(name)
        return await asyncio.to_thread(wait_for, lambda: {shown(server, runs_of(server, name))} == whole, seconds=10)

    with prefect_at(server):
        whole = {(2, 2, 2)}  # a sub-flow is a task run of its parent; the server records task runs a moment later
        for number in range(20):  # what comes before the server's recorder listens is lost
            if await recorded(f"first-{number}"):
                break
        await run("old")
        await run("new")
        going_on = asyncio.ensure_future(run("going-on"))
        await begun.wait()
        runs = {name: runs_of(server, name) for name in ("old", "new", "going-on")}
        assert await asyncio.to_thread(wait_for, lambda: {shown(server, some) for some in runs.values()} == whole)
        for name, days in (("old", 40), ("new", 20), ("going-on", 40)):
            age(database, runs[name], days=days)
        assert await asyncio.to_thread(wait_for, lambda: shown(server, runs["old"]) == (0, 0, 0))
        assert {shown(server, runs[name]) for name in ("new", "going-on")} == whole
        over.set()
        await going_on
