"""Which engines wrote a run's rollouts and verdicts, as the shards themselves tell."""

from infra.store.runs import Run
from infra.store.shards import read_metadata
from tasks.plan import iteration_key, rollouts_of
from tasks.reports import sealed_iterations


def producers_of(run: Run) -> dict[str, list[str]]:
    """Name the engines of each role in the newest iteration that has rollouts; several where one was changed in it."""
    sealed = len(sealed_iterations(run))
    number = sealed + 1 if rollouts_of(run, sealed + 1) else sealed
    found: dict[str, set[str]] = {}
    for manifest in run.manifests(f"{iteration_key(number)}/"):
        for shard in manifest.shards:
            producer = read_metadata(run.store, shard).get("producer")
            if producer is not None:
                found.setdefault(manifest.key.split("/")[-2], set()).add(producer)
    return {role: sorted(names) for role, names in found.items()}
