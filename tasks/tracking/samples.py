"""Completions of an iteration for people to read: the best, the worst, and a random sample."""

import random
from typing import Final

import numpy as np

from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import read_shard
from rheostat.infra.trackers.records import Cell, TextTable
from rheostat.models.records.columns import Floats
from rheostat.models.records.seeds import derive_seed
from rheostat.models.records.work import ScoredShard
from rheostat.models.rollouts.preview import RolloutPreview, read_rows
from rheostat.tasks.run.batch import iterations_without_rollouts, rollouts_of
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.views.runs import media_of

BEST, WORST, RANDOM = 4, 4, 8
CHARACTERS: Final = 2000
"""Maximum number of characters of a text in a cell."""
COLUMNS: Final = ("why", "reward", "prompt", "completion", "answer", "tokens", "finish", "prompt_id", "sample")


def sample_table(run: Run, iteration: int) -> TextTable | None:
    """Return a table of some completions of an iteration: the best, the worst and some others. The same rows are chosen
    on each call. Return None if the rollouts were deleted."""
    if iterations_without_rollouts(run, [iteration]):
        return None
    pairs = [_scored_shard(run, StageKey.parse(rollouts.key)) for rollouts in rollouts_of(run, iteration)]
    rewards = [np.asarray(read_shard(run.store, pair.scores, ["reward"])["reward"], np.float64) for pair in pairs]
    chosen = chosen_rows(np.concatenate(rewards), seed=derive_seed("samples", run.record.fingerprint, iteration))
    bounds = np.cumsum([0, *map(len, rewards)])
    previews: dict[int, RolloutPreview] = {}
    for pair, begin, end in zip(pairs, bounds, bounds[1:], strict=False):
        rows = sorted(row for row in chosen if begin <= row < end)
        local = [int(row - begin) for row in rows]
        read = read_rows(
            run.store, pair, local, iteration=iteration, characters=CHARACTERS, media=media_of(run, "train")
        )
        previews |= dict(zip(rows, read, strict=True))
    return TextTable(COLUMNS, tuple(_build_cells(why, previews[row]) for row, why in chosen.items()))


def chosen_rows(rewards_N: Floats, *, seed: int) -> dict[int, str]:
    """Choose completions to show. Return the reason ("best", "worst" or "random") by row. Random rows may include rows
    without a reward."""
    order = [int(row) for row in np.argsort(-rewards_N, kind="stable") if np.isfinite(rewards_N[row])]
    best = order[:BEST]
    worst = order[max(BEST, len(order) - WORST) :]
    others = [row for row in range(len(rewards_N)) if row not in {*best, *worst}]
    sampled = sorted(random.Random(seed).sample(others, min(RANDOM, len(others))))
    return {**dict.fromkeys(best, "best"), **dict.fromkeys(worst, "worst"), **dict.fromkeys(sampled, "random")}


def _scored_shard(run: Run, rollouts: StageKey) -> ScoredShard:
    rollout_manifest, scored = run.require(rollouts), run.require(rollouts.with_stage("scoring"))
    return ScoredShard(rollouts=rollout_manifest.shards[0], scores=scored.shards[0])


def _build_cells(why: str, sample: RolloutPreview) -> tuple[Cell, ...]:
    return (
        why,
        sample.reward,
        sample.prompt,
        sample.completion,
        sample.answer,
        sample.tokens,
        sample.finish_reason,
        sample.prompt_id,
        sample.sample,
    )
