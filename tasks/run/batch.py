"""A batch: an iteration's prompts, or an evaluation's, cut into shards, of which each controller owns a slice.

Committed first, so that every controller reads the same.
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


def cut(num_prompts: int, *, shard_prompts: int) -> tuple[range, ...]:
    """Positions of each shard's prompts. Shards do not depend on the number of controllers or workers.

    >>> cut(5, shard_prompts=2)
    (range(0, 2), range(2, 4), range(4, 5))
    """
    num_shards = ceil(num_prompts / shard_prompts)
    return tuple(range(i * shard_prompts, min((i + 1) * shard_prompts, num_prompts)) for i in range(num_shards))


def slice_shards(shards: Sequence[int], *, controllers: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous slices of nearly equal size, at most one per controller, none empty.

    >>> slice_shards([0, 1, 2], controllers=2)
    ((0, 1), (2,))
    """
    owners = min(controllers, len(shards))
    bounds = [len(shards) * owner // owners for owner in range(owners + 1)] if owners else [0]
    # Ceil-first keeps the larger slices with the first controllers.
    sizes = sorted((stop - start for start, stop in pairwise(bounds)), reverse=True)
    slices, start = [], 0
    for size in sizes:
        slices.append(tuple(shards[start : start + size]))
        start += size
    return tuple(slices)


def pictures_of(rollouts: Manifest) -> tuple[ShardRef, ...]:
    """Shards with the pictures of a shard of rollouts; behind those of text there are groups that go on, if any."""
    return () if "carried_rows" in rollouts.detail else rollouts.shards[1:]


def completions_of(rollouts: Manifest) -> tuple[ShardRef, ...]:
    """Shards with the completions of a shard of rollouts: those that ended, then groups that go on, if any."""
    return rollouts.shards[: len(rollouts.shards) - len(pictures_of(rollouts))]


class BatchPlan(Settings):
    """The prompts of one batch and how they are cut into shards."""

    key: str
    """`it-0003`, `it-0003/wave-2` or `eval-0010`: the prefix of its manifests."""
    number: int
    """Iteration, or the number of iterations after which the policy is evaluated."""
    split: Literal["train", "heldout"]
    """Which prompts shard the rows are of."""
    rows: tuple[int, ...]
    """Rows of the prompts, in order."""
    group_size: int
    """Completions per prompt."""
    shard_prompts: int
    """Prompts per shard."""
    sampling: SamplingConfig
    """How completions are drawn."""
    policy: str
    """Key of the manifest that committed the policy."""
    wave: int = 1
    """Number among the batches of its iteration; there is more than one where sampling is dynamic."""
    carried: tuple[str, ...] = ()
    """Rollout manifests of the iteration before whose cut groups go on here: the first shards, one each."""
    cursor: Cursor | None = None
    """Where the stream of prompts stands after this batch; none for evaluations."""
    rescoring: str = ""
    """`rescore/strict/` where stored rollouts are scored again: a prefix of `key`, and of their judges' models."""

    @classmethod
    def read(cls, manifest: Manifest) -> Self:
        """The plan that a manifest carries."""
        return read_recorded(cls, manifest.detail)

    @property
    def num_shards(self) -> int:
        """Shards of the batch, those of carried groups first."""
        return len(self.carried) + len(self._fresh)

    def shard_rows(self, shard: int) -> tuple[int, ...]:
        """Rows of one shard's new prompts; none where it only continues carried groups."""
        fresh = shard - len(self.carried)
        return tuple(self.rows[position] for position in self._fresh[fresh]) if fresh >= 0 else ()

    @property
    def _fresh(self) -> tuple[range, ...]:
        return cut(len(self.rows), shard_prompts=self.shard_prompts)

    @property
    def plan_key(self) -> StageKey:
        """Key of the manifest that carries the plan."""
        return StageKey.of(self.key, "plan")

    def shard_key(self, stage: str, shard: int) -> StageKey:
        """Key of the manifest that commits one shard of a stage."""
        return StageKey.of(self.key, stage, shard)

    def rollout_key(self, shard: int) -> StageKey:
        """Key of the manifest that committed the rollouts of one shard."""
        return self.shard_key("rollout", shard).stored


class Batch:
    """A planned batch and what its stages have committed.

    Tasks hand it on: to Prefect, which walks through records row by row, it is one object.
    """

    def __init__(self, run: Run, plan: BatchPlan) -> None:
        self.run, self.plan = run, plan

    @classmethod
    def read(cls, run: Run, key: str) -> Self:
        """The batch of that key, such as `it-0003`. Raises Damaged if it has no plan."""
        return cls(run, BatchPlan.read(run.require(StageKey.of(key, "plan"))))

    @property
    def key(self) -> str:
        """Prefix of its manifests."""
        return self.plan.key

    @property
    def shards(self) -> range:
        """Numbers of its shards."""
        return range(self.plan.num_shards)

    @property
    def planned(self) -> Manifest:
        """What committed its plan."""
        return self.run.require(self.plan.plan_key)

    @property
    def policy(self) -> Manifest:
        """The policy that generates."""
        return self.run.require(self.plan.policy)

    @property
    def prompts(self) -> Manifest:
        """The prompts that its rows are of."""
        return self.run.require(PROMPTS[self.plan.split])

    @property
    def media(self) -> tuple[ShardRef, ...]:
        """Shards with the prompts' images."""
        return self.prompts.shards[1:]

    @property
    def rollouts(self) -> list[Manifest]:
        """Its rollouts, shard by shard."""
        return [self.run.require(self.plan.rollout_key(shard)) for shard in self.shards]

    def stage(self, stage: str) -> list[Manifest]:
        """What another stage made of them, shard by shard."""
        return [self.run.require(self.plan.shard_key(stage, shard)) for shard in self.shards]

    def continued(self, shard: int) -> Manifest | None:
        """The rollouts of the iteration before whose cut groups go on in a shard."""
        carried = self.plan.carried[shard : shard + 1]
        return self.run.require(carried[0]) if carried else None

    def again(self, prefix: str) -> Self:
        """The same rollouts, to be scored again under the keys of a re-scoring."""
        return type(self)(self.run, self.plan.model_copy(update={"key": f"{prefix}{self.key}", "rescoring": prefix}))


def rollouts_of(run: Run, number: int) -> list[Manifest]:
    """Manifests of an iteration's rollouts that have been committed so far, of all its batches."""
    return rollouts_under(run, iteration_key(number))


def rollouts_under(run: Run, key: str) -> list[Manifest]:
    """Manifests of the rollouts of an iteration or evaluation, by its key."""
    made = run.manifests(f"{key}/")
    return [manifest for manifest in made if StageKey.parse(manifest.key).stage == "rollout"]


def without_rollouts(run: Run, numbers: Iterable[int]) -> set[int]:
    """Those of some iterations whose rollouts were deleted; one look at the store."""
    gone = deleted_parts(run)
    return {number for number in numbers if WHOLE_RUN in gone or iteration_key(number) in gone}


def with_rollouts(run: Run, numbers: Iterable[int]) -> list[int]:
    """The others, of which there is at least one. Raises BadInput if there is none."""
    numbers = list(numbers)
    gone = without_rollouts(run, numbers)
    check_rollouts_kept(run, numbers if len(gone) == len(numbers) else ())
    return [number for number in numbers if number not in gone]


def check_rollouts_kept(run: Run, numbers: Iterable[int]) -> None:
    """Raise BadInput if the rollouts of one of these iterations were deleted."""
    for number in sorted(without_rollouts(run, numbers))[:1]:
        stone = find_tombstone(run, iteration_key(number))
        assert stone is not None, "a part that was deleted has a tombstone"
        raise BadInput(
            f"run {run.name!r}: the rollouts of iteration {number} were deleted by {stone.why} ({stone.who})"
        )
