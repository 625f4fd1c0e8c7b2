"""Tracker for MLflow. A run of Rheostat becomes a run of an experiment, and its final policy a model version if
configured."""

import json
import os
import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from rheostat.infra.trackers.config import MlflowTracker
from rheostat.infra.trackers.records import Point, Product, Subject, TextTable, flatten_config

LOCAL_URI = "sqlite:///mlflow.db"
TAG = "rheostat.run"
"""Name of the tag of an MLflow run that contains the identifier of the run of Rheostat."""
DIGEST = "rheostat.policy"
"""Name of the tag of a registered model version that contains the digest of the policy."""
ALIAS = "newest"
SAMPLES = "samples"
MAX_PARAMETERS = 100  # parameters per request; for metrics the limit is 1,000
MAX_CHARACTERS = 6000  # characters of a parameter's value


class TrackedRun:
    """MLflow run to which the metrics of a run are copied. Implements `rheostat.infra.trackers.records.Mirror`."""

    def __init__(self, subject: Subject, settings: MlflowTracker) -> None:
        """Find the MLflow run of the subject (the run of Rheostat), or create it."""
        uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or LOCAL_URI
        self._client, self._settings, self._name = MlflowClient(uri, registry_uri=uri), settings, subject.name
        self._id = self._find_or_create_run(subject)
        self._steps: dict[str, set[int]] = {}
        self._tables = {file.path for file in self._client.list_artifacts(self._id, SAMPLES)}

    def _find_or_create_run(self, subject: Subject) -> str:
        client, name = self._client, self._settings.experiment
        experiment = client.get_experiment_by_name(name)
        place = client.create_experiment(name) if experiment is None else experiment.experiment_id
        if runs := client.search_runs([place], filter_string=f"tags.`{TAG}` = '{subject.identity}'"):
            return str(runs[0].info.run_id)
        run = client.create_run(place, run_name=subject.name, tags={TAG: subject.identity})
        params = [Param(key, value[:MAX_CHARACTERS]) for key, value in flatten_config(subject.config)]
        for begin in range(0, len(params), MAX_PARAMETERS):
            client.log_batch(run.info.run_id, params=params[begin : begin + MAX_PARAMETERS])
        return str(run.info.run_id)

    def lacks(self, point: Point) -> bool:
        """Return whether MLflow lacks a metric or the table of samples of this iteration or evaluation."""
        return bool(self._missing(point)) or self._lacks_table(point)

    def write(self, point: Point, table: TextTable | None) -> None:
        """Log the metrics of an iteration or evaluation, and its table of samples, as far as MLflow lacks them."""
        now = int(time.time() * 1000)
        missing = self._missing(point)
        values = [Metric(name, point.scalars[name], now, point.step) for name in missing]
        if table is not None and self._lacks_table(point):
            split = {"columns": table.columns, "data": table.rows}
            self._client.log_text(self._id, json.dumps(split, ensure_ascii=False), _file(point))
        self._client.log_batch(self._id, metrics=values)
        for name in missing:
            self._steps[name].add(point.step)
        if point.samples is not None:
            self._tables.add(_file(point))

    def close(self, product: Product | None) -> None:
        """Mark the MLflow run as finished, and register the final policy if that is configured. Do nothing if `product`
        is None, because then the run of Rheostat is not finished."""
        if product is None:
            return
        self._client.set_terminated(self._id)
        if self._settings.register is not None:
            self._register(product, self._settings.register)

    def _register(self, product: Product, name: str) -> None:
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = self._client.search_model_versions(f"name = '{name}'")
        if any(version.tags.get(DIGEST) == product.digest for version in versions):
            return
        tags = {DIGEST: product.digest, "rheostat.name": self._name, "rheostat.iteration": str(product.step)}
        version_made = self._client.create_model_version(name, product.place, run_id=self._id, tags=tags)
        self._client.set_registered_model_alias(name, ALIAS, version_made.version)

    def _missing(self, point: Point) -> list[str]:
        for name in point.scalars:
            if name not in self._steps:
                self._steps[name] = {each.step for each in self._client.get_metric_history(self._id, name)}
        return [name for name in point.scalars if point.step not in self._steps[name]]

    def _lacks_table(self, point: Point) -> bool:
        return point.samples is not None and _file(point) not in self._tables


def _file(point: Point) -> str:
    return f"{SAMPLES}/{point.step:06d}.json"


def open_mirror(subject: Subject, settings: MlflowTracker) -> TrackedRun:
    """Open the MLflow run to which the metrics of a run of Rheostat are copied, or create it."""
    return TrackedRun(subject, settings)
