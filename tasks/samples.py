"""Readable rollouts: a few rows of a run's shards, with their scores."""

from typing import Literal

import pyarrow.compute as pc

from infra.config import Settings
from infra.errors import BadInput
from infra.manifests import Manifest
from infra.runs import Run
from infra.shards import read_shard
from tasks.plan import rollouts_of


class Sample(Settings):
    """One completion as a person reads it."""

    iteration: int
    """Iteration that generated it."""
    prompt_id: str
    """Stable name of the problem."""
    sample: int
    """Index inside its group."""
    prompt: str
    """Rendered prompt."""
    completion: str
    """What the policy wrote."""
    answer: str | None
    """Reference answer."""
    reward: float | None
    """Total reward; none if it is missing."""
    finish_reason: str
    """`stop` or `length`."""
    tokens: int
    """Length of the completion in tokens."""


def sample_rollouts(
    run: Run, iteration: int, *, limit: int, order: Literal["reward", "length", "position"] = "position"
) -> list[Sample]:
    """Read completions of one iteration. By position only as many shards and rows are read as `limit` needs."""
    rollouts = rollouts_of(run, iteration)
    if not rollouts:
        begun = sorted({m.key.split("/")[0] for m in run.manifests("it-") if "/rollout/" in m.key})
        found = f"iterations {begun[0]} to {begun[-1]}" if begun else "none yet"
        raise BadInput(f"run {run.name!r} has no rollouts of iteration {iteration}, found {found}")
    samples: list[Sample] = []
    for manifest in rollouts:
        samples += _read(run, manifest, iteration, limit=limit - len(samples) if order == "position" else None)
        if order == "position" and len(samples) >= limit:
            break
    if order == "reward":
        samples.sort(key=lambda s: float("-inf") if s.reward is None else s.reward, reverse=True)
    elif order == "length":
        samples.sort(key=lambda s: s.tokens, reverse=True)
    return samples[:limit]


def _read(run: Run, manifest: Manifest, iteration: int, *, limit: int | None) -> list[Sample]:
    columns = ["prompt_id", "sample", "prompt", "completion", "answer", "finish_reason"]
    table = read_shard(run.store, manifest.shards[0]).slice(0, limit)
    lengths = pc.list_value_length(table["completion_tokens"]).to_pylist()
    rows = table.select(columns).to_pylist()
    scored = run.find(manifest.key.replace("/rollout/", "/scoring/"))
    rewards: list[float | None] = [None] * len(rows)
    if scored is not None:
        rewards = read_shard(run.store, scored.shards[0], columns=["reward"])["reward"].slice(0, limit).to_pylist()
    return [
        Sample(iteration=iteration, tokens=length, reward=reward, **row)
        for row, length, reward in zip(rows, lengths, rewards, strict=True)
    ]
