"""What results depend on beside the configuration: code of targets, content of data files, versions of libraries.

The journal says what a run was begun with, and each change of it that was accepted since. Every record of the chain
names these entries: none can be lost or edited behind a part that was finished later. What was made of stored rollouts
later has records of its own, below its prefix.
"""

import logging
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Final

from pydantic import Field, ValidationError

from infra.config import Settings, Since, read_recorded
from infra.errors import Damaged, RunChanged
from infra.store.inputs import place_texts
from infra.store.manifests import provenance_here
from infra.store.runs import Run

DEPENDENCIES: Final = "dependencies/"
"""Where their records stand in the journal."""
SHOWN: Final = 5

logger = logging.getLogger(__name__)


class FileContent(Settings):
    """A file as it was found."""

    digest: str
    """BLAKE3 of its bytes."""
    bytes: Annotated[int, Field(ge=0)]
    """Its size."""
    modified_ns: int
    """When it was changed last: a large file of the same size and time is not read again. It is not compared."""


class Dependencies(Settings):
    """What results depend on beside the configuration."""

    code: dict[str, dict[str, str]]
    """Digests of the modules that targets consist of: by what the configuration calls them, then by module."""
    data: dict[str, FileContent]
    """Data files, by the path that the configuration has."""
    libraries: dict[str, str]
    """Versions of Rheostat, of Python, and of the libraries that compute."""
    layout: dict[str, int] = {}
    """Over what sums are spread, by dotted key of the configuration: ranks, threads, ZeRO stage."""

    def changes(self, now: "Dependencies") -> list[str]:
        """Say what is different now, one line each; a data file that is gone is missed by whoever needs it."""
        layouts = ({name: str(number) for name, number in each.layout.items()} for each in (self, now))
        libraries = _changed(self.libraries, now.libraries)
        return [*self._changed_code(now), *self._changed_data(now), *libraries, *_changed(*layouts)]

    def _changed_code(self, now: "Dependencies") -> Iterator[str]:
        for target in sorted({*self.code, *now.code}):
            before, after = (
                {name: digest[:8] for name, digest in each.code.get(target, {}).items()} for each in (self, now)
            )
            yield from (f"{target}: module {line}" for line in _changed(before, after))

    def _changed_data(self, now: "Dependencies") -> Iterator[str]:
        for path in sorted({*self.data} & {*now.data}):
            before, after = self.data[path], now.data[path]
            if (before.digest, before.bytes) != (after.digest, after.bytes):
                yield (
                    f"data file {path} has other content (was {before.digest[:8]}, {before.bytes:,} bytes; "
                    f"is {after.digest[:8]}, {after.bytes:,} bytes)"
                )


class DependencyRecord(Settings):
    """From when on a run is made with some dependencies."""

    iteration: Annotated[int, Field(ge=1)]
    """The first iteration that was not finished then; parts of it may have been made before."""
    created: str
    """UTC time in ISO format, for people; no decision compares it."""
    dependencies: Dependencies
    """What holds from then on."""
    folder: Annotated[str, Since("0.1.0", before="")] = ""
    """Folder of the job on this machine, in which relative paths of the run's configuration start from then on. It is
    not compared. Empty if the configuration has no path that is relative to it."""


class AcceptedChange(Settings):
    """A change of what a run depends on, for people."""

    iteration: int
    """The first iteration that was not finished then; parts of it may have been made before."""
    created: str
    """When it was accepted, UTC."""
    changes: list[str]
    """What is different from then on."""


def dependency_records(run: Run, prefix: str = "") -> list[DependencyRecord]:
    """What a run was begun with and each accepted change, in order; none in a run that an older Rheostat made."""
    try:
        return [read_recorded(DependencyRecord, entry) for entry in run.journal(prefix + DEPENDENCIES).values()]
    except ValidationError as error:
        where = f"run {run.name!r}: journal/{prefix}{DEPENDENCIES}"
        raise Damaged(f"{where}: a seal is right but it is no record of dependencies: {error}") from error


def recorded_config(run: Run) -> dict[str, object]:
    """Return the configuration of a run as a document, whose relative paths start in the folder of its job."""
    records = dependency_records(run)
    folder = records[-1].folder if records else ""
    return {key: place_texts(value, folder) for key, value in run.record.config.items()}


def accepted_changes(run: Run) -> list[AcceptedChange]:
    """Every change that was accepted, in order."""
    return [
        AcceptedChange(iteration=after.iteration, created=after.created, changes=changes)
        for before, after in pairwise(dependency_records(run))
        if (changes := before.dependencies.changes(after.dependencies))
    ]


def check_dependencies(run: Run, now: Dependencies, *, prefix: str = "") -> None:
    """Raise RunChanged, naming each difference, unless the run, or what is below the prefix, was made with the same."""
    records = dependency_records(run, prefix)
    changes = records[-1].dependencies.changes(now) if records else []
    if changes:
        more = [f"and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
        what = f"{prefix.rstrip('/')} of run" if prefix else "run"
        accept = "" if prefix else "--accept-change (of a flow: accept_change) goes on with what is there now, "
        raise RunChanged(
            f"{what} {run.name!r} in {run.store.uri} was made with other code, data, libraries or ranks: "
            f"{'; '.join([*changes[:SHOWN], *more])}; {accept}another name begins anew"
        )


def record_dependencies(
    run: Run, now: Dependencies, *, iteration: int, folder: str = "", accept_change: bool = False, prefix: str = ""
) -> None:
    """Note in a held run, unless its last record says so already, what it is made with from an iteration on.

    `folder` is that of the job: a job that was moved continues its run.
    Raises RunChanged where that is a change which nobody accepts.
    """
    if not accept_change:
        check_dependencies(run, now, prefix=prefix)
    records = dependency_records(run, prefix)
    changes = records[-1].dependencies.changes(now) if records else []
    if changes:
        logger.warning("run %s goes on from iteration %d with changes: %s", run.name, iteration, "; ".join(changes))
    if changes or not records or records[-1].folder != folder:
        created = provenance_here().created
        record = DependencyRecord(iteration=iteration, created=created, dependencies=now, folder=folder)
        run.note(f"{prefix}{DEPENDENCIES}{len(records) + 1:04d}", record.as_recorded())


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *after}):
        was, now = before.get(name, "none"), after.get(name, "none")
        if was != now:
            yield f"{name} was {was}, is {now}"
