"""Batches: the prompts of an iteration or evaluation, divided into shards that are assigned to controllers.

The plan of a batch is committed first, so that every controller reads the same plan.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil
from typing import Literal, Self

from infra.config import Settings, read_recorded
from infra.errors import BadInput
from infra.store.manifests import Manifest
from infra.store.runs import Run
from infra.store.shards import ShardRef
from infra.store.tombstones import WHOLE_RUN, deleted_parts, find_tombstone
from models.config.engines import SamplingConfig
from models.data.curriculum import Cursor
from tasks.run.keys import PROMPTS, StageKey, iteration_key


def split_prompts(num_prompts: int, *, shard_prompts: int) -> tuple[range, ...]:
    """Return the positions of each shard's prompts. Shards do not depend on the number of controllers or workers.

    >>> cut(5, shard_prompts=2)
    (range(0, 2), range(2, 4), range(4, 5))
    """
    num_shards = ceil(num_prompts / shard_prompts)
    return tuple(range(i * shard_prompts, min((i + 1) * shard_prompts, num_prompts)) for i in range(num_shards))


def slice_shards(shards: Sequence[int], *, controllers: int) -> tuple[tuple[int, ...], ...]:
    """Divide shards into contiguous slices of nearly equal size, at most one per controller and none empty.

    >>> slice_shards([0, 1, 2], controllers=2)
    ((0, 1), (2,))
    """
    owners = min(controllers, len(shards))
    bounds = [len(shards) * owner // owners for owner in range(owners + 1)] if owners else [0]
    # Larger slices come first, so the first controllers get them.
    sizes = sorted((stop - start for start, stop in pairwise(bounds)), reverse=True)
    slices, start = [], 0
    for size in sizes:
        slices.append(tuple(shards[start : start + size]))
        start += size
    return tuple(slices)


def picture_shards_of(rollouts: Manifest) -> tuple[ShardRef, ...]:
    """Return the shards with the images that a rollout shard's completions consist of.

    A rollout manifest of text has no such shards. Its second shard, if any, holds groups with partial completions.
    """
    return () if "carried_rows" in rollouts.detail else rollouts.shards[1:]


def completion_shards_of(rollouts: Manifest) -> tuple[ShardRef, ...]:
    """Return the shards with completions of a rollout manifest: finished groups, then groups with partial completions,
    if any."""
    return rollouts.shards[: len(rollouts.shards) - len(picture_shards_of(rollouts))]


class BatchPlan(Settings):
    """Prompts of one batch and their division into shards."""

    key: str
    """Prefix of the batch's manifest keys, for example `it-0003`, `it-0003/wave-2` or `eval-0010`."""
    number: int
    """Number of the iteration, or the number of iterations before the evaluation."""
    split: Literal["train", "heldout"]
    """Split that the prompts belong to."""
    rows: tuple[int, ...]
    """Row numbers of the prompts, in order."""
    group_size: int
    """Number of completions per prompt."""
    shard_prompts: int
    """Number of prompts per shard."""
    sampling: SamplingConfig
    """Sampling settings of the completions."""
    policy: str
    """Key of the manifest that committed the policy."""
    wave: int = 1
    """Number of the batch in its iteration, counted from 1. Only dynamic sampling has more than one batch per
    iteration."""
    carried: tuple[str, ...] = ()
    """Keys of rollout manifests of the previous iteration whose partial completions continue here. Each becomes one of
    the first shards."""
    cursor: Cursor | None = None
    """Position in the stream of prompts after this batch, or None for an evaluation."""
    rescoring: str = ""
    """Prefix of a re-scoring, for example `rescore/strict/`, which `key` and the keys of its judge models start with.
    Empty for the run itself."""

    @classmethod
    def read(cls, manifest: Manifest) -> Self:
        """Return the plan that is stored in a plan manifest."""
        return read_recorded(cls, manifest.detail)

    @property
    def num_shards(self) -> int:
        """Number of shards in the batch, including the shards that continue partial completions."""
        return len(self.carried) + len(self._fresh)

    def shard_rows(self, shard: int) -> tuple[int, ...]:
        """Return the row numbers of one shard's new prompts. Empty if the shard only continues partial completions."""
        fresh = shard - len(self.carried)
        return tuple(self.rows[position] for position in self._fresh[fresh]) if fresh >= 0 else ()

    @property
    def _fresh(self) -> tuple[range, ...]:
        return split_prompts(len(self.rows), shard_prompts=self.shard_prompts)

    @property
    def plan_key(self) -> StageKey:
        """Key of the manifest that stores the plan."""
        return StageKey.of(self.key, "plan")

    def shard_key(self, stage: str, shard: int) -> StageKey:
        """Return the key of the manifest that commits one shard of a stage."""
        return StageKey.of(self.key, stage, shard)

    def rollout_key(self, shard: int) -> StageKey:
        """Return the key of the manifest with the rollouts of one shard. In a re-scoring this is the key in the run
        itself."""
        return self.shard_key("rollout", shard).without_prefix


