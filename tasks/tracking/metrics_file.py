"""`metrics.jsonl`: a run's iterations and evaluations in numbers, a line each, beside what they come from."""

import json
from collections.abc import Iterator

from infra.store.lines import extend_lines, replace_lines
from infra.store.runs import METRICS, Run
from tasks.tracking.points import PointName, places_after, point_at


def renew_metrics(run: Run) -> str:
    """Write the file anew from the seals, and say where it is."""
    replace_lines(run.store, METRICS, _lines(run, None))
    return run.store.locate(METRICS)


def extend_metrics(run: Run) -> None:
    """Append what is new to a file of this machine, or write it anew where it is not what was written."""
    if not run.store.is_remote and not extend_lines(run.store, METRICS, lambda line: _following(run, line)):
        renew_metrics(run)


def _following(run: Run, line: str) -> Iterator[str] | None:
    if not line:
        return _lines(run, None)
    try:
        last = json.loads(line)
        return _lines(run, PointName(last["series"], int(last["step"])))
    except (ValueError, KeyError, TypeError):
        return None


def _lines(run: Run, last: PointName | None) -> Iterator[str]:
    for place in places_after(run, last):
        point = point_at(run, place)
        yield json.dumps({"series": point.series, "step": point.step, **point.scalars})
