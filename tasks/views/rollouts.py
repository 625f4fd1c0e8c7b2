"""Readable rollouts, for commands: a few rows of a run's shards, with their scores. No flow or task reads them."""

from typing import Literal

from infra.errors import BadInput
from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.rollouts.preview import RolloutPreview, read_samples
from tasks.run.batch import rollouts_of
from tasks.run.keys import StageKey, iteration_key, iterations_among


def sample_rollouts(
    run: Run, iteration: int, *, limit: int, order: Literal["reward", "length", "position"] = "position"
) -> list[RolloutPreview]:
    """Read completions of one iteration. By position only as many shards and rows are read as `limit` needs."""
    rollouts = rollouts_of(run, iteration)
    if not rollouts:
        begun = [iteration_key(number) for number in iterations_among(run.folders()) if rollouts_of(run, number)]
        found = f"iterations {begun[0]} to {begun[-1]}" if begun else "none yet"
        raise BadInput(f"run {run.name!r} has no rollouts of iteration {iteration}, found {found}")
    samples: list[RolloutPreview] = []
    for manifest in rollouts:
        samples += _read(run, manifest, iteration, limit=limit - len(samples) if order == "position" else None)
        if order == "position" and len(samples) >= limit:
            break
    if order == "reward":
        samples.sort(key=lambda s: float("-inf") if s.reward is None else s.reward, reverse=True)
    elif order == "length":
        samples.sort(key=lambda s: s.tokens, reverse=True)
    return samples[:limit]


def _read(run: Run, manifest: Manifest, iteration: int, *, limit: int | None) -> list[RolloutPreview]:
    scored = run.find(StageKey.parse(manifest.key).at("scoring"))
    scores = None if scored is None else scored.shards[0]
    return read_samples(run.store, manifest.shards[0], scores, iteration=iteration, limit=limit)
