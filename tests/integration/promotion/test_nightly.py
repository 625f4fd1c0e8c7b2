"""A nightly retrain by a real server and worker: its form, page, events and notifications."""

import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler

import pytest
import yaml
from prefect.blocks.notifications import CustomWebhookNotificationBlock

from rheostat.infra.store.registry import RegistryRecord, open_registry
from rheostat.tasks.events import emit_of_run
from tests.support.deployments import Server, run_worker, serve_deployments
from tests.support.in_process import prefect_at
from tests.support.jobs import ROOT, TINY, prefect_server, wait_for
from tests.support.servers import serve_http

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

NOTIFICATIONS = ROOT / "infra/notifications.yaml"
PROPOSING = """
name = "nightly"
[[evaluations]]
name = "sums"
data = {kind = "target", target = "arithmetic:ArithmeticData", options = {heldout_problems = 40}}
problems = 40
[promotion]
registry = "assistant"
primary = {suite = "sums", min_gain = -1}
problems = "all"
approve = "manual"
"""
CHANGES = {"iterations": 1, "warmup": {"steps": 2}, "pools": {"cluster": "threads"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """A server with automations, and a worker."""
    home = tmp_path_factory.mktemp("night")
    (home / "server").mkdir()
    (home / "worker").mkdir()
    with prefect_server(home / "server", keeps_events=True) as api:
        server = serve_deployments(api, home)
        with run_worker(server, home / "worker"):
            yield server


@pytest.fixture(scope="module")
def notifications(server, tmp_path_factory) -> Iterator[list[dict[str, str]]]:
    """Notifications that the automations of infra/notifications.yaml send."""
    with serve_receiver() as (url, received):
        with prefect_at(server.api):
            block = CustomWebhookNotificationBlock(
                name="team", url=url, json_data={"subject": "{{subject}}", "body": "{{body}}"}
            )
            named = block.save("team")
        file = tmp_path_factory.mktemp("automations") / "notifications.yaml"
        file.write_text(NOTIFICATIONS.read_text().replace("BLOCK_ID", str(named)))
        assert "Created 5 automation(s)" in server.prefect("automation", "create", "--from-file", str(file))
        yield received


@contextmanager
def serve_receiver() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Run a web server that keeps the JSON documents that it receives."""
    received: list[dict[str, str]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with serve_http(Receiver) as url:
        yield url, received


def trigger_nightly(server: Server, day: str, **changes: object) -> str:
    """Trigger a retrain of the nightly deployment and return its flow run."""
    store = f"{server.environment['RHEOSTAT_HOME']}/runs"
    config = {**tomllib.loads(TINY), **tomllib.loads(PROPOSING), **CHANGES, "store": store, **changes}
    return server.trigger("retrain/nightly", {"config": config, "day": day})


def subjects(notifications: list[dict[str, str]]) -> list[str]:
    return [each["subject"] for each in notifications]


@dataclass(frozen=True)
class Approved:
    """Nightly retrain whose proposal was approved in its form."""

    run: str
    """Id of the flow run."""
    proposal: RegistryRecord
    champion: RegistryRecord
    notifications: list[dict[str, str]]


@pytest.fixture(scope="module")
def approved(server, notifications) -> Approved:
    notifications.clear()
    run = trigger_nightly(server, "2026-11-02")
    assert wait_for(lambda: server.state(run) in ("Suspended", "Failed", "Crashed"), every=0.5)
    assert server.state(run) == "Suspended"
    assert wait_for(lambda: notifications)
    registry = open_registry(f"{server.environment['RHEOSTAT_HOME']}/runs", "assistant")
    (proposal,) = registry.records()
    server.resume(run, {"approve": "yes", "reason": "read fifty answers", "name": "Ann"})
    assert server.ends(run) == "Completed"
    assert wait_for(lambda: len(notifications) >= 2), notifications
    return Approved(run, proposal, registry.champion(), [*notifications])


def test_a_nightly_proposal_is_approved_in_its_form_and_each_step_is_notified(server, approved):
    run, proposal, champion = approved.run, approved.proposal, approved.champion
    assert (champion.number, champion.previous, champion.policy) == (2, 0, proposal.policy)
    assert approved.notifications == [
        {
            "subject": "assistant: proposal of nightly-20261102",
            "body": f"record 1, by retrain nightly-20261102: {proposal.reason}",
        },
        {
            "subject": "assistant: promote of nightly-20261102",
            "body": "record 2, by Ann, by the form of nightly-20261102: read fifty answers",
        },
    ]
    page = server.artifacts(run)["nightly-20261102-gate"]["data"]
    assert page.startswith("# Registry assistant, record 2: promote")
    related = {"resource": {"id": ["rheostat.registry.assistant"]}, "related": {"id": [f"prefect.flow-run.{run}"]}}
    names = {"rheostat.registry.proposal", "rheostat.registry.promote"}
    assert wait_for(
        lambda: {event["event"] for event in server.find("events", filter=related)["events"]} == names,
        every=0.5,
    )


def test_the_tasks_of_an_iteration_are_found_by_its_tag(server, approved):
    asked = {"tags": {"all_": ["nightly-20261102", "it-0001"]}}
    stages = {f"it-0001 {stage}" for stage in ("generate", "score", "credit", "update")}
    names = {run["name"] for run in server.find("task_runs", task_runs=asked)}
    assert names >= stages
    assert all("it-0001" in name for name in names)


def test_a_spent_budget_and_a_failed_retrain_are_notified(server, notifications):
    notifications.clear()
    run = trigger_nightly(server, "2026-11-03", iterations=2, budget={"tokens": 1})
    assert "BudgetSpent" in server.ends(run)
    assert wait_for(lambda: len(notifications) >= 2), notifications
    failed, spent = sorted(notifications, key=lambda each: each["subject"], reverse=True)
    assert failed["subject"] == "retrain nightly-20261103: Failed" and "BudgetSpent" in failed["body"]
    assert spent["subject"] == "nightly-20261103: budget spent" and spent["body"].startswith("budget.tokens is 1, ")


def test_a_run_emits_events_and_an_hour_without_events_is_notified(server, approved, notifications, tmp_path):
    """One hour is replaced with ten seconds here."""
    resource = {"resource": {"id": ["rheostat.run.nightly-20261102"]}}
    found = [event["event"] for event in server.find("events", filter=resource | {"order": "ASC"})["events"]]
    words = ("run.started", "evaluation.made", "iteration.sealed", "evaluation.made", "run.ended")
    assert found[:5] == [f"rheostat.{word}" for word in words]
    listed = {each["name"]: each for each in server.find("automations", limit=50)}
    block = listed["no progress"]["actions"][0]["block_document_id"]
    (stuck,) = [each for each in yaml.safe_load(NOTIFICATIONS.read_text()) if each["name"] == "no progress"]
    hasty = json.dumps(stuck | {"name": "hasty", "trigger": stuck["trigger"] | {"within": 10}})
    (tmp_path / "hasty.yaml").write_text(hasty.replace("BLOCK_ID", block))
    server.prefect("automation", "create", "--from-file", str(tmp_path / "hasty.yaml"))
    with prefect_at(server.api):
        emit_of_run("stuck", "run.started", iterations=0)
        emit_of_run("over", "iteration.sealed", iteration=1)
        emit_of_run("over", "run.ended", how="done")
    assert wait_for(lambda: "stuck: no progress" in subjects(notifications)), notifications
    assert "over: no progress" not in subjects(notifications)
