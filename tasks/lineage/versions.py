"""Versions of promoted policies, and the chain of champions that each training started from. Both are read from
registry records and from drafts (what a retrain decided when it began)."""

import re
from collections.abc import Iterator

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import has_bundle
from rheostat.infra.store.registry import (
    Registry,
    RegistryRecord,
    champion_of,
    open_existing_registry,
    open_registry,
    registries,
)
from rheostat.infra.store.runs import list_runs, open_run
from rheostat.infra.validation_errors import nearest
from rheostat.models.records.versions import policy_of
from rheostat.tasks.lineage.trace import TracedRun, trace_run
from rheostat.tasks.promotion.draft import read_draft
from rheostat.tasks.run.keys import StageKey, iteration_numbers

DIGEST = re.compile(r"[0-9a-f]{6,64}")


class TracedVersion(Settings):
    """One policy in the history of a promoted policy: its registry record, its run and its evaluations."""

    registry: str
    """Name of the registry. Empty if no registry has a record of the policy."""
    record: RegistryRecord | None
    """Registry record of the policy's promotion or refusal, or None if no registry has a record of the policy."""
    is_champion: bool
    """Whether the policy is the current champion."""
    began_as: int
    """Number of the record of the champion that the run started from, or 0 if it started from its configured policy."""
    files: str
    """Location of the policy's files in the registry. Empty if the registry does not store them."""
    run: TracedRun | None
    """Origin of the policy in the run that trained it, or None if the run is not in the store."""
    name: str
    """Name of the run."""
    evaluations: tuple[TracedRun, ...]
    """Runs that evaluated the policy against the champion."""


def trace(store: str, name_or_digest: str) -> list[TracedVersion]:
    """Trace a policy back through all champions that it was trained from. Return one version for each policy,
    newest first.

    The policy is named by `NAME@champion`, `NAME@N` or `NAME` of a registry, the name of a run, or the beginning of its
    digest (at least 6 digits). Raises BadInput if there is no such policy, or several digests match.
    """
    name, separator, number = name_or_digest.partition("@")
    if separator or name in registries(store):
        registry = open_existing_registry(store, name)
        return list(_trace_chain(store, registry, _find_record(registry, number if separator else "champion")))
    if name_or_digest in list_runs(store):
        return list(_trace_run(store, name_or_digest, iteration=None))
    if DIGEST.fullmatch(name_or_digest):
        return list(_trace_policy(store, name_or_digest))
    known = [*registries(store), *list_runs(store)]
    forms = (
        "NAME@champion or NAME@N of a registry, the name of a registry or a run, or at least 6 digits of a policy's "
        "digest"
    )
    names = f"Registries and runs: {', '.join(known) or 'none'}{nearest(name_or_digest, known)}"
    raise BadInput(f"lineage: there is no registry, run or policy {name_or_digest!r}. Write {forms}. {names}")


def champion_before(registry: Registry, run: str) -> int:
    """Return the number of the record of the champion that a retrain started from, or 0 if it started from its
    configured policy."""
    draft = read_draft(registry, run)
    if draft is not None:
        return draft.champion
    first_record = next((each for each in registry.records() if each.run == run and each.kind != "rollback"), None)
    return 0 if first_record is None else first_record.previous


def ancestry(registry: Registry, record: RegistryRecord) -> Iterator[RegistryRecord]:
    """Yield a registry record, then the record of the champion that its run started from, and so on to the first
    champion."""
    records = {each.number: each for each in registry.records()}
    last: RegistryRecord | None = record
    while last is not None:
        yield last
        before = champion_before(registry, last.run)
        last = records.get(before) if before < last.number else None


def _find_record(registry: Registry, number: str) -> RegistryRecord:
    records = registry.records()
    record = champion_of(records) if number == "champion" else None
    if number.isdecimal():
        record = next((each for each in records if each.number == int(number)), None)
    if record is None:
        numbers = f"records 1 to {len(records)}" if records else "no record"
        raise BadInput(
            f"lineage: {registry.name}@{number} does not exist. Write {registry.name}@champion, or the number of a "
            f"record after @. The registry has {numbers}{'' if champion_of(records) else ' and no champion'}."
        )
    return record


def _trace_chain(store: str, registry: Registry, record: RegistryRecord) -> Iterator[TracedVersion]:
    champion = registry.champion()
    runs = list_runs(store)
    for each in ancestry(registry, record):
        bundle = each.bundle
        compared = [name for name in runs if name.startswith(f"{each.run}.")]
        yield TracedVersion(
            registry=registry.name,
            record=each,
            is_champion=champion is not None and champion.policy == each.policy,
            began_as=champion_before(registry, each.run),
            files=registry.locate(each) if bundle is not None and has_bundle(registry.store, bundle) else "",
            run=trace_run(open_run(store, each.run), iteration=each.iteration) if each.run in runs else None,
            name=each.run,
            evaluations=tuple(trace_run(open_run(store, name)) for name in compared),
        )


def _trace_run(store: str, name: str, *, iteration: int | None) -> Iterator[TracedVersion]:
    """Yield the policy that a run produced and the champions before it. If no registry has a record of the run,
    yield only the run."""
    for registry_name in registries(store):
        registry = open_registry(store, registry_name)
        records = [each for each in registry.records() if each.run == name and iteration in (None, each.iteration)]
        if records:
            yield from _trace_chain(store, registry, records[-1])
            return
    run = trace_run(open_run(store, name), iteration=iteration)
    yield TracedVersion(
        registry="", record=None, is_champion=False, began_as=0, files="", run=run, name=name, evaluations=()
    )


def _trace_policy(store: str, digest: str) -> Iterator[TracedVersion]:
    """Yield the policy whose digest starts with `digest` and the champions before it. Raises BadInput unless
    exactly one policy matches."""
    recorded = {each.policy: (registry, each) for registry, each in _find_records(store, digest)}
    produced = {} if recorded else {policy: (run, number) for policy, run, number in _find_policies(store, digest)}
    if len(recorded) + len(produced) != 1:
        matches = ", ".join(policy[:16] for policy in (*recorded, *produced)) or "none"
        raise BadInput(
            f"lineage: {digest!r} must be the beginning of the digest of exactly one policy in {store!r}, but it "
            f"matches: {matches}. Write more digits, or check them."
        )
    for registry, record in recorded.values():
        yield from _trace_chain(store, registry, record)
    for name, iteration in produced.values():
        yield from _trace_run(store, name, iteration=iteration)


def _find_records(store: str, digest: str) -> Iterator[tuple[Registry, RegistryRecord]]:
    for name in registries(store):
        registry = open_registry(store, name)
        for each in registry.records():
            if each.policy.startswith(digest) or (each.bundle is not None and each.bundle.digest.startswith(digest)):
                yield registry, each


def _find_policies(store: str, digest: str) -> Iterator[tuple[str, str, int]]:
    """Yield (digest, run name, iteration) for each policy whose digest starts with `digest`. Initial policies come
    first."""
    runs = [open_run(store, name) for name in list_runs(store)]
    places = [(run, 0) for run in runs] + [(run, number) for run in runs for number in iteration_numbers(run.folders())]
    for run, number in places:
        manifest = run.find(StageKey.policy(number))
        if manifest is not None and (policy_digest := policy_of(manifest).digest).startswith(digest):
            yield policy_digest, run.name, number
