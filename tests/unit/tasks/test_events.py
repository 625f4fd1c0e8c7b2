"""Events that runs emit to Prefect, and the automations that expect them, parsed by Prefect's own models."""

from types import SimpleNamespace
from typing import get_args

import pytest
import yaml
from prefect.events.clients import AssertingEventsClient
from prefect.events.schemas.automations import AutomationCore, Posture
from prefect.events.worker import EventsWorker
from prefect.server.events.actions import SendNotification
from prefect.settings import PREFECT_API_URL, temporary_settings

from rheostat.flows.cli.prefect_api import DEFAULTS
from rheostat.flows.run_access import _report_run
from rheostat.infra.errors import BadInput
from rheostat.infra.store.registry import Kind
from rheostat.infra.store.runs import create_run
from rheostat.tasks.events import RunEvent, emit_of_run
from tests.support.jobs import ROOT

BLOCK = "5c1f0c5e-6b0e-4c5e-9d0c-2f8d5a3b7e11"


@pytest.fixture
def told():
    """Events that are sent during the test, as (resource, event, payload)."""
    EventsWorker.drain_all()
    AssertingEventsClient.reset()
    EventsWorker.set_client_override(AssertingEventsClient)

    def events():
        EventsWorker.drain_all()
        sent = [event for client in AssertingEventsClient.all for event in client.events]
        return [(event.resource.id, event.event, event.payload) for event in sent]

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):  # that nobody calls
        yield events
        EventsWorker.drain_all()
    EventsWorker.set_client_override(None)


def test_a_locked_run_emits_events_for_its_start_and_its_end(tmp_path, told):
    open_run = SimpleNamespace(run=create_run(str(tmp_path), "held", {}))
    with pytest.raises(BadInput), _report_run(open_run):
        emit_of_run("held", "iteration.sealed", iteration=1, reward=0.5)
        raise BadInput("a slip")
    with _report_run(open_run):
        pass
    with pytest.raises(KeyboardInterrupt), _report_run(open_run):
        raise KeyboardInterrupt
    started, sealed = ("run.started", {"iterations": 0}), ("iteration.sealed", {"iteration": 1, "reward": 0.5})
    failed, done, stopped = (("run.ended", {"how": how}) for how in ("BadInput: a slip", "done", "stopped"))
    expected = [started, sealed, failed, started, done, started, stopped]
    assert told() == [("rheostat.run.held", f"rheostat.{event}", payload) for event, payload in expected]


def automations(name):
    found = yaml.safe_load((ROOT / "infra" / name).read_text().replace("BLOCK_ID", BLOCK))
    return [AutomationCore.model_validate(each) for each in (found if isinstance(found, list) else [found])]


def test_prefect_accepts_every_automation_and_renders_its_templates():
    made = [*automations("automations.yaml"), *automations("notifications.yaml")]
    assert len(made) == 6
    sent = [action for each in made for action in each.actions if action.type == "send-notification"]
    assert len(sent) == 5
    for action in sent:
        assert str(action.block_document_id) == BLOCK
        SendNotification.model_validate(action.model_dump())


def test_the_zombie_automation_waits_for_three_heartbeats_of_commands_and_of_deployments():
    [zombies] = automations("automations.yaml")
    deployed = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["work_pool"]["job_variables"]["env"]
    for environment in (DEFAULTS, deployed):
        assert zombies.trigger.within.total_seconds() == 3 * int(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])


def test_automations_expect_only_events_that_are_emitted():
    told = {f"rheostat.{event}" for event in get_args(RunEvent)} | {
        f"rheostat.registry.{kind}" for kind in get_args(Kind)
    }
    for each in automations("notifications.yaml"):
        for event in each.trigger.expect | each.trigger.after:
            is_told = event in told or event.removesuffix("*") in {name[: -len(name.split(".")[-1])] for name in told}
            assert is_told or event.startswith("prefect.flow-run."), event


def test_the_no_progress_automation_fires_for_runs_whose_events_stop_before_their_end():
    (stuck,) = [each for each in automations("notifications.yaml") if each.name == "no progress"]
    trigger = stuck.trigger
    assert (trigger.posture, trigger.threshold) == (Posture.Proactive, 1)
    assert trigger.for_each == {"prefect.resource.id"}
    assert trigger.expect - trigger.after == {"rheostat.run.ended"} and trigger.after < trigger.expect


def test_every_deployment_except_controllers_notifies_of_its_failure():
    (failed,) = [each for each in automations("notifications.yaml") if each.name == "run failed"]
    deployed = {each["name"] for each in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    assert {*failed.trigger.match_related["prefect.resource.name"]} == deployed - {"controller"}
