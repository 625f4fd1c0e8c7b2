"""Completions as people read them: a few rows of a rollout shard beside their scores. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from infra.config import Settings
from infra.store.shards import ShardRef, read_shard
from infra.store.storage import Store
from models.data.images import data_address, thumbnail
from models.records.media import Media, ShownImage
from models.records.model_input import completion_lengths, image_digests
from models.records.work import ExcerptWork, ScoredShard
from models.rollouts.groups import TurnRecord

PICTURED: Final = 4
"""Completions of a report whose images are shown, not only named."""
IMAGES: Final = 2
"""Of each, at most."""
COLUMNS = ("prompt_id", "sample", "prompt", "completion", "answer", "finish_reason", "turns")
TEXTS = ("prompt", "completion", "answer")


class RolloutPreview(Settings):
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
    """`stop` or `length`; of an episode also `turns` or `failed`."""
    turns: tuple[TurnRecord, ...] | None = None
    """Of an episode, in order."""
    tokens: int
    """Length of the completion in tokens; of an episode with all that stands between its turns."""
    images: tuple[ShownImage, ...] = ()
    """What the prompt shows, in order, and behind it the picture that the completion is, if it is one."""


@dataclass(frozen=True, slots=True)
class Excerpts:
    """What a worker hands back of payloads, for a report: few completions, each text shortened."""

    samples: tuple[RolloutPreview, ...]
    thumbnails: Mapping[str, str] = field(default_factory=dict)
    """Small copies of the images of the first of them, as `data:image/...;base64,...`, by digest."""


def read_samples(
    store: Store,
    rollouts: ShardRef,
    scores: ShardRef | None,
    *,
    iteration: int,
    media: Media,
    limit: int | None = None,
) -> list[RolloutPreview]:
    """Read the first `limit` completions whole; without scores, rewards are missing."""
    table, rewards = read_shard(store, rollouts).slice(0, limit), _rewards(store, rollouts, scores)
    return _shown(_samples(table, rewards.slice(0, limit), iteration), table, media)


def read_excerpts(store: Store, work: ExcerptWork) -> Excerpts:
    """Read the first completion of each of the first prompts; a text that is longer ends in `…`."""
    samples: list[RolloutPreview] = []
    media = Media(store, work.media)
    for shard in work.shards:
        table = read_shard(store, shard.rollouts)
        first = pc.indices_nonzero(pc.equal(table["sample"], 0)).slice(0, work.prompts - len(samples))
        rewards = _rewards(store, shard.rollouts, shard.scores).take(first)
        short = _shortened(table.take(first), work.characters)
        samples += _shown(_samples(short, rewards, work.iteration), short, media)
    pictured = [image.digest for sample in samples[:PICTURED] for image in sample.images[:IMAGES]]
    return Excerpts(tuple(samples), {name: data_address(thumbnail(media.encoded(name))) for name in pictured})


def read_rows(
    store: Store, shard: ScoredShard, rows: Sequence[int], *, iteration: int, characters: int, media: Media
) -> list[RolloutPreview]:
    """Read some rows of a shard of rollouts; a text that is longer ends in `…`."""
    if not rows:
        return []
    table = _shortened(read_shard(store, shard.rollouts).take(rows), characters)
    rewards = _rewards(store, shard.rollouts, shard.scores).take(rows)
    return _shown(_samples(table, rewards, iteration), table, media)


def _shown(samples: Sequence[RolloutPreview], table: pa.Table, media: Media) -> list[RolloutPreview]:
    """Say what the prompts of the table's rows show, and which pictures completions are."""
    return [
        sample.model_copy(update={"images": tuple(map(media.shown, digests))}) if digests else sample
        for sample, digests in zip(samples, image_digests(table), strict=True)
    ]


def _shortened(table: pa.Table, characters: int) -> pa.Table:
    for name in TEXTS:
        short = pc.utf8_slice_codeunits(table[name], 0, characters)
        longer = pc.greater(pc.utf8_length(table[name]), characters)
        shown = pc.if_else(longer, pc.binary_join_element_wise(short, "…", ""), short)
        table = table.set_column(table.column_names.index(name), name, shown)
    return table


def _rewards(store: Store, rollouts: ShardRef, scores: ShardRef | None) -> pa.ChunkedArray:
    if scores is None:
        return pa.chunked_array([pa.nulls(rollouts.rows, pa.float64())])
    return read_shard(store, scores, ["reward"])["reward"]


def _samples(table: pa.Table, rewards: pa.ChunkedArray, iteration: int) -> list[RolloutPreview]:
    lengths = completion_lengths(table).tolist()
    rows = table.select(list(COLUMNS)).to_pylist()
    return [
        RolloutPreview(iteration=iteration, tokens=length, reward=reward, **row)
        for row, length, reward in zip(rows, lengths, rewards.to_pylist(), strict=True)
    ]