class Batch:
    """Planned batch with the manifests that its stages have committed.

    This is a plain class, because Prefect would traverse a dataclass or model that a task receives, row by row.
    """

    def __init__(self, run: Run, plan: BatchPlan) -> None:
        self.run, self.plan = run, plan

    @classmethod
    def read(cls, run: Run, key: str) -> Self:
        """Return the batch with this key, such as `it-0003`. Raises Damaged if the batch has no plan."""
        return cls(run, BatchPlan.read(run.require(StageKey.of(key, "plan"))))

    @property
    def key(self) -> str:
        """Prefix of the batch's manifest keys."""
        return self.plan.key

    @property
    def shards(self) -> range:
        """Numbers of the batch's shards."""
        return range(self.plan.num_shards)

    @property
    def plan_manifest(self) -> Manifest:
        """Manifest that committed the batch's plan."""
        return self.run.require(self.plan.plan_key)

    @property
    def policy(self) -> Manifest:
        """Manifest of the policy that generates the rollouts."""
        return self.run.require(self.plan.policy)

    @property
    def prompts(self) -> Manifest:
        """Manifest of the prompts that the batch's rows refer to."""
        return self.run.require(PROMPTS[self.plan.split])

    @property
    def media(self) -> tuple[ShardRef, ...]:
        """Shards with the images of the prompts."""
        return self.prompts.shards[1:]

    @property
    def rollout_manifests(self) -> list[Manifest]:
        """Rollout manifests, in the order of shards. Raises Damaged if one is not committed."""
        return [self.run.require(self.plan.rollout_key(shard)) for shard in self.shards]

    def stage_manifests(self, stage: str) -> list[Manifest]:
        """Return the manifests of another stage, in the order of shards. Raises Damaged if one is not committed."""
        return [self.run.require(self.plan.shard_key(stage, shard)) for shard in self.shards]

    def partial_rollouts(self, shard: int) -> Manifest | None:
        """Return the rollout manifest of the previous iteration whose partial completions a shard continues, or
        None."""
        carried = self.plan.carried[shard : shard + 1]
        return self.run.require(carried[0]) if carried else None

    def as_rescoring(self, prefix: str) -> Self:
        """Return the same rollouts as a batch of a re-scoring, whose keys start with `prefix`."""
        return type(self)(self.run, self.plan.model_copy(update={"key": f"{prefix}{self.key}", "rescoring": prefix}))


def rollouts_of(run: Run, number: int) -> list[Manifest]:
    """Return the manifests of all rollouts of an iteration that have been committed so far."""
    return rollouts_of_batch(run, iteration_key(number))


def rollouts_of_batch(run: Run, key: str) -> list[Manifest]:
    """Return the rollout manifests of an iteration or evaluation, by its key."""
    manifests = run.manifests(f"{key}/")
    return [manifest for manifest in manifests if StageKey.parse(manifest.key).stage == "rollout"]


def iterations_without_rollouts(run: Run, numbers: Iterable[int]) -> set[int]:
    """Return the iterations among `numbers` whose rollouts were deleted. Needs one store request."""
    deleted = deleted_parts(run)
    return {number for number in numbers if WHOLE_RUN in deleted or iteration_key(number) in deleted}


def iterations_with_rollouts(run: Run, numbers: Iterable[int]) -> list[int]:
    """Return the iterations among `numbers` whose rollouts are stored. Raises BadInput if there is none."""
    numbers = list(numbers)
    deleted = iterations_without_rollouts(run, numbers)
    check_rollouts_kept(run, numbers if len(deleted) == len(numbers) else ())
    return [number for number in numbers if number not in deleted]


def check_rollouts_kept(run: Run, numbers: Iterable[int]) -> None:
    """Raise BadInput if the rollouts of one of these iterations were deleted."""
    for number in sorted(iterations_without_rollouts(run, numbers))[:1]:
        stone = find_tombstone(run, iteration_key(number))
        assert stone is not None, "a part that was deleted has a tombstone"
        raise BadInput(
            f"run {run.name!r}: the rollouts of iteration {number} were deleted by {stone.why} ({stone.who}). Choose a "
            "newer iteration."
        )
