"""What alarms find in an iteration, and which return they order: a function of committed manifests alone.

Needs no Prefect.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from pydantic import JsonValue, TypeAdapter

from infra.config import RECORDED
from infra.store.runs import Run
from models.config.alarms import Alarm, AlarmConfig, Measured
from tasks.run.iteration import Iteration
from tasks.run.returns import has_returned

_ALARMS: Final = TypeAdapter(tuple[AlarmConfig, ...])


def recorded_returns(run: Run) -> tuple[Alarm, ...]:
    """The alarms that have a run return, as it was made."""
    return _ALARMS.validate_python(run.record.config.get("alarms", ()), context=RECORDED)


def ordered_return(iteration: Iteration, alarms: Iterable[Alarm]) -> dict[str, JsonValue] | None:
    """What a return after an iteration consists of, by the first alarm that is raised; none where none is."""
    for alarm, said in raised(alarms, iteration):
        to = version_to_return_to(iteration.run, iteration.number)
        return {"version": iteration.number, "to": to, "alarm": alarm.known_as, "said": said}
    return None


def version_to_return_to(run: Run, number: int) -> int:
    """The last good version: that which generated the newest iteration before this one without a return.

    Of iteration k without a return that is version k - 1. After returns one after the other it stays the same.
    """
    return number - 1 if has_returned(run, number - 1) else max(0, number - 2)


def raised(alarms: Iterable[Alarm], iteration: Iteration) -> Iterator[tuple[Alarm, str]]:
    """Yield the alarms that an iteration raises, with what of it is beyond their bounds."""
    measured = _measured(iteration)
    for alarm in alarms:
        if (said := alarm.raised(iteration.number, measured)) is not None:
            yield alarm, said


def _measured(iteration: Iteration) -> Measured:
    """What iterations measured up to one; those that the run returned from are not compared with."""

    def measured(number: int) -> Mapping[str, float]:
        if number == iteration.number:
            return iteration.measured
        return {} if has_returned(iteration.run, number) else Iteration(iteration.run, number).measured

    return measured
