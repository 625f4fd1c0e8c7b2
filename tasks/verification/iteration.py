"""What the store says of one sealed iteration, gathered so that its promises can be checked."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.config.rollout import RolloutConfig
from tasks.run.batch import BatchPlan, waves_of
from tasks.run.carry_over import CarryOver, LeftoverGroups, carry_over_before, leftover_groups_of
from tasks.run.keys import PROMPTS, StageKey, iteration_key


@dataclass(frozen=True)
class Evidence:
    """One sealed iteration: its plans, its manifests, and what it took over and left."""

    run: Run
    number: int
    waves: tuple[BatchPlan, ...]
    before: CarryOver
    after: CarryOver

    @property
    def key(self) -> str:
        """Prefix of the iteration's manifests."""
        return iteration_key(self.number)

    @cached_property
    def rollout(self) -> RolloutConfig:
        """How the run generates."""
        return RolloutConfig.model_validate(self.run.record.config["rollout"])

    @property
    def seed(self) -> int:
        """Root of the run's random choices."""
        seed = self.run.record.config["seed"]
        assert isinstance(seed, int)
        return seed

    @property
    def num_prompts(self) -> int:
        """Prompts that there are to learn from."""
        return self.run.require(PROMPTS["train"]).shards[0].rows

    @cached_property
    def credit(self) -> Manifest:
        """What committed the training samples."""
        return self.run.require(StageKey.of(iteration_key(self.number), "credit"))

    @cached_property
    def update(self) -> Manifest:
        """What committed the policy that was learnt."""
        return self.run.require(StageKey.policy(self.number))

    def stage(self, stage: str) -> list[Manifest]:
        """Manifests of one stage, over all batches, in order."""
        return [self.run.require(wave.shard_key(stage, shard)) for wave, shard in self.shards()]

    def shards(self) -> Iterator[tuple[BatchPlan, int]]:
        """Every shard of every batch, in order."""
        for wave in self.waves:
            for shard in range(wave.num_shards):
                yield wave, shard

    @cached_property
    def surplus(self) -> list[LeftoverGroups]:
        """Informative groups beyond the target, as credit found them."""
        return leftover_groups_of(self.credit)


def gather(run: Run, number: int) -> Evidence:
    """Collect what the store says of a sealed iteration; raises Damaged where a manifest is missing."""
    return Evidence(
        run=run,
        number=number,
        waves=tuple(waves_of(run, number)),
        before=carry_over_before(run, number),
        after=carry_over_before(run, number + 1),
    )
