"""What Prefect is told as it happens, for its feed and for automations: events of runs, and of registries.

    rheostat.run.started         of the resource rheostat.run.NAME: a process has taken the run, and says how far it is
    rheostat.iteration.sealed    the same: an iteration exists
    rheostat.evaluation.made     the same: a held-out accuracy
    rheostat.run.ended           the same: the process lets the run go; one that is killed does not say so
    rheostat.budget.spent        the same
    rheostat.alarm.raised        the same: a number of an iteration is beyond an alarm's bound, newly or with a return
    rheostat.alarm.stopped       the same: an alarm ends the run
    rheostat.registry.KIND       of the resource rheostat.registry.NAME: a new record

Events leave by a thread of Prefect's, in the order in which they come. Where nobody takes them, nothing waits or fails.
"""

from contextvars import copy_context
from threading import Thread
from typing import Final, Literal

from prefect import get_client
from prefect.events import Event, emit_event

from infra.store.registry import RegistryRecord

TELL_SECONDS: Final = 5.0
"""How long a command waits for an API that it tells of a record."""


RunEvent = Literal[
    "run.started", "iteration.sealed", "evaluation.made", "run.ended", "budget.spent", "alarm.raised", "alarm.stopped"
]


_newest: Final[dict[str, Event | None]] = {}
"""What this process has told of each run last: Prefect's server looks at several events at once unless one follows
another, and would find that a run which ended at once began thereafter."""


def emit_of_run(name: str, event: RunEvent, **payload: str | float | None) -> None:
    """Have the flow that runs here tell of a run."""
    resource = {"prefect.resource.id": f"rheostat.run.{name}", "prefect.resource.name": name}
    before = _newest.get(name)
    _newest[name] = emit_event(f"rheostat.{event}", resource=resource, payload=payload, follows=before)


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
