"""Events for Prefect's event feed and automations, about runs and registries.

    rheostat.run.started         resource rheostat.run.NAME: a process has locked the run; with its progress
    rheostat.iteration.sealed    same resource: an iteration is complete
    rheostat.evaluation.made     same resource: a held-out accuracy was measured
    rheostat.run.ended           same resource: the process released the run; a killed process sends no event
    rheostat.budget.spent        same resource: a limit of the budget is reached
    rheostat.alarm.raised        same resource: a metric newly exceeds an alarm's bound, or caused a revert
    rheostat.alarm.stopped       same resource: an alarm ends the run
    rheostat.registry.KIND       resource rheostat.registry.NAME: a new record of this kind

A background thread of Prefect sends the events in order. The run neither waits nor fails if the events cannot be
delivered.
"""

from contextvars import copy_context
from threading import Thread
from typing import Final, Literal

from prefect import get_client
from prefect.events import Event, emit_event

from rheostat.infra.store.registry import RegistryRecord

TELL_SECONDS: Final = 5.0
"""Maximum time in seconds that a command waits for Prefect's API when it sends an event about a registry record."""


RunEvent = Literal[
    "run.started", "iteration.sealed", "evaluation.made", "run.ended", "budget.spent", "alarm.raised", "alarm.stopped"
]


_newest: Final[dict[str, Event | None]] = {}
"""Last event that this process sent about each run, by name of the run. Each event names the previous event of the
run as its predecessor. Otherwise Prefect's server could show the start of a short run after its end, because it
processes unrelated events in parallel."""


def emit_of_run(name: str, event: RunEvent, **payload: str | float | None) -> None:
    """Emit an event about a run from the current flow."""
    resource = {"prefect.resource.id": f"rheostat.run.{name}", "prefect.resource.name": name}
    previous = _newest.get(name)
    _newest[name] = emit_event(f"rheostat.{event}", resource=resource, payload=payload, follows=previous)


def emit_record(registry: str, record: RegistryRecord) -> None:
    """Emit an event about a new registry record, such as `rheostat.registry.promote`, from the current flow."""
    event = _build_event(registry, record)
    emit_event(event.event, resource=dict(event.resource), payload=event.payload)


def send_record(registry: str, record: RegistryRecord) -> str | None:
    """Send an event about a new registry record to Prefect's API, for commands that run no flow. Return None on
    success, or the reason for the failure, after at most `TELL_SECONDS`."""
    problems = [f"no answer within {TELL_SECONDS:g} s"]

    def tell() -> None:
        try:
            with get_client(sync_client=True, httpx_settings={"timeout": TELL_SECONDS}) as client:
                events = [_build_event(registry, record).model_dump(mode="json")]
                client.request("POST", "/events", json=events).raise_for_status()
            problems.clear()
        except Exception as error:  # the record is valid anyway
            problems[:] = [f"{type(error).__name__}: {error}"]

    thread = Thread(target=copy_context().run, args=(tell,), daemon=True)
    thread.start()
    thread.join(TELL_SECONDS)
    return problems[0] if problems else None


def _build_event(registry: str, record: RegistryRecord) -> Event:
    """Build the event of a registry record. Its resource, by which automations select events, is the registry:
    `rheostat.registry.NAME`."""
    resource = {"prefect.resource.id": f"rheostat.registry.{registry}", "prefect.resource.name": registry}
    payload = record.model_dump(mode="json", exclude={"gate", "bundle"})
    return Event.model_validate({"event": f"rheostat.registry.{record.kind}", "resource": resource, "payload": payload})
