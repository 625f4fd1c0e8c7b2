"""Alarms that an iteration triggers, and the reverts to an earlier policy that these alarms require.

Alarms and reverts depend only on committed manifests. This module does not need Prefect.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from pydantic import JsonValue, TypeAdapter

from rheostat.infra.config import RECORDED
from rheostat.infra.store.runs import Run
from rheostat.models.config.alarms import Alarm, AlarmConfig, Measured
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.reverts import has_reverted

_ALARMS: Final = TypeAdapter(tuple[AlarmConfig, ...])


def recorded_revert_alarms(run: Run, number: int) -> tuple[Alarm, ...]:
    """Return the alarms in the recorded configuration of an iteration whose action is to revert to an earlier
    policy."""
    return _ALARMS.validate_python(run.config_at(number).get("alarms", ()), context=RECORDED)


def required_revert(iteration: Iteration, alarms: Iterable[Alarm]) -> dict[str, JsonValue] | None:
    """Return what to record about a revert after an iteration (versions and reason), for the first alarm that triggers.
    Return None if no alarm triggers."""
    for alarm, sentence in triggered_alarms(alarms, iteration):
        target = revert_target(iteration.run, iteration.number)
        return {"version": iteration.number, "to": target, "alarm": alarm.label, "said": sentence}
    return None


def revert_target(run: Run, number: int) -> int:
    """Return the number of the version to revert to: the policy that generated the newest earlier iteration without a
    revert.

    For iteration k without a revert before it, this is version k - 1. Consecutive reverts all lead to the same version.
    """
    return number - 1 if has_reverted(run, number - 1) else max(0, number - 2)


def triggered_alarms(alarms: Iterable[Alarm], iteration: Iteration) -> Iterator[tuple[Alarm, str]]:
    """Yield each alarm that an iteration triggers, with a sentence for the user that states the measured value and the
    bound."""
    measured = _metrics_reader(iteration)
    for alarm in alarms:
        if (sentence := alarm.find_breach(iteration.number, measured)) is not None:
            yield alarm, sentence


def _metrics_reader(iteration: Iteration) -> Measured:
    """Return a function that returns the metrics of an iteration by its number. For reverted iterations it returns no
    metrics, so that alarms do not compare with them."""

    def measured(number: int) -> Mapping[str, float]:
        if number == iteration.number:
            return iteration.metrics
        return {} if has_reverted(iteration.run, number) else Iteration(iteration.run, number).metrics

    return measured
