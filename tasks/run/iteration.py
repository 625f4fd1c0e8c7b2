"""Stored state of one iteration: its batches, the results of its stages, and what it takes over from the iteration
before.

The seal of an iteration (its last manifest) records the state that the next iteration starts from. So the next
iteration depends only on the store.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Self

from pydantic import ConfigDict, Field, JsonValue

from rheostat.infra.config import Settings, encode_recorded, read_recorded
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import ShardRef
from rheostat.models.config.rollout import DynamicSampling, RolloutConfig
from rheostat.models.data.curriculum import Cursor, DynamicSamplingState, Part, give_back, read_parts
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import ScoredShard
from rheostat.tasks.run.batch import Batch, picture_shards_of
from rheostat.tasks.run.keys import PROMPTS, StageKey, iteration_key
from rheostat.tasks.run.references import recorded_rule, reference_of, select_reference
from rheostat.tasks.run.reverts import critic_after, policy_after, policy_key


class LeftoverGroups(Settings):
    """Groups of completions that an iteration did not need and leaves to the next one. They are scored and have unequal
    rewards. All are from one shard."""

    rollouts: str
    """Key under which the rollouts of the groups are stored."""
    scores: str
    """Key under which the scores of the groups are stored."""
    rows: tuple[int, ...]
    """Row numbers of the groups' prompts."""


class PartialGroups(Settings):
    """Groups of one rollout shard with completions that were stopped early and continue in the next iteration."""

    rollouts: str
    """Key under which the rollouts are stored. The second shard there contains the groups."""
    rows: tuple[int, ...]
    """Row numbers of the groups' prompts."""


class CarryOver(Settings):
    """State that an iteration leaves to the next one: the position in the prompts, and groups to use or to continue.

    Seals store the group fields under their aliases.
    """

    model_config = ConfigDict(populate_by_name=True)

    cursor: Cursor = Cursor()
    """Position in the stream of training prompts."""
    sampling: DynamicSamplingState | None = None
    """State of dynamic sampling (recent fraction of informative groups), or None if dynamic sampling is off."""
    leftover_groups: tuple[LeftoverGroups, ...] = Field(default=(), alias="kept")
    """Scored groups with unequal rewards that were not needed. The next iteration uses them."""
    partial_groups: tuple[PartialGroups, ...] = Field(default=(), alias="carried")
    """Groups with partial completions. The next iteration continues them."""

    @property
    def num_leftover(self) -> int:
        """Number of groups that are scored already and only have to be used."""
        return sum(len(groups.rows) for groups in self.leftover_groups)

    @property
    def num_partial(self) -> int:
        """Number of groups whose completions have to be continued."""
        return sum(len(groups.rows) for groups in self.partial_groups)

    def rows(self) -> list[int]:
        """Return the row numbers of the prompts for which the next iteration already has groups, so that it does not
        plan them again."""
        rows = [groups.rows for groups in self.leftover_groups] + [groups.rows for groups in self.partial_groups]
        return [row for group_rows in rows for row in group_rows]

    def detail(self) -> dict[str, JsonValue]:
        """Return the state as JSON to be stored in the last record (seal) of an iteration, from which
        `carry_over_before` reads it."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"cursor"}) | {
            "cursor": encode_recorded(self.cursor.model_dump(mode="json"), self.cursor)
        }


def carry_over_before(run: Run, number: int) -> CarryOver:
    """Return the state that iteration `number` starts from, read from the seal (last manifest) of the previous
    iteration."""
    sealed = run.find(StageKey.of(iteration_key(number - 1), "seal")) if number > 1 else None
    if sealed is None:
        return CarryOver()
    names = {field.alias or name for name, field in CarryOver.model_fields.items()}
    return CarryOver.model_validate({name: value for name, value in sealed.detail.items() if name in names})


def partial_prompt_rows(rollouts: Manifest) -> tuple[int, ...]:
    """Return the row numbers of the prompts that have partial completions in these stored rollouts."""
    rows = rollouts.detail["carried_rows"]
    assert isinstance(rows, list)
    return tuple(int(str(row)) for row in rows)


class SurplusGroups(Settings):
    """Groups of one shard that the credit stage did not need, because the target number of informative groups was
    reached."""

    shard: int
    """Index of the shard among all shards that the credit stage read."""
    rows: tuple[int, ...]
    """Row numbers of the groups' prompts."""


def surplus_groups(credit: Manifest) -> list[SurplusGroups]:
    """Return the groups that the credit stage did not need, as recorded in its result."""
    recorded = credit.detail.get("surplus", [])
    assert isinstance(recorded, list)
    return [SurplusGroups.model_validate(groups) for groups in recorded]


