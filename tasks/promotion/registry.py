"""Who is champion: by the proposals that people sign, and by what they take back. Needs no Prefect."""

import getpass
import socket
from datetime import UTC, datetime

from infra.errors import BadInput
from infra.store.bundles import delete_bundle, has_bundle
from infra.store.registry import MakeRecord, Registry, RegistryRecord, champion_of, known_registry


def promote(store: str, name: str, run: str, *, reason: str) -> tuple[RegistryRecord, bool]:
    """Sign the proposal of a run: its policy is champion from now on. Return the record, and whether it is new."""
    registry = known_registry(store, name)

    def record(number: int, champion: RegistryRecord | None) -> RegistryRecord | None:
        proposals = [each for each in registry.records() if each.run == run and each.bundle is not None]
        if not proposals:
            waiting = [each.run for each in registry.records() if each.kind == "proposal"]
            known = ", ".join(waiting) or "none"
            raise BadInput(f"registry {name!r}: expected a run with a proposal, found {run!r}; proposed: {known}")
        proposal = proposals[-1]
        if champion is not None and champion.policy == proposal.policy:
            return None
        current = number_of(champion)
        if proposal.kind != "proposal" or proposal.previous != current:
            raise BadInput(
                f"registry {name!r}: {run!r} was compared with record {proposal.previous}, and record {current} is "
                "champion now: retrain again, or `rheostat rollback` where it was champion before"
            )
        return proposal.model_copy(
            update={"number": number, "kind": "promote", "reason": reason, "who": who(), "when": now()}
        )

    return _appended(registry, record)


def rollback(store: str, name: str, *, to: int | None, reason: str) -> tuple[RegistryRecord, bool]:
    """Make the champion of an earlier record champion again, by default the one before the last promotion.

    Nothing is measured.
    Return the record, and whether it is new: what is champion already is not recorded again.
    """
    registry = known_registry(store, name)

    def record(number: int, champion: RegistryRecord | None) -> RegistryRecord | None:
        champions = {each.number: each for each in registry.records() if each.is_champion}
        if champion is None:
            raise BadInput(f"registry {name!r}: expected a champion to roll back from, found no promotion")
        promoted = [each for each in champions.values() if each.kind == "promote"]
        wanted = promoted[-1].previous if to is None else to
        if wanted not in champions:
            raise BadInput(
                f"registry {name!r}: expected the number of a promotion to roll back to, one of "
                f"{', '.join(map(str, champions))}, found {wanted or 'none before the champion'}"
            )
        older = champions[wanted]
        if older.policy == champion.policy:
            return None
        if older.bundle is None or not has_bundle(registry.store, older.bundle):
            raise BadInput(
                f"registry {name!r}: the files of record {wanted} were deleted: promotion.keep keeps the newest"
            )
        return older.model_copy(
            update={
                "number": number,
                "kind": "rollback",
                "previous": champion.number,
                "reason": reason,
                "who": who(),
                "when": now(),
            }
        )

    return _appended(registry, record)


def prune(registry: Registry, keep: int) -> None:
    """Delete the files of promoted policies but for the newest few, the champion's, and what waits to be signed."""
    records = registry.records()
    champion = champion_of(records)
    promoted = [record.bundle for record in reversed(records) if record.kind == "promote"]
    waiting = [
        record.bundle for record in records if record.kind == "proposal" and record.previous == number_of(champion)
    ]
    reigning = [champion.bundle] if champion is not None else []
    kept = {bundle.key for bundle in (*promoted[:keep], *reigning, *waiting) if bundle is not None}
    named = {record.bundle.key: record.bundle for record in records if record.bundle is not None}
    for key, bundle in named.items():
        if key not in kept:
            delete_bundle(registry.store, bundle)


def number_of(record: RegistryRecord | None) -> int:
    """Number of the record that says who is champion; 0 where there is none."""
    return 0 if record is None else record.number


def _appended(registry: Registry, make: MakeRecord) -> tuple[RegistryRecord, bool]:
    made = registry.append(make)
    if made is not None:
        return made, True
    champion = registry.champion()
    assert champion is not None, "nothing is made where there is a champion already"
    return champion, False


def who() -> str:
    """Who asks, for people."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def now() -> str:
    """The time in UTC, for people."""
    return datetime.now(UTC).isoformat(timespec="seconds")
