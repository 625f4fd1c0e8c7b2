"""Lineage as OpenLineage events: a START and a COMPLETE event for each stage, with its inputs and outputs.

The same run always gives the same events. In OpenLineage's terms, a stage is a job and each manifest is one run of this
job. The shards and bundles of a manifest form one dataset, whose version is the manifest's digest.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import NAMESPACE_URL, uuid5

from rheostat.infra.errors import BadInput, EndpointDown
from rheostat.infra.store.registry import REGISTRIES, RegistryRecord
from rheostat.infra.store.storage import open_store
from rheostat.tasks.lineage.trace import TracedManifest, TracedRun
from rheostat.tasks.lineage.versions import TracedVersion
from rheostat.tasks.run.keys import BASE, PROMPTS

if TYPE_CHECKING:
    from openlineage.client.event_v2 import InputDataset, OutputDataset, RunEvent

PACKAGE: Final = "openlineage-python>=1.54,<2"
PRODUCER: Final = "urn:rheostat:lineage"
"""Producer URI of the events, required by OpenLineage."""


@dataclass(frozen=True, slots=True)
class DatasetVersion:
    """Stored result of a stage as an OpenLineage dataset, with a version. Stages name such datasets as inputs and
    outputs."""

    namespace: str
    name: str
    version: str
    """Digest of the result's manifest (the record that the stage committed), or of the content of a data file or
    policy."""

    def as_input(self) -> "InputDataset":
        """Return the dataset version as an input of an event."""
        from openlineage.client.event_v2 import InputDataset
        from openlineage.client.facet_v2 import dataset_version_dataset

        version = dataset_version_dataset.DatasetVersionDatasetFacet(self.version, producer=PRODUCER)
        return InputDataset(self.namespace, self.name, facets={"version": version})

    def as_output(self) -> "OutputDataset":
        """Return the dataset version as an output of an event."""
        from openlineage.client.event_v2 import OutputDataset

        read = self.as_input()
        return OutputDataset(read.namespace, read.name, facets=read.facets)


def send(versions: Sequence[TracedVersion], store: str, target: str) -> int:
    """Write events to a new file, one JSON object per line, or post them to an http(s) address. Return the number of
    events.

    The service's key is read from the environment variable OPENLINEAGE_API_KEY. Raises BadInput if the client package
    is not installed or the file exists, and EndpointDown if the service does not accept the events.
    """
    try:
        from openlineage.client.serde import Serde
    except ImportError as error:
        raise BadInput(
            f"--openlineage needs the package openlineage-python. Install it with: pip install '{PACKAGE}'"
        ) from error
    events = list(_build_events(versions, open_store(store).uri))
    if target.startswith(("http://", "https://")):
        _post_events(events, target)
        return len(events)
    try:
        with Path(target).open("x") as file:
            file.writelines(f"{Serde.to_json(event)}\n" for event in events)
    except OSError as error:
        raise BadInput(
            f"--openlineage {target} cannot be created: {error.strerror or error}. Name a new file in an existing "
            "directory."
        ) from error
    return len(events)


def _post_events(events: "Sequence[RunEvent]", address: str) -> None:
    from openlineage.client.transport.http import HttpConfig, HttpTransport

    key = os.environ.get("OPENLINEAGE_API_KEY")
    auth = {"type": "api_key", "apiKey": key} if key else {}
    transport = HttpTransport(HttpConfig.from_dict({"url": address, "auth": auth}))
    try:
        for event in events:
            transport.emit(event)
    except OSError as error:  # all errors of the client are OSErrors
        raise EndpointDown(
            f"--openlineage {address} did not accept the events. Check the address and the server: {error}"
        ) from error


def _build_events(versions: Sequence[TracedVersion], namespace: str) -> Iterator["RunEvent"]:
    """Yield the events of all runs that led to these versions, and of their registry records, starting with the
    oldest champion."""
    champions: dict[int, DatasetVersion] = {}
    for version in reversed(versions):
        before = champions.get(version.began_as)
        family = version.registry or version.name
        if version.run is not None:
            yield from _stage_events(version.run, namespace, family, before)
        for evaluation in version.evaluations:
            yield from _stage_events(evaluation, namespace, f"{family}.evaluation", None)
        if version.record is not None:
            promoted = _promoted_dataset(version.record, namespace, family)
            yield from _record_events(version, version.record, promoted, namespace)
            if promoted is not None:
                champions[version.record.number] = promoted


def _stage_events(run: TracedRun, namespace: str, family: str, before: DatasetVersion | None) -> Iterator["RunEvent"]:
    """Yield a START and a COMPLETE event for each stage of a run. Inputs of the initial policy include the champion
    `before` that it started from. Inputs of the prompts include the data files."""
    outputs = {each.key: _dataset_of(run, each, namespace) for each in run.manifests}
    files = run.dependencies[-1].dependencies.data if run.dependencies else {}
    data = [DatasetVersion("file", path, content.digest) for path, content in files.items()]
    for each in run.manifests:
        inputs = [outputs[parent] for parent in each.parents if parent in outputs]
        inputs += [before] if each.key == BASE and before is not None else []
        inputs += data if each.key in PROMPTS.values() else []
        job = "prompts" if each.key in PROMPTS.values() else each.stage.stage
        yield from _event_pair(namespace, f"{family}.{job}", outputs[each.key], each.created, inputs, outputs[each.key])


def _record_events(
    version: TracedVersion, record: RegistryRecord, promoted: DatasetVersion | None, namespace: str
) -> Iterator["RunEvent"]:
    """Yield events for a registry record. Its inputs are the run's last update and the evaluations."""
    update = version.run.find(f"it-{record.iteration:04d}/update") if version.run else None
    inputs = [_dataset_of(version.run, update, namespace)] if update is not None and version.run is not None else []
    for run in version.evaluations:
        summary = run.find("eval-0000/summary")
        inputs += [_dataset_of(run, summary, namespace)] if summary is not None else []
    subject = DatasetVersion(namespace, f"{REGISTRIES}/{version.registry}/{record.number}", record.policy)
    yield from _event_pair(namespace, f"{version.registry}.promotion", subject, record.when, inputs, promoted)


def _dataset_of(run: TracedRun, manifest: TracedManifest, namespace: str) -> DatasetVersion:
    return DatasetVersion(namespace, f"{run.name}/{manifest.key}", manifest.digest)


def _promoted_dataset(record: RegistryRecord, namespace: str, registry: str) -> DatasetVersion | None:
    bundle = record.bundle
    return None if bundle is None else DatasetVersion(namespace, f"{REGISTRIES}/{registry}/{bundle.key}", bundle.digest)


def _event_pair(
    namespace: str,
    job: str,
    subject: DatasetVersion,
    time: str,
    inputs: Sequence[DatasetVersion],
    output: DatasetVersion | None,
) -> Iterator["RunEvent"]:
    """Yield the START and COMPLETE events of one job run, whose id is derived from its output. Both events have the
    time of the commit."""
    from openlineage.client.event_v2 import Job, Run, RunEvent, RunState

    number = uuid5(NAMESPACE_URL, f"{subject.namespace}/{subject.name}@{subject.version}")
    for state in (RunState.START, RunState.COMPLETE):
        yield RunEvent(
            eventTime=time,
            eventType=state,
            producer=PRODUCER,
            run=Run(str(number)),
            job=Job(namespace, job),
            inputs=[each.as_input() for each in inputs],
            outputs=[] if output is None else [output.as_output()],
        )
