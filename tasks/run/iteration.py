"""One iteration as the store knows it: the flow hands it to every stage, and who verifies a run asks the same.

What it leaves to the next stands in its seal, so the next one follows from the store alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Self

from pydantic import ConfigDict, Field, JsonValue

from infra.config import Settings, read_recorded
from infra.store.manifests import Manifest
from infra.store.runs import Run
from infra.store.shards import ShardRef
from models.config.rollout import DynamicSampling, RolloutConfig
from models.data.curriculum import Cursor, DynamicSamplingState, Part, give_back, parts_of
from models.records.work import ScoredShard
from tasks.run.batch import Batch, pictures_of
from tasks.run.keys import PROMPTS, StageKey, iteration_key
from tasks.run.returns import critic_after, policy_after, policy_key


class LeftoverGroups(Settings):
    """Informative groups of one scored shard that wait for the next iteration's credit."""

    rollouts: str
    """Key of the manifest of their rollouts."""
    scores: str
    """Key of the manifest of their scores."""
    rows: tuple[int, ...]
    """Their prompts."""


class PartialGroups(Settings):
    """Groups of one rollout shard that were cut and go on in the next iteration."""

    rollouts: str
    """Key of the manifest whose second shard holds them."""
    rows: tuple[int, ...]
    """Their prompts."""


class CarryOver(Settings):
    """What the next iteration begins with; seals call groups by the aliases."""

    model_config = ConfigDict(populate_by_name=True)

    cursor: Cursor = Cursor()
    """Where the stream of prompts stands."""
    sampling: DynamicSamplingState | None = None
    """State of dynamic sampling."""
    leftover_groups: tuple[LeftoverGroups, ...] = Field(default=(), alias="kept")
    """Those beyond the target."""
    partial_groups: tuple[PartialGroups, ...] = Field(default=(), alias="carried")
    """Those that were cut."""

    @property
    def num_leftover(self) -> int:
        """Prompts whose groups credit has already."""
        return sum(len(groups.rows) for groups in self.leftover_groups)

    @property
    def num_partial(self) -> int:
        """Prompts whose groups go on."""
        return sum(len(groups.rows) for groups in self.partial_groups)

    def rows(self) -> list[int]:
        """Prompts that the next iteration has already."""
        rows = [groups.rows for groups in self.leftover_groups] + [groups.rows for groups in self.partial_groups]
        return [row for some in rows for row in some]

    def detail(self) -> dict[str, JsonValue]:
        """The part of a seal's detail that carries it."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"cursor"}) | {
            "cursor": self.cursor.model_dump(mode="json")
        }


def carry_over_before(run: Run, number: int) -> CarryOver:
    """What iteration `number` begins with."""
    sealed = run.find(StageKey.of(iteration_key(number - 1), "seal")) if number > 1 else None
    if sealed is None:
        return CarryOver()
    names = {field.alias or name for name, field in CarryOver.model_fields.items()}
    return CarryOver.model_validate({name: value for name, value in sealed.detail.items() if name in names})


def partial_rows(rollouts: Manifest) -> tuple[int, ...]:
    """Prompts of the groups that a rollout shard cut."""
    rows = rollouts.detail["carried_rows"]
    assert isinstance(rows, list)
    return tuple(int(str(row)) for row in rows)


class SurplusGroups(Settings):
    """Informative groups of one scored shard beyond an iteration's target."""

    shard: int
    """Index among all that credit looked at."""
    rows: tuple[int, ...]
    """Their prompts."""


def surplus_groups(credit: Manifest) -> list[SurplusGroups]:
    """Informative groups beyond the target, as credit found them."""
    found = credit.detail.get("surplus", [])
    assert isinstance(found, list)
    return [SurplusGroups.model_validate(groups) for groups in found]


@dataclass(frozen=True, slots=True)
class ScoredRollouts:
    """Rollouts with their scores, pair by pair, as an iteration's credit looks at them."""

    rollouts: tuple[Manifest, ...]
    scores: tuple[Manifest, ...]
    rows: tuple[tuple[int, ...] | None, ...]
    """Prompt rows that count; none means all."""

    @property
    def shards(self) -> tuple[ScoredShard, ...]:
        """The pairs by reference."""
        return tuple(
            ScoredShard(rollouts=rollouts.shards[0], scores=scores.shards[0], rows=rows)
            for rollouts, scores, rows in zip(self.rollouts, self.scores, self.rows, strict=True)
        )

    @property
    def manifests(self) -> list[Manifest]:
        """Rollouts and scores in turns."""
        return [manifest for pair in zip(self.rollouts, self.scores, strict=True) for manifest in pair]


