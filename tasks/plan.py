"""A batch: an iteration's prompts, or an evaluation's. Committed first, so that every controller reads the same."""

from typing import Literal, Self

from infra.config import Settings
from infra.manifests import Manifest
from models.config import SamplingConfig
from placement.allocation import cut


class BatchPlan(Settings):
    """The prompts of one batch and how they are cut into shards."""

    key: str
    """`it-0003` or `eval-0010`: the prefix of its manifests."""
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

    @classmethod
    def read(cls, manifest: Manifest) -> Self:
        """The plan that a manifest carries."""
        return cls.model_validate(manifest.detail)

    @property
    def shards(self) -> tuple[range, ...]:
        """Positions in `rows` of each shard's prompts."""
        return cut(len(self.rows), shard_prompts=self.shard_prompts)

    def shard_rows(self, shard: int) -> tuple[int, ...]:
        """Rows of one shard's prompts."""
        return tuple(self.rows[position] for position in self.shards[shard])

    def shard_key(self, stage: str, shard: int) -> str:
        """Key of the manifest that commits one shard of a stage."""
        return f"{self.key}/{stage}/{shard:04d}"


def plan_key(batch: str) -> str:
    """Key of a batch's plan."""
    return f"{batch}/plan"


def iteration_key(number: int) -> str:
    """Prefix of an iteration's manifests; iterations count from 1."""
    return f"it-{number:04d}"


def evaluation_key(number: int) -> str:
    """Prefix of the manifests of the evaluation after `number` iterations."""
    return f"eval-{number:04d}"


def policy_key(number: int) -> str:
    """Key of the manifest that committed the policy after `number` iterations."""
    return f"{iteration_key(number)}/update" if number else "policy/initial"
