"""A batch: an iteration's prompts, or an evaluation's. Committed first, so that every controller reads the same."""

from typing import Literal, Self

from infra.config import Settings
from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.config.engines import SamplingConfig
from models.data.curriculum import Cursor
from placement.shards import cut

BASE, SFT, DPO = "policy/base", "policy/sft", "policy/dpo"
"""Keys of the manifests that committed the policy before, and after, each stage of training on data alone."""

PROMPTS = {"train": "prompts/train", "heldout": "prompts/heldout"}
"""Keys of the manifests that committed the prompts of each split."""


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
        return cls.model_validate(manifest.detail)

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

    def shard_key(self, stage: str, shard: int) -> str:
        """Key of the manifest that commits one shard of a stage."""
        return f"{self.key}/{stage}/{shard:04d}"

    def rollout_key(self, shard: int) -> str:
        """Key of the manifest that committed the rollouts of one shard."""
        return self.shard_key("rollout", shard).removeprefix(self.rescoring)


def plan_key(batch: str) -> str:
    """Key of a batch's plan."""
    return f"{batch}/plan"


def iteration_key(number: int) -> str:
    """Prefix of an iteration's manifests; iterations count from 1."""
    return f"it-{number:04d}"


def wave_key(number: int, wave: int) -> str:
    """Prefix of the manifests of one of an iteration's batches."""
    return iteration_key(number) if wave == 1 else f"{iteration_key(number)}/wave-{wave}"


def waves_of(run: Run, number: int) -> list[BatchPlan]:
    """Batches of an iteration that have been planned so far, in order."""
    waves: list[BatchPlan] = []
    while (planned := run.find(plan_key(wave_key(number, len(waves) + 1)))) is not None:
        waves.append(BatchPlan.read(planned))
    return waves


def rollouts_of(run: Run, number: int) -> list[Manifest]:
    """Manifests of an iteration's rollouts that have been committed so far, of all its batches."""
    return [manifest for manifest in run.manifests(f"{iteration_key(number)}/") if "/rollout/" in manifest.key]


def credit_key(number: int) -> str:
    """Key of the manifest that committed an iteration's training samples."""
    return f"{iteration_key(number)}/credit"


def evaluation_key(number: int) -> str:
    """Prefix of the manifests of the evaluation after `number` iterations."""
    return f"eval-{number:04d}"


def measurement_key(policy: str) -> str:
    """Prefix of the manifests of a measurement of one of the policies that come before the first iteration."""
    return f"{policy}/{evaluation_key(0)}"


def policy_key(number: int) -> str:
    """Key of the manifest that committed the policy after `number` iterations."""
    return f"{iteration_key(number)}/update" if number else "policy/initial"


def estimates_key(number: int) -> str:
    """Key of the manifest that committed what models say of an iteration's tokens."""
    return f"{iteration_key(number)}/estimates"


def critic_key(number: int) -> str:
    """Key of the manifest that committed the critic after `number` iterations, where there is one."""
    return policy_key(number) if number else "critic/initial"


def judge_role(term: str) -> str:
    """Role of the workers that serve a reward; also the stage that its manifests are filed under."""
    return f"judge-{term}"


def model_key(term: str) -> str:
    """Key of the manifest that committed the model behind a served reward."""
    return f"{judge_role(term)}/model"


def artifact_key(name: str) -> str:
    """A run's name as Prefect wants artifact keys: lower-case letters, digits and dashes."""
    return name.replace(".", "-").replace("_", "-")
