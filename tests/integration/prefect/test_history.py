"""Prefect's history pruned by the settings that docs/operations.md names, on a real server."""

import asyncio
import re
import sqlite3

import httpx
import pytest
from prefect import flow, tags, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)

from tests.support.jobs import PASSWORD, ROOT, copy_prefect_database, prefect_server, wait_for


def documented():
    """Settings in the page's section on Prefect's history."""
    page = (ROOT / "docs" / "operations.md").read_text().partition("## Prefect's history")[2].partition("\n## ")[0]
    return dict(re.findall(r"^export (PREFECT_\w+)=(\S+)", page, re.MULTILINE))


@pytest.fixture
def database(together, prefect_api, tmp_path):
    """The database of a server that prunes."""
    copy_prefect_database(together / "prefect", tmp_path / "prefect")
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
    """Ids of a run and its sub-flows, which have its name as a tag."""
    return [run["id"] for run in find(server, "flow_runs", flow_runs={"tags": {"all_": [name]}})]


def shown(server, runs):
    """How many flow runs, task runs and artifacts the server still shows of some flow runs."""
    below = {"flow_runs": {"id": {"any_": runs}}}, {"artifacts": {"flow_run_id": {"any_": runs}}}
    tasks = [task for task in find(server, "task_runs") if task["flow_run_id"] in runs]
    return len(find(server, "flow_runs", **below[0])), len(tasks), len(find(server, "artifacts", **below[1]))


def age(database, runs, *, days):
    """Have what has ended have ended so many days before."""
    earlier = "UPDATE flow_run SET end_time = strftime('%Y-%m-%d %H:%M:%f', end_time, ?) WHERE id = ?"
    with sqlite3.connect(database, timeout=60) as connection:
        connection.executemany(earlier, [(f"-{days} days", run) for run in runs])


@pytest.mark.system
@pytest.mark.timeout(600)
async def test_what_ended_long_ago_goes_with_all_below_it_and_a_run_that_goes_on_keeps_what_it_has(server, database):
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

    api = {PREFECT_API_URL: server, PREFECT_API_AUTH_STRING: ":".join(PASSWORD)}
    with temporary_settings({**api, PREFECT_LOGGING_TO_API_ENABLED: False}):
        await run("old")
        await run("new")
        going_on = asyncio.ensure_future(run("going-on"))
        await begun.wait()
        runs = {name: runs_of(server, name) for name in ("old", "new", "going-on")}
        whole = {(2, 2, 2)}  # a sub-flow is a task run of its parent; the server records task runs a moment later
        assert await asyncio.to_thread(wait_for, lambda: {shown(server, some) for some in runs.values()} == whole)
        for name, days in (("old", 40), ("new", 20), ("going-on", 40)):
            age(database, runs[name], days=days)
        assert await asyncio.to_thread(wait_for, lambda: shown(server, runs["old"]) == (0, 0, 0), seconds=120)
        assert {shown(server, runs[name]) for name in ("new", "going-on")} == whole
        over.set()
        await going_on