@dataclass(frozen=True, slots=True)
class ScoredRollouts:
    """Rollouts and scores that the credit stage of an iteration reads. Both tuples have the same length, with one pair
    for each shard."""

    rollouts: tuple[Manifest, ...]
    scores: tuple[Manifest, ...]
    rows: tuple[tuple[int, ...] | None, ...]
    """Row numbers of the prompts to use in each pair, or None to use all prompts."""

    @property
    def shards(self) -> tuple[ScoredShard, ...]:
        """Data of the pairs: references to the rollout shard and the score shard of each pair."""
        return tuple(
            ScoredShard(rollouts=rollouts.shards[0], scores=scores.shards[0], rows=rows)
            for rollouts, scores, rows in zip(self.rollouts, self.scores, self.rows, strict=True)
        )

    @property
    def manifests(self) -> list[Manifest]:
        """Stored records of the pairs as one list: rollouts, scores, rollouts, scores and so on."""
        return [manifest for pair in zip(self.rollouts, self.scores, strict=True) for manifest in pair]


class Iteration:
    """Access to everything that is stored about one iteration: the state it starts from, its batches, the results of
    its stages, and the state it leaves to the next iteration.

    Reading a result that is not stored yet raises Damaged. This is a plain class, because Prefect would traverse a
    dataclass or model that a task receives.
    """

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self._batches: list[Batch] = []

    @property
    def key(self) -> str:
        """Prefix of the keys under which the iteration's results are stored, for example `it-0003`."""
        return iteration_key(self.number)

    @property
    def previous(self) -> Self:
        """Previous iteration."""
        return type(self)(self.run, self.number - 1)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """Batches that have been planned so far, in order."""
        while self.run.find(StageKey.of(key := iteration_key(self.number, len(self._batches) + 1), "plan")) is not None:
            self._batches.append(Batch.read(self.run, key))
        return tuple(self._batches)

    @cached_property
    def start_state(self) -> CarryOver:
        """State that the iteration starts from. It is read from the last record (seal) of the previous iteration, or
        computed if that record is not written yet.

        With `rollout.staleness`, the previous iteration may not be generated yet. No groups are taken over in this
        case.
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
    def end_state(self) -> CarryOver:
        """State that the next iteration starts from, read from this iteration's seal (last manifest)."""
        return carry_over_before(self.run, self.number + 1)

    @property
    def prompts(self) -> Manifest:
        """Stored record of all training prompts."""
        return self.run.require(PROMPTS["train"])

    @property
    def data_parts(self) -> tuple[Part, ...]:
        """Sources of the training prompts with their sampling weights. Empty if the data has only one source."""
        return read_parts(self.prompts.detail)

    @property
    def media(self) -> tuple[ShardRef, ...]:
        """Shards with the images in the prompts and, for image policies, the images that the policy generated."""
        picture_shards = (
            (picture_shards_of(manifest) for manifest in self.scored_rollouts().rollouts)
            if self.rollout.denoising
            else ()
        )
        return (*self.prompts.shards[1:], *chain.from_iterable(picture_shards))

    @property
    def reference(self) -> Manifest:
        """Stored record that names the reference model of the KL penalty: the initial policy, the policy of the last
        reset, or the update that computed the moving average."""
        return reference_of(self.run, self.number)

    @property
    def reference_model(self) -> ModelVersion:
        """Reference model of the KL penalty."""
        return select_reference(self.reference, recorded_rule(self.run, self.number))

    @property
    def update_parents(self) -> list[Manifest]:
        """Stored records from which the update is computed: the policy, the training samples, and the reference if it
        is another policy and not the initial one."""
        parents, reference = [self.policy, self.credit], self.reference
        is_reset = reference.key not in {self.policy.key, StageKey.policy(0)}
        return [*parents, reference] if is_reset else parents

    @property
    def generating_policy_key(self) -> StageKey:
        """Key of the stored policy that generates the completions of this iteration. It is older than `policy` if
        staleness is allowed."""
        return policy_key(self.run, max(0, self.number - 1 - self.rollout.staleness))

    @property
    def policy(self) -> Manifest:
        """Stored record of the policy that this iteration trains. Without staleness, the same policy generates the
        completions."""
        return policy_after(self.run, self.number - 1)

    @property
    def critic(self) -> Manifest:
        """Stored record of the critic that was trained together with `policy`."""
        return critic_after(self.run, self.number - 1)

    @property
    def credit(self) -> Manifest:
        """Stored record of the training samples (completions with advantages)."""
        return self.stage_manifest("credit")

    @property
    def update(self) -> Manifest:
        """Stored record of the policy that this iteration's update trained."""
        return self.stage_manifest("update")

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the credit and update stages, by names such as `update/kl`."""
        manifests = {"credit": self.credit, "update": self.update}
        return {f"{stage}/{name}": value for stage, each in manifests.items() for name, value in each.metrics.items()}

    @property
    def surplus_groups(self) -> list[SurplusGroups]:
        """Groups that the credit stage did not need for this iteration."""
        return surplus_groups(self.credit)

    @cached_property
    def rollout(self) -> RolloutConfig:
        """Recorded rollout settings with which the iteration was computed."""
        return read_recorded(RolloutConfig, self.run.config_at(self.number)["rollout"])

    @property
    def seed(self) -> int:
        """Root seed of the run."""
        seed = self.run.record.config["seed"]
        assert isinstance(seed, int)
        return seed

    def stage_key(self, stage: str) -> StageKey:
        """Return the key of a stage that runs once per iteration, for example `it-0003/credit`."""
        return StageKey.of(self.key, stage)

    def stage_manifest(self, stage: str) -> Manifest:
        """Return the stored result of a stage that runs once per iteration. Raises Damaged if the stage is not
        finished."""
        return self.run.require(self.stage_key(stage))

    def shard_manifests(self, stage: str) -> list[Manifest]:
        """Return the stored results of a stage that runs once per shard, such as "scoring". They are ordered by batch
        and shard."""
        return [manifest for batch in self.batches for manifest in batch.stage_manifests(stage)]

    def shards(self) -> Iterator[tuple[Batch, int]]:
        """Yield (batch, shard number) for every shard of the iteration, in order."""
        return ((batch, shard) for batch in self.batches for shard in batch.shards)

    def scored_rollouts(self, *, prefix: str = "") -> ScoredRollouts:
        """Return all rollouts and scores that the credit stage reads: groups left over from the previous iteration,
        then new groups. `prefix` selects the scores of a rescoring."""
        surplus, plans = self.start_state.leftover_groups, [batch.plan for batch in self.batches]
        keys = [(StageKey.parse(groups.rollouts), StageKey.parse(groups.scores)) for groups in surplus]
        keys += [(plan.rollout_key(n), plan.shard_key("scoring", n)) for plan in plans for n in range(plan.num_shards)]
        return ScoredRollouts(
            rollouts=tuple(self.run.require(rollouts) for rollouts, _ in keys),
            scores=tuple(self.run.require(scores.with_prefix(prefix)) for _, scores in keys),
            rows=(*(groups.rows for groups in surplus), *(None for _ in keys[len(surplus) :])),
        )


def carry_over_after(iteration: Iteration, dynamic: DynamicSampling | None) -> CarryOver:
    """Compute the state that an iteration leaves to the next one. A group is left over only once. If it is not needed
    again, its prompt returns to the stream of prompts."""
    before, rollouts, scores = (
        iteration.start_state,
        iteration.shard_manifests("rollout"),
        iteration.shard_manifests("scoring"),
    )
    cursor, cut_manifests = (
        iteration.batches[-1].plan.cursor,
        [each for each in rollouts if "carried_rows" in each.detail],
    )
    assert cursor is not None, "an iteration's batches have a cursor"
    leftover: list[LeftoverGroups] = []
    returned_rows: list[int] = []
    for groups in iteration.surplus_groups:
        # credit reads the surplus groups of the previous iteration first
        new = groups.shard - len(before.leftover_groups)
        if dynamic is not None and dynamic.surplus == "keep" and new >= 0:
            leftover.append(LeftoverGroups(rollouts=rollouts[new].key, scores=scores[new].key, rows=groups.rows))
        else:
            returned_rows += groups.rows
    sampling = None
    if dynamic is not None:
        num_issued = sum(int(manifest.metrics["groups"]) for manifest in rollouts)
        informative = sum(int(manifest.metrics["informative_groups"]) for manifest in scores)
        sampling = (before.sampling or DynamicSamplingState()).after(num_issued, informative)
    return CarryOver(
        cursor=give_back(cursor, returned_rows),
        sampling=sampling,
        leftover_groups=tuple(leftover),
        partial_groups=tuple(
            PartialGroups(rollouts=manifest.key, rows=partial_prompt_rows(manifest)) for manifest in cut_manifests
        ),
    )
