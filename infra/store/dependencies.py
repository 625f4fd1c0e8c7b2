"""Dependencies of results that are not part of the configuration: users' code, data files and library versions.

The journal of a run records its dependencies when the run begins, and each change that the user accepts. The chain (a
hash-linked list of records) contains the digests of these journal entries. A lost or edited entry is therefore detected
once a later part of the run is finished. Results that are scored again, or whose credit is computed again, have their
own records below a separate prefix.
"""

import logging
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Final

from pydantic import Field, ValidationError

from rheostat.infra.config import Settings, Since, read_recorded
from rheostat.infra.errors import Damaged, RunChanged
from rheostat.infra.store.inputs import place_hub_names, place_texts
from rheostat.infra.store.manifests import provenance_here
from rheostat.infra.store.runs import Run

DEPENDENCIES: Final = "dependencies/"
"""Prefix of the keys of journal entries (stored measurements and decisions) that record the dependencies of a run."""
SHOWN: Final = 5

logger = logging.getLogger(__name__)


class FileContent(Settings):
    """Identity of a data file's content: digest and size."""

    digest: str
    """BLAKE3 digest of the file's bytes, in hexadecimal."""
    bytes: Annotated[int, Field(ge=0)]
    """Size of the file in bytes."""
    modified_ns: int
    """Time of the file's last change in nanoseconds. A large file with the same size and time is assumed to be
    unchanged and is not read again. A different time alone does not count as a change."""


class Dependencies(Settings):
    """Code, data files and library versions on which the results of a run depend, in addition to its configuration."""

    code: dict[str, dict[str, str]]
    """Digests of the Python modules that each target uses, by name of the target and then by module. A target is a
    user's function or class that is named in the configuration."""
    data: dict[str, FileContent]
    """Digest, size and time of each data file, by its path in the configuration."""
    libraries: dict[str, str]
    """Versions of Rheostat, Python and the libraries on which results depend."""
    hub: Annotated[dict[str, str], Since("0.2.0", before={})] = {}
    """Commit of each model and dataset on the Hugging Face Hub, by its kind and its name in the configuration. A run
    always uses the commits that it recorded first, so they never count as a change."""
    layout: dict[str, int] = {}
    """Settings that affect the rounding of sums, such as the numbers of ranks and threads and the ZeRO stage, by dotted
    configuration key."""

    def changes(self, now: "Dependencies") -> list[str]:
        """Describe each difference between these dependencies and the present ones (`now`) in one line. Data files that
        no longer exist are ignored."""
        layouts = ({name: str(number) for name, number in each.layout.items()} for each in (self, now))
        libraries = _describe_changes(self.libraries, now.libraries)
        return [*self._changed_code(now), *self._changed_data(now), *libraries, *_describe_changes(*layouts)]

    def _changed_code(self, now: "Dependencies") -> Iterator[str]:
        for target in sorted({*self.code, *now.code}):
            before, after = (
                {name: digest[:8] for name, digest in each.code.get(target, {}).items()} for each in (self, now)
            )
            yield from (f"{target}: module {line}" for line in _describe_changes(before, after))

    def _changed_data(self, now: "Dependencies") -> Iterator[str]:
        for path in sorted({*self.data} & {*now.data}):
            before, after = self.data[path], now.data[path]
            if (before.digest, before.bytes) != (after.digest, after.bytes):
                yield (
                    f"data file {path} has changed (was {before.digest[:8]}, {before.bytes:,} bytes; "
                    f"is now {after.digest[:8]}, {after.bytes:,} bytes)"
                )


class DependencyRecord(Settings):
    """Journal entry that records the dependencies of a run (code, data files, library versions) as of a certain
    iteration."""

    iteration: Annotated[int, Field(ge=1)]
    """Number of the iteration that was in progress or next when this entry was written. The dependencies apply from
    then on, so some results of this iteration may be older."""
    created: str
    """UTC time in ISO format at which the entry was written, for people. No decision depends on it."""
    dependencies: Dependencies
    """Dependencies on which the results from `iteration` on depend."""
    folder: Annotated[str, Since("0.1.0", before="")] = ""
    """Folder of the job file on this machine. Relative paths in the configuration start in this folder. Empty if the
    configuration has no relative paths. Moving the job to another folder does not count as a change."""


