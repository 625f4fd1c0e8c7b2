"""Completions prepared for people to read: selected rows of a rollout shard with their scores. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rheostat.infra.config import Settings
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.models.data.images import data_address, thumbnail
from rheostat.models.records.media import Media, ShownImage
from rheostat.models.records.model_input import completion_lengths, image_digests
from rheostat.models.records.work import ExcerptWork, ScoredShard
from rheostat.models.rollouts.groups import TurnRecord

PICTURED: Final = 4
"""Maximum number of completions in a report whose images are shown as thumbnails."""
IMAGES: Final = 2
"""Maximum number of thumbnails for one completion in a report."""
COLUMNS = ("prompt_id", "sample", "prompt", "completion", "answer", "finish_reason", "turns")
TEXTS = ("prompt", "completion", "answer")


class RolloutPreview(Settings):
    """One completion with its prompt, reward and other facts, for a person to read."""

    iteration: int
    """Training iteration that generated the completion."""
    prompt_id: str
    """ID of the problem, which is the same in all runs with the same data."""
    sample: int
    """Index of the completion among the completions of the same prompt."""
    prompt: str
    """Prompt as the policy receives it, rendered by the chat template."""
    completion: str
    """Text that the policy generated."""
    answer: str | None
    """Reference answer from the data, or None if the data has none."""
    reward: float | None
    """Total reward of the completion, or None if it is missing."""
    finish_reason: str
    """Reason why the completion ended: `stop` or `length`. Episodes can also end with `turns` or `failed`."""
    turns: tuple[TurnRecord, ...] | None = None
    """Turns of an episode in order, or None if the completion is not an episode."""
    tokens: int
    """Length of the completion in tokens. For an episode this includes the tokens between turns."""
    images: tuple[ShownImage, ...] = ()
    """Images of the prompt in order, followed by the generated picture if the policy generates pictures."""


@dataclass(frozen=True, slots=True)
class Excerpts:
    """Excerpts of a run's completions for a report: a few completions with shortened texts."""

    samples: tuple[RolloutPreview, ...]
    thumbnails: Mapping[str, str] = field(default_factory=dict)
    """Thumbnails of the first completions' images as `data:image/...;base64,...`, by digest."""


def read_samples(
    store: Store,
    rollouts: ShardRef,
    scores: ShardRef | None,
    *,
    iteration: int,
    media: Media,
    limit: int | None = None,
) -> list[RolloutPreview]:
    """Read the first `limit` completions of a rollout shard with their full texts, or all if `limit` is None. If
    `scores` is None, rewards are missing."""
    table, rewards = read_shard(store, rollouts).slice(0, limit), _read_rewards(store, rollouts, scores)
    return _add_images(_build_previews(table, rewards.slice(0, limit), iteration), table, media)


def read_excerpts(store: Store, work: ExcerptWork) -> Excerpts:
    """Read the first completion of each of the first prompts for a report, with shortened texts. A shortened text ends
    in `…`."""
    samples: list[RolloutPreview] = []
    media = Media(store, work.media)
    for shard in work.shards:
        table = read_shard(store, shard.rollouts)
        first = pc.indices_nonzero(pc.equal(table["sample"], 0)).slice(0, work.prompts - len(samples))
        rewards = _read_rewards(store, shard.rollouts, shard.scores).take(first)
        short = _shorten_texts(table.take(first), work.characters)
        samples += _add_images(_build_previews(short, rewards, work.iteration), short, media)
    pictured = [image.digest for sample in samples[:PICTURED] for image in sample.images[:IMAGES]]
    return Excerpts(tuple(samples), {name: data_address(thumbnail(media.encoded(name))) for name in pictured})


def read_rows(
    store: Store, shard: ScoredShard, rows: Sequence[int], *, iteration: int, characters: int, media: Media
) -> list[RolloutPreview]:
    """Read the completions at `rows` of a rollout shard, with texts shortened to `characters` characters. A shortened
    text ends in `…`."""
    if not rows:
        return []
    table = _shorten_texts(read_shard(store, shard.rollouts).take(rows), characters)
    rewards = _read_rewards(store, shard.rollouts, shard.scores).take(rows)
    return _add_images(_build_previews(table, rewards, iteration), table, media)


def _add_images(samples: Sequence[RolloutPreview], table: pa.Table, media: Media) -> list[RolloutPreview]:
    """Add to each preview the descriptions of the prompt's images and of the generated picture.

    `table` has the rows of the previews in the same order.
    """
    return [
        sample.model_copy(update={"images": tuple(map(media.shown, digests))}) if digests else sample
        for sample, digests in zip(samples, image_digests(table), strict=True)
    ]


def _shorten_texts(table: pa.Table, characters: int) -> pa.Table:
    """Return a rollout table with its texts shortened to `characters` characters. A shortened text ends in `…`."""
    for name in TEXTS:
        short = pc.utf8_slice_codeunits(table[name], 0, characters)
        longer = pc.greater(pc.utf8_length(table[name]), characters)
        texts = pc.if_else(longer, pc.binary_join_element_wise(short, "…", ""), short)
        table = table.set_column(table.column_names.index(name), name, texts)
    return table


def _read_rewards(store: Store, rollouts: ShardRef, scores: ShardRef | None) -> pa.ChunkedArray:
    """Return the total reward of each row of a rollout shard. The rewards are null if `scores`, the score shard, is
    None."""
    if scores is None:
        return pa.chunked_array([pa.nulls(rollouts.rows, pa.float64())])
    return read_shard(store, scores, ["reward"])["reward"]


def _build_previews(table: pa.Table, rewards: pa.ChunkedArray, iteration: int) -> list[RolloutPreview]:
    """Return a preview for each row of a rollout table. `rewards` contains the total reward of each row."""
    lengths = completion_lengths(table).tolist()
    rows = table.select(list(COLUMNS)).to_pylist()
    return [
        RolloutPreview(iteration=iteration, tokens=length, reward=reward, **row)
        for row, length, reward in zip(rows, lengths, rewards.to_pylist(), strict=True)
    ]
