"""What Prefect is told of a registry: an event for each new record, for its feed and for automations."""

from contextvars import copy_context
from threading import Thread
from typing import Final

from prefect import get_client
from prefect.events import Event, emit_event

from infra.store.registry import RegistryRecord

TELL_SECONDS: Final = 5.0
"""How long a command waits for an API that it tells of a record."""


def emit_record(registry: str, record: RegistryRecord) -> None:
    """Have the flow that runs here tell of a new record, as `rheostat.registry.promote` and so on."""
    told = _event(registry, record)
    emit_event(told.event, resource=dict(told.resource), payload=told.payload)


def tell_record(registry: str, record: RegistryRecord) -> str | None:
    """Tell the configured API of a new record from outside any flow; say what hindered that, within seconds."""
    problems = [f"no answer within {TELL_SECONDS:g} s"]

    def tell() -> None:
        try:
            with get_client(sync_client=True, httpx_settings={"timeout": TELL_SECONDS}) as client:
                events = [_event(registry, record).model_dump(mode="json")]
                client.request("POST", "/events", json=events).raise_for_status()
            problems.clear()
        except Exception as error:  # whatever it is: the record stands
            problems[:] = [f"{type(error).__name__}: {error}"]

    thread = Thread(target=copy_context().run, args=(tell,), daemon=True)
    thread.start()
    thread.join(TELL_SECONDS)
    return problems[0] if problems else None


def _event(registry: str, record: RegistryRecord) -> Event:
    """The event of a record; its resource is the registry, `rheostat.registry.NAME`."""
    resource = {"prefect.resource.id": f"rheostat.registry.{registry}", "prefect.resource.name": registry}
    payload = record.model_dump(mode="json", exclude={"gate", "bundle"})
    return Event.model_validate({"event": f"rheostat.registry.{record.kind}", "resource": resource, "payload": payload})
