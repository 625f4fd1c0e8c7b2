"""Policy versions whose bundles have no files, for tests of retention."""

from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.tasks.run.keys import StageKey


def empty_bundle(number: int) -> BundleRef:
    """Return the reference of a bundle that is known by its number."""
    digest = f"{number:016x}{0:048x}"
    return BundleRef(key=f"policies/{digest[:16]}", digest=digest, bytes=1)


def commit_version(run: Run, version: int, *, weights: int, state: int | None = None) -> None:
    """Commit a version of the policy with bundles of these numbers."""
    numbers = {"weights": weights} | ({} if state is None else {"state": state})
    bundles = {name: empty_bundle(number) for name, number in numbers.items()}
    for bundle in bundles.values():
        run.store.put(f"{bundle.key}/bundle.json", b"{}")
    detail = {"version": version}
    run.commit(Manifest(key=StageKey.policy(version), bundles=bundles, metrics={"steps": 1}, detail=detail))


def stored_bundles(run: Run, numbers: range) -> list[int]:
    """Return which of these bundles are in the store."""
    return [number for number in numbers if run.store.exists(f"{empty_bundle(number).key}/bundle.json")]