class Iteration:
    """What an iteration took over, its batches as far as they are planned, what its stages made, what it leaves.

    What is not committed yet raises Damaged. To Prefect, which walks through records, it is one object.
    """

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self._batches: list[Batch] = []

    @property
    def key(self) -> str:
        """Prefix of its manifests."""
        return iteration_key(self.number)

    @property
    def previous(self) -> Self:
        """The iteration before."""
        return type(self)(self.run, self.number - 1)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Those that have been planned so far, in order."""
        while self.run.find(StageKey.of(key := iteration_key(self.number, len(self._batches) + 1), "plan")) is not None:
            self._batches.append(Batch.read(self.run, key))
        return tuple(self._batches)

    @cached_property
    def before(self) -> CarryOver:
        """What it began with: what the seal before says, or what it will say.

        With stale rollouts the iteration before may not be generated yet, and leaves no groups.
        """
        if self.number == 1:
            return CarryOver()
        if self.rollout.staleness:
            cursor = self.previous.batches[-1].plan.cursor
            assert cursor is not None, "an iteration's batches have a cursor"
            return CarryOver(cursor=cursor)
        if self.run.has(self.previous.stage_key("seal")):
            return carry_over_before(self.run, self.number)
        return carry_over_after(self.previous, self.rollout.dynamic)

    @property
    def after(self) -> CarryOver:
        """What its seal leaves to the next."""
        return carry_over_before(self.run, self.number + 1)

    @property
    def prompts(self) -> Manifest:
        """All prompts that there are to learn from."""
        return self.run.require(PROMPTS["train"])

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of these prompts that are drawn from by weight; none where all are one."""
        return parts_of(self.prompts.detail)

    @property
    def media(self) -> tuple[ShardRef, ...]:
        """Shards with the prompts' images, and with those that the policy drew."""
        drawn = (pictures_of(manifest) for manifest in self.scored().rollouts) if self.rollout.denoising else ()
        return (*self.prompts.shards[1:], *chain.from_iterable(drawn))

    @property
    def first_policy(self) -> Manifest:
        """The policy that the run began with, which others are compared with."""
        return self.run.require(StageKey.policy(0))

    @property
    def behaviour(self) -> StageKey:
        """Key of the policy that generates here."""
        return policy_key(self.run, max(0, self.number - 1 - self.rollout.staleness))

    @property
    def policy(self) -> Manifest:
        """The policy that learns here; without staleness it generates too."""
        return policy_after(self.run, self.number - 1)

    @property
    def critic(self) -> Manifest:
        """The critic beside it."""
        return critic_after(self.run, self.number - 1)

    @property
    def credit(self) -> Manifest:
        """The training samples."""
        return self.made("credit")

    @property
    def update(self) -> Manifest:
        """The policy that was learnt."""
        return self.made("update")

    @property
    def measured(self) -> dict[str, float]:
        """What credit and the update measured, as the seal names it."""
        made = {"credit": self.credit, "update": self.update}
        return {f"{stage}/{name}": value for stage, each in made.items() for name, value in each.metrics.items()}

    @property
    def surplus(self) -> list[SurplusGroups]:
        """Informative groups beyond the target, as credit found them."""
        return surplus_groups(self.credit)

    @cached_property
    def rollout(self) -> RolloutConfig:
        """How the run was made to generate."""
        return read_recorded(RolloutConfig, self.run.record.config["rollout"])

    @property
    def seed(self) -> int:
        """Root of the run's random choices."""
        seed = self.run.record.config["seed"]
        assert isinstance(seed, int)
        return seed

    def stage_key(self, stage: str) -> StageKey:
        """Key of what a stage makes of the iteration as a whole."""
        return StageKey.of(self.key, stage)

    def made(self, stage: str) -> Manifest:
        """What a stage made of the iteration as a whole."""
        return self.run.require(self.stage_key(stage))

    def stage(self, stage: str) -> list[Manifest]:
        """What a stage made of each shard of each batch, in order."""
        return [manifest for batch in self.batches for manifest in batch.stage(stage)]

    def shards(self) -> Iterator[tuple[Batch, int]]:
        """Every shard of every batch, in order."""
        return ((batch, shard) for batch in self.batches for shard in batch.shards)

    def scored(self, *, prefix: str = "") -> ScoredRollouts:
        """All that credit looks at: groups left over before, then its own; a re-scoring's prefix takes its scores."""
        left, own = self.before.leftover_groups, [batch.plan for batch in self.batches]
        keys = [(StageKey.parse(groups.rollouts), StageKey.parse(groups.scores)) for groups in left]
        keys += [(plan.rollout_key(n), plan.shard_key("scoring", n)) for plan in own for n in range(plan.num_shards)]
        return ScoredRollouts(
            rollouts=tuple(self.run.require(rollouts) for rollouts, _ in keys),
            scores=tuple(self.run.require(scores.below(prefix)) for _, scores in keys),
            rows=(*(groups.rows for groups in left), *(None for _ in keys[len(left) :])),
        )


def carry_over_after(iteration: Iteration, dynamic: DynamicSampling | None) -> CarryOver:
    """What an iteration leaves; groups that were left over once are not kept again."""
    before, rollouts, scores = iteration.before, iteration.stage("rollout"), iteration.stage("scoring")
    cursor, cut = iteration.batches[-1].plan.cursor, [made for made in rollouts if "carried_rows" in made.detail]
    assert cursor is not None, "an iteration's batches have a cursor"
    leftover: list[LeftoverGroups] = []
    returned: list[int] = []
    for groups in iteration.surplus:
        new = groups.shard - len(before.leftover_groups)  # credit looks at the groups left over before first
        if dynamic is not None and dynamic.surplus == "keep" and new >= 0:
            leftover.append(LeftoverGroups(rollouts=rollouts[new].key, scores=scores[new].key, rows=groups.rows))
        else:
            returned += groups.rows
    sampling = None
    if dynamic is not None:
        issued = sum(int(manifest.metrics["groups"]) for manifest in rollouts)
        informative = sum(int(manifest.metrics["informative_groups"]) for manifest in scores)
        sampling = (before.sampling or DynamicSamplingState()).after(issued, informative)
    return CarryOver(
        cursor=give_back(cursor, returned),
        sampling=sampling,
        leftover_groups=tuple(leftover),
        partial_groups=tuple(PartialGroups(rollouts=manifest.key, rows=partial_rows(manifest)) for manifest in cut),
    )
