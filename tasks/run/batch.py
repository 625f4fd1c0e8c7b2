"""Batches: the prompts of an iteration or evaluation, divided into shards. Controllers generate and score the shards.

The plan of a batch is committed first, so that every controller reads the same plan.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil
from typing import Literal, Self

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.errors import BadInput
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import ShardRef
from rheostat.infra.store.tombstones import WHOLE_RUN, deleted_parts, find_tombstone
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.data.curriculum import Cursor
from rheostat.tasks.run.keys import PROMPTS, StageKey, iteration_key


def split_prompts(num_prompts: int, *, shard_prompts: int) -> tuple[range, ...]:
    """Divide prompts into shards and return the range of prompt positions of each shard. The shards do not depend on
    the number of controllers or workers.

    >>> split_prompts(5, shard_prompts=2)
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
    """Return the shards with generated images that a rollout stage stored. Empty if completions are text.

    In a rollout manifest with text completions, the second shard holds groups with partial completions, not images.
    """
    return () if "carried_rows" in rollouts.detail else rollouts.shards[1:]


def completion_shards_of(rollouts: Manifest) -> tuple[ShardRef, ...]:
    """Return the shards with completions that a rollout stage stored: first finished groups, then groups with partial
    completions, if any."""
    return rollouts.shards[: len(rollouts.shards) - len(picture_shards_of(rollouts))]


class BatchPlan(Settings):
    """Prompts of one batch, their division into shards, and the policy and sampling settings for generating
    completions."""

    key: str
    """Prefix of the keys under which results of the batch are stored, for example `it-0003`, `it-0003/wave-2` or
    `eval-0010`."""
    number: int
    """Number of the iteration that the batch belongs to. For an evaluation, the number of iterations done before it."""
    split: Literal["train", "heldout"]
    """Whether the prompts are training or held-out prompts."""
    rows: tuple[int, ...]
    """Row numbers of the prompts in the stored table of prompts, in order."""
    group_size: int
    """Number of completions per prompt."""
    shard_prompts: int
    """Number of prompts per shard."""
    sampling: SamplingConfig
    """Sampling settings of the completions."""
    policy: str
    """Key of the stored policy that generates the completions, for example `it-0002/update`."""
    wave: int = 1
    """Number of the batch in its iteration, counted from 1. Only dynamic sampling has more than one batch per
    iteration."""
    carried: tuple[str, ...] = ()
    """Keys of rollouts of the previous iteration whose partial completions are continued in this batch. The first
    shards of the batch continue them, one shard for each key."""
    cursor: Cursor | None = None
    """Position in the stream of training prompts after this batch, or None for an evaluation."""
    rescoring: str = ""
    """Prefix of keys if this batch scores stored rollouts again, for example `rescore/strict/`. `key` and the keys of
    the judge models start with it. Empty for batches of the run itself."""

    @classmethod
    def read(cls, manifest: Manifest) -> Self:
        """Read a plan from its stored record (manifest)."""
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
        """Key under which the plan is stored."""
        return StageKey.of(self.key, "plan")

    def shard_key(self, stage: str, shard: int) -> StageKey:
        """Return the key under which a stage stores its result for one shard, for example `it-0003/scoring/0001`."""
        return StageKey.of(self.key, stage, shard)

    def rollout_key(self, shard: int) -> StageKey:
        """Return the key under which the rollouts of one shard are stored. A batch that scores stored rollouts again
        has no rollouts, so the key of the run's rollouts is returned."""
        return self.shard_key("rollout", shard).without_prefix


class Batch:
    """Batch with access to the results that its stages have stored so far.

    This is a plain class, because Prefect would traverse a dataclass or model that a task receives, row by row.
    """

    def __init__(self, run: Run, plan: BatchPlan) -> None:
        self.run, self.plan = run, plan

    @classmethod
    def read(cls, run: Run, key: str) -> Self:
        """Read the plan of the batch with this key, such as `it-0003`, and return the batch. Raises Damaged if there is
        no plan."""
        return cls(run, BatchPlan.read(run.require(StageKey.of(key, "plan"))))

    @property
    def key(self) -> str:
        """Prefix of the keys under which results of the batch are stored."""
        return self.plan.key

    @property
    def shards(self) -> range:
        """Numbers of the batch's shards."""
        return range(self.plan.num_shards)

    @property
    def plan_manifest(self) -> Manifest:
        """Stored record (manifest) of the batch's plan."""
        return self.run.require(self.plan.plan_key)

    @property
    def policy(self) -> Manifest:
        """Stored record (manifest) of the policy that generates the completions."""
        return self.run.require(self.plan.policy)

    @property
    def prompts(self) -> Manifest:
        """Stored record (manifest) of the prompts from which the plan selects rows."""
        return self.run.require(PROMPTS[self.plan.split])

    @property
    def media(self) -> tuple[ShardRef, ...]:
        """Shards with the images in the prompts. Empty for prompts without images."""
        return self.prompts.shards[1:]

    @property
    def rollout_manifests(self) -> list[Manifest]:
        """Stored records of the batch's rollouts, one per shard. Raises Damaged if rollouts of a shard are missing."""
        return [self.run.require(self.plan.rollout_key(shard)) for shard in self.shards]

    def stage_manifests(self, stage: str) -> list[Manifest]:
        """Return the stored results of one stage, such as "scoring", one manifest per shard. Raises Damaged if the
        result of a shard is missing."""
        return [self.run.require(self.plan.shard_key(stage, shard)) for shard in self.shards]

    @property
    def is_replayed(self) -> bool:
        """Whether the batch belongs to an iteration of a what-if run that uses stored rollouts of another run."""
        return self.plan.split == "train" and self.run.replays(self.plan.number)

    def partial_rollouts(self, shard: int) -> Manifest | None:
        """Return the rollouts of the previous iteration whose partial completions a shard continues, or None if the
        shard starts with new prompts."""
        carried = self.plan.carried[shard : shard + 1]
        return self.run.require(carried[0]) if carried else None

    def as_rescoring(self, prefix: str) -> Self:
        """Return the same batch for scoring its rollouts again. New results are stored under keys that start with
        `prefix`."""
        return type(self)(self.run, self.plan.model_copy(update={"key": f"{prefix}{self.key}", "rescoring": prefix}))


def rollouts_of(run: Run, number: int) -> list[Manifest]:
    """Return the stored records of all rollouts that an iteration has so far."""
    return rollouts_of_batch(run, iteration_key(number))


def rollouts_of_batch(run: Run, key: str) -> list[Manifest]:
    """Return the stored records of all rollouts of an iteration or evaluation. `key` is for example `it-0003`."""
    manifests = run.manifests(f"{key}/")
    return [manifest for manifest in manifests if StageKey.parse(manifest.key).stage == "rollout"]


def iterations_without_rollouts(run: Run, numbers: Iterable[int]) -> set[int]:
    """Return the iterations among `numbers` whose rollouts were deleted. Sends a single request to the store."""
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
            f"run {run.name!r}: the rollouts of iteration {number} were deleted by {stone.why} ({stone.who}). Choose "
            "a newer iteration."
        )
