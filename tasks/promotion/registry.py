"""Changes of the champion by people: signing a proposal, refusing a proposal, and rolling back to an earlier champion.
Needs no Prefect."""

import getpass
import socket
from datetime import UTC, datetime

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import delete_bundle, has_bundle
from rheostat.infra.store.registry import (
    MakeRecord,
    Registry,
    RegistryRecord,
    champion_of,
    open_existing_registry,
    waiting_proposals,
)


def promote(store: str, name: str, run: str, *, reason: str, who: str | None = None) -> tuple[RegistryRecord, bool]:
    """Sign the proposal of a run, so that its policy becomes champion. Return the record, and whether it is new.

    `who` is the person who signs, by default the user of this process. Raises BadInput if there is no such proposal, it
    was refused, or the champion changed since.
    """
    registry = open_existing_registry(store, name)

    def record(number: int, champion: RegistryRecord | None) -> RegistryRecord | None:
        proposal = _newest_proposal(registry, run)
        if champion is not None and champion.policy == proposal.policy:
            return None
        current = record_number(champion)
        if proposal.kind == "refuse":
            raise BadInput(
                f"registry {name!r}: the proposal of run {run!r} was refused (record {proposal.number}) and can no "
                "longer be promoted. Start a new run with `rheostat retrain`."
            )
        if proposal.kind != "proposal" or proposal.previous != current:
            raise BadInput(
                f"registry {name!r}: the gate compared the policy of run {run!r} with record {proposal.previous}, but "
                f"record {current} is the champion now. Start a new run with `rheostat retrain`, or use `rheostat "
                "rollback` if the policy was champion before."
            )
        signed = {
            "number": number,
            "kind": "promote",
            "reason": reason,
            "who": who or describe_user(),
            "when": timestamp(),
        }
        return proposal.model_copy(update=signed)

    return _append_record(registry, record)


def refuse(store: str, name: str, run: str, *, reason: str, who: str | None = None) -> tuple[RegistryRecord, bool]:
    """Refuse the proposal of a run, so that it can no longer be signed. Return the record, and whether it is new.

    Raises BadInput if there is no such proposal or it was already signed.
    """
    registry = open_existing_registry(store, name)

    def record(number: int, _: RegistryRecord | None) -> RegistryRecord | None:
        proposal = _newest_proposal(registry, run)
        if proposal.kind == "refuse":
            return None
        if proposal.kind != "proposal":
            raise BadInput(
                f"registry {name!r}: the proposal of run {run!r} was already promoted (record {proposal.number}) and "
                "can no longer be refused. `rheostat rollback` restores the previous champion."
            )
        refused = {
            "number": number,
            "kind": "refuse",
            "reason": reason,
            "who": who or describe_user(),
            "when": timestamp(),
        }
        return proposal.model_copy(update=refused)

    refused_record = registry.append(record)
    return refused_record or _newest_proposal(registry, run), refused_record is not None


def rollback(store: str, name: str, *, to: int | None, reason: str) -> tuple[RegistryRecord, bool]:
    """Make an earlier champion the champion again, by default the one before the last promotion.

    `to` is the number of the record that promoted the earlier champion. No evaluation is run. Return the registry
    record and whether it was added now. No record is added if the policy is already the
    champion. Raises BadInput if there is no such record or its files were deleted.
    """
    registry = open_existing_registry(store, name)

    def record(number: int, champion: RegistryRecord | None) -> RegistryRecord | None:
        champions = {each.number: each for each in registry.records() if each.is_champion}
        if champion is None:
            raise BadInput(f"registry {name!r} has no champion yet, so there is nothing to roll back.")
        promoted = [each for each in champions.values() if each.kind == "promote"]
        target_number = promoted[-1].previous if to is None else to
        if target_number not in champions:
            missing = (
                f"record {target_number} was never a champion" if target_number else "there was no champion before"
            )
            allowed = ", ".join(map(str, champions))
            raise BadInput(f"registry {name!r}: {missing}, so nothing can be restored. Set --to to one of {allowed}.")
        older = champions[target_number]
        if older.policy == champion.policy:
            return None
        if older.bundle is None or not has_bundle(registry.store, older.bundle):
            raise BadInput(
                f"registry {name!r}: the files of record {target_number} were deleted, because promotion.keep only "
                "keeps the newest promoted policies. Set --to to a newer record."
            )
        return older.model_copy(
            update={
                "number": number,
                "kind": "rollback",
                "previous": champion.number,
                "reason": reason,
                "who": describe_user(),
                "when": timestamp(),
            }
        )

    return _append_record(registry, record)


def prune(registry: Registry, keep: int) -> None:
    """Delete the files of promoted policies, except of the newest `keep`, of the champion, and of proposals that wait
    for a signature."""
    records = registry.records()
    champion = champion_of(records)
    promoted = [record.bundle for record in reversed(records) if record.kind == "promote"]
    waiting = [record.bundle for record in waiting_proposals(records)]
    champion_bundles = [champion.bundle] if champion is not None else []
    kept = {bundle.key for bundle in (*promoted[:keep], *champion_bundles, *waiting) if bundle is not None}
    bundles_by_key = {record.bundle.key: record.bundle for record in records if record.bundle is not None}
    for key, bundle in bundles_by_key.items():
        if key not in kept:
            delete_bundle(registry.store, bundle)


def record_number(record: RegistryRecord | None) -> int:
    """Return the number of the champion's registry record, or 0 if there is no champion (None)."""
    return 0 if record is None else record.number


def _append_record(registry: Registry, make: MakeRecord) -> tuple[RegistryRecord, bool]:
    new_record = registry.append(make)
    if new_record is not None:
        return new_record, True
    champion = registry.champion()
    assert champion is not None, "nothing is made where there is a champion already"
    return champion, False


def _newest_proposal(registry: Registry, run: str) -> RegistryRecord:
    """Return the newest registry record about a run's proposed policy. Raises BadInput if the run has no proposal."""
    records = registry.records()
    proposals = [each for each in records if each.run == run and each.bundle is not None]
    if not proposals:
        known = ", ".join(each.run for each in records if each.kind == "proposal") or "none"
        raise BadInput(
            f"registry {registry.name!r}: run {run!r} has not proposed a policy. Runs with a proposal: {known}"
        )
    return proposals[-1]


def describe_user() -> str:
    """Return "user@host" for this process, to record who made a change."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def timestamp() -> str:
    """Return the current UTC time in ISO format, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
