"""File `metrics.jsonl` of a run, with one line for the metrics of each iteration and evaluation. It can always be
rebuilt from the store."""

import json
from collections.abc import Iterator

from rheostat.infra.store.lines import extend_lines, replace_lines
from rheostat.infra.store.runs import METRICS, Run
from rheostat.tasks.tracking.points import PointName, points_after, read_point


def rewrite_metrics(run: Run) -> str:
    """Write the run's metrics file again, from the metrics in the store, and return the file's location."""
    replace_lines(run.store, METRICS, _build_lines(run, None))
    return run.store.locate(METRICS)


def extend_metrics(run: Run) -> None:
    """Append lines for new iterations and evaluations to a local file. If the file was changed by something else,
    rebuild it."""
    appends = run.store.traits.can_append
    if appends and not extend_lines(run.store, METRICS, lambda line: _lines_after(run, line)):
        rewrite_metrics(run)


def _lines_after(run: Run, line: str) -> Iterator[str] | None:
    if not line:
        return _build_lines(run, None)
    try:
        last = json.loads(line)
        return _build_lines(run, PointName(last["series"], int(last["step"])))
    except (ValueError, KeyError, TypeError):
        return None


def _build_lines(run: Run, last: PointName | None) -> Iterator[str]:
    for place in points_after(run, last):
        point = read_point(run, place)
        yield json.dumps({"series": point.series, "step": point.step, **point.scalars})
