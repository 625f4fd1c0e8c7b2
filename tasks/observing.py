"""What the stages of a batch measured, read from their manifests."""

from collections.abc import Iterator

from infra.store.manifests import Manifest
from infra.store.runs import Run
from placement.measurements import Measurements, Role, UnitObservation
from tasks.plan import BatchPlan, waves_of

STEPS = ("steps", "step_sequences", "step_sequences_squared", "step_seconds", "step_sequence_seconds")
LOADING = "load"


def observed(measured: Measurements, run: Run, plan: BatchPlan, stages: dict[str, Role]) -> Measurements:
    """What is known after a batch; `stages` says which role each of its stages belongs to."""
    return measured.observe(_units(run, plan, stages), moves=_moves(run, plan))


def recalled(run: Run, stages: dict[str, Role], *, before: int, iterations: int) -> Measurements:
    """What is known from the last iterations before one, as far as they are in the store."""
    measured = Measurements()
    for number in range(max(1, before - iterations), before):
        for plan in waves_of(run, number):
            measured = observed(measured, run, plan, stages)
    return measured


def _units(run: Run, plan: BatchPlan, stages: dict[str, Role]) -> Iterator[UnitObservation]:
    for stage, role in stages.items():
        for shard in range(plan.num_shards):
            manifest = run.find(plan.shard_key(stage, shard))
            if manifest is not None:
                yield _unit(manifest, role)


def _unit(manifest: Manifest, role: Role) -> UnitObservation:
    seconds, lengths = manifest.provenance.seconds, manifest.detail.get("lengths", [])
    assert isinstance(lengths, list)
    return UnitObservation(
        role=role,
        sequences=int(manifest.metrics["sequences"]),
        seconds=seconds["worker"] - seconds.get(LOADING, 0.0),
        lengths=tuple(float(str(length)) for length in lengths),
        **{name: seconds.get(name, 0.0) for name in STEPS},
    )


def _moves(run: Run, plan: BatchPlan) -> Iterator[float]:
    """Seconds of the moves between roles that were made for a batch; starts of processes are no cost that recurs."""
    for entry in run.journal(f"placement/{plan.key}/moves").values():
        moves = entry["moves"]
        assert isinstance(moves, list)
        for move in moves:
            assert isinstance(move, dict)
            if move["how"] == "wake" and move["error"] is None:
                yield float(str(move["seconds"]))
