"""File `metrics.jsonl`: the metrics of a run's iterations and evaluations, one line each, derived from the seals."""

import json
from collections.abc import Iterator

from infra.store.lines import extend_lines, replace_lines
from infra.store.runs import METRICS, Run
from tasks.tracking.points import PointName, points_after, read_point


def rewrite_metrics(run: Run) -> str:
    """Write the whole file from the seals, and return its location."""
    replace_lines(run.store, METRICS, _build_lines(run, None))
    return run.store.locate(METRICS)


def extend_metrics(run: Run) -> None:
    """Append new lines to a local file. If its content is not what was written before, the whole file is written
    again."""
    if not run.store.is_remote and not extend_lines(run.store, METRICS, lambda line: _lines_after(run, line)):
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
