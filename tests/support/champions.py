"""Registries with policies of a few bytes."""

from pathlib import Path

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.registry import POLICIES, Kind, Registry, RegistryRecord


def append_record(
    registry: Registry, tmp_path: Path, policy: str, *, kind: Kind = "promote", run: str | None = None
) -> RegistryRecord | None:
    """Append the record of a policy whose only content is its name."""
    directory = tmp_path / policy
    directory.mkdir(exist_ok=True)
    (directory / "model").write_text(policy)
    bundle = publish_bundle(registry.store, directory, prefix=POLICIES)
    return registry.append(
        lambda number, champion: RegistryRecord(
            number=number,
            kind=kind,
            policy=policy,
            bundle=bundle,
            run=run or f"run-{policy}",
            iteration=1,
            previous=champion.number if champion else 0,
            reason="",
            who="",
            when="",
            version="",
        )
    )