class AcceptedChange(Settings):
    """Change of a run's code, data files or library versions that the user accepted, for display."""

    iteration: int
    """Number of the iteration that was in progress or next when the change was accepted. Some of its results may be
    older than the change."""
    created: str
    """UTC time at which the change was accepted."""
    changes: list[str]
    """Differences between the earlier and the new dependencies, one line each."""


def dependency_records(run: Run, prefix: str = "") -> list[DependencyRecord]:
    """Return all recorded dependencies of a run, in order: those at its start, and those after each accepted change.
    `prefix` selects the dependencies of a derived result, such as a rescoring.

    Runs that older versions of Rheostat created have no such entries. Raises Damaged if an entry is not valid.
    """
    try:
        return [read_recorded(DependencyRecord, entry) for entry in run.journal(prefix + DEPENDENCIES).values()]
    except ValidationError as error:
        where = f"run {run.name!r}: journal/{prefix}{DEPENDENCIES}"
        raise Damaged(
            f"{where}: the checksum is right, but the content is not a valid record of dependencies. A newer version "
            f"of Rheostat may have written it: {error}"
        ) from error


def recorded_config(run: Run) -> dict[str, object]:
    """Return the configuration that is stored with a run. Its relative paths start in the folder of the job. Names on
    the Hugging Face Hub refer to the commits that the run has recorded."""
    records = dependency_records(run)
    folder = records[-1].folder if records else ""
    document = place_hub_names(run.record.config, records[-1].dependencies.hub if records else {}, folder)
    assert isinstance(document, dict)
    return {key: place_texts(value, folder) for key, value in document.items()}


def recorded_commits(run: Run, prefix: str = "") -> dict[str, str]:
    """Return the commits that a run has recorded for models and datasets on the Hugging Face Hub. Keys are those of
    `HubPath.key`, such as `model Qwen/Qwen3-0.6B`. `prefix` selects the commits of a derived result, such as a
    rescoring."""
    records = dependency_records(run, prefix)
    return records[-1].dependencies.hub if records else {}


def accepted_changes(run: Run) -> list[AcceptedChange]:
    """Return all changes of a run's code, data files or library versions that the user accepted, in order."""
    return [
        AcceptedChange(iteration=after.iteration, created=after.created, changes=changes)
        for before, after in pairwise(dependency_records(run))
        if (changes := before.dependencies.changes(after.dependencies))
    ]


def check_dependencies(run: Run, now: Dependencies, *, prefix: str = "") -> None:
    """Raise RunChanged if the present dependencies `now` differ from the recorded dependencies of a run. The message
    lists the differences. With `prefix`, the dependencies of a derived result, such as a rescoring, are compared."""
    records = dependency_records(run, prefix)
    changes = records[-1].dependencies.changes(now) if records else []
    if changes:
        more = [f"and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []
        what = f"{prefix.rstrip('/')} of run" if prefix else "run"
        accept = "" if prefix else "Use --accept-change (in a flow: accept_change) to continue with the changes. "
        raise RunChanged(
            f"{what} {run.name!r} in {run.store.uri} was created with other code, data, libraries or ranks: "
            f"{'; '.join([*changes[:SHOWN], *more])}. {accept}Another name starts from the beginning."
        )


def record_dependencies(
    run: Run, now: Dependencies, *, iteration: int, folder: str = "", accept_change: bool = False, prefix: str = ""
) -> None:
    """Record the present dependencies of a locked run, which apply from `iteration` on. Nothing is written if they have
    not changed. `folder` is the folder of the job, which may change without being considered a different dependency, as
    may the commits of a run that has no results yet.

    Raises RunChanged if the dependencies differ and `accept_change` is not set.
    """
    if not accept_change:
        check_dependencies(run, now, prefix=prefix)
    records = dependency_records(run, prefix)
    changes = records[-1].dependencies.changes(now) if records else []
    if changes:
        logger.warning("run %s continues from iteration %d with changes: %s", run.name, iteration, "; ".join(changes))
    is_moved = bool(records) and (records[-1].folder, records[-1].dependencies.hub) != (folder, now.hub)
    if changes or not records or is_moved:
        created = provenance_here().created
        record = DependencyRecord(iteration=iteration, created=created, dependencies=now, folder=folder)
        run.write_entry(f"{prefix}{DEPENDENCIES}{len(records) + 1:04d}", record.as_recorded())


def _describe_changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *after}):
        was, now = before.get(name, "none"), after.get(name, "none")
        if was != now:
            yield f"{name} was {was}, is {now}"
