"""Commands that publish metrics of runs: to trackers at any time, and on a page for Prometheus."""

import json
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rheostat.flows.cli.options import DEFAULT_STORE, RunName, RunNames, Store
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import Json, parse_port_or_free, write

if TYPE_CHECKING:
    from rheostat.infra.trackers.config import Tracker
    from rheostat.infra.trackers.processes import MirrorReport

Tracking = Annotated[
    str | None,
    Parameter(
        metavar="TOML",
        show_default="only metrics.jsonl",
        help="TOML file with [[tracking]] tables, such as the run's configuration, or inline TOML",
    ),
]
Host = Annotated[str, Parameter(help="network interface to listen on; 0.0.0.0 for all")]
Port = Annotated[int, Parameter(converter=parse_port_or_free, help="port to listen on; 0 for any free port")]


def track(run: RunName, /, *, tracking: Tracking = None, store: Store = DEFAULT_STORE, as_json: Json = False) -> int:
    """Rewrite a run's metrics.jsonl, and send its trackers all metrics that they have not received yet."""
    from rheostat.tasks.tracking.metrics_file import rewrite_metrics
    from rheostat.tasks.tracking.mirror import tracker_processes_of
    from rheostat.tasks.views.runs import open_known_run

    opened = open_known_run(store, run)
    trackers = () if tracking is None else _parse_trackers(tracking)
    path = rewrite_metrics(opened)
    reports = tracker_processes_of(opened, trackers).finish()
    if as_json:
        document = {"run": run, "metrics": path, "trackers": [report.model_dump() for report in reports]}
        write(json.dumps(document, indent=2))
    else:
        write("\n".join([f"run {run}: {path}", *map(_describe_report, reports)]))
    return 1 if any(report.problem for report in reports) else 0


def _parse_trackers(text: str) -> "tuple[Tracker, ...]":
    from rheostat.flows.cli.requests import parse_part
    from rheostat.infra.trackers.config import TrackingPart, check_tracker

    trackers = parse_part(text, TrackingPart, part="tracking", what="--tracking").tracking
    for tracker in trackers:
        check_tracker(tracker)
    return trackers


def _describe_report(report: "MirrorReport") -> str:
    if report.problem:
        return f"{report.tracker}: not up to date: {report.problem}"
    last = "nothing yet" if report.step is None else f"up to iteration {report.step}"
    return f"{report.tracker}: {last}; {format_count(report.points, 'missing point was', 'missing points were')} sent"


def metrics(*runs: RunNames, port: Port = 9464, host: Host = "127.0.0.1", store: Store = DEFAULT_STORE) -> None:
    """Serve the newest metrics of runs to Prometheus until Ctrl-C."""
    from rheostat.tasks.tracking.exporter import serve
    from rheostat.tasks.views.runs import open_known_run

    names = [open_known_run(store, name).name for name in runs]
    if not 0 <= port < 1 << 16:
        raise BadInput(f"--port {port} must be between 0 and 65535.")
    serve(store, names, host=host, port=port, on_start=lambda address: write(f"{address}/metrics"))
