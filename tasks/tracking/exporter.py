"""Prometheus exporter with the latest metrics of runs, read from the store on each request."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.runs import Run, list_runs, open_run
from rheostat.tasks.run.keys import StageKey, evaluation_key, iteration_key, iteration_numbers
from rheostat.tasks.tracking.points import evaluation_scalars, iteration_scalars

PREFIX: Final = "rheostat_"
_EVALUATION: Final = re.compile(r"eval-(\d+)")


class RunsCollector(Collector):
    """Prometheus collector for the newest iteration and evaluation of each run. The store is read on each request,
    except for iterations that were read before."""

    def __init__(self, store: str, names: Sequence[str]) -> None:
        """Select runs by name. If no names are passed, each request includes all runs that are in the store at that
        time."""
        self._store, self._names = store, names
        self._runs: dict[str, Run] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a gauge for each metric, labeled by run."""
        families: dict[str, GaugeMetricFamily] = {}
        for name in self._names or list_runs(self._store):
            with suppress(Damaged, BadInput):  # a damaged or deleted run does not hide the others
                for scalar, value in numbers_of(self._run(name)).items():
                    gauge = f"{PREFIX}{re.sub(r'[^a-zA-Z0-9_]', '_', scalar)}"
                    description = f"{scalar} of the newest iteration or evaluation"
                    family = families.setdefault(gauge, GaugeMetricFamily(gauge, description, labels=["run"]))
                    family.add_metric([name], value)
        yield from families.values()

    def _run(self, name: str) -> Run:
        if name not in self._runs:
            self._runs[name] = open_run(self._store, name)
        return self._runs[name]


def numbers_of(run: Run) -> dict[str, float]:
    """Return all metrics of the last complete iteration and the last evaluation, with the keys "iteration" and
    "evaluation" for their numbers."""
    folders = run.folders()
    numbers: dict[str, float] = {}
    seals = (StageKey.of(iteration_key(number), "seal") for number in reversed(iteration_numbers(folders)))
    if (sealed := next(filter(None, map(run.find, seals)), None)) is not None:
        sealed_at = datetime.fromisoformat(sealed.provenance.created).timestamp()
        numbers |= iteration_scalars(sealed) | {"iteration": float(StageKey.parse(sealed.key).iteration)}
        numbers["sealed_timestamp_seconds"] = sealed_at
    evaluated = sorted((int(match[1]) for folder in folders if (match := _EVALUATION.fullmatch(folder))), reverse=True)
    summaries = (StageKey.of(evaluation_key(number), "summary") for number in evaluated)
    if (summary := next(filter(None, map(run.find, summaries)), None)) is not None:
        numbers |= evaluation_scalars(summary) | {"evaluation": float(StageKey.parse(summary.key).evaluation)}
    return numbers


def serve(store: str, names: Sequence[str], *, host: str, port: int, on_start: Callable[[str], None]) -> None:
    """Serve metrics to Prometheus until interrupted. Raises BadInput if the process cannot listen on the host and port.

    `on_start` is called with the server's address.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunsCollector(store, names))
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise BadInput(
            f"The metrics server cannot listen on --host {host} --port {port}: {error.strerror or error}. Choose "
            "another host or port."
        ) from error
    try:
        on_start(f"http://{host}:{server.server_port}")
        with suppress(KeyboardInterrupt):
            while True:  # a signal that arrives just before a wait is handled after the wait
                time.sleep(1.0)
    finally:
        server.shutdown()
        server.server_close()
