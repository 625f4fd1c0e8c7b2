"""Configuration of rollout: batches of prompts, dynamic sampling, partial rollout. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field

from infra.config import Positive, Settings
from models.config.engines import EngineConfig, SamplingConfig, TransformersEngine


class DynamicSampling(Settings):
    """Waves of prompts until enough groups are informative (DAPO, arXiv 2503.14476): `rollout.prompts` is the target.

    A group is informative when its rewards, by the raw term `metric`, are not all equal.
    """

    metric: str | None = None
    """Reward term that is looked at; none takes the first."""
    max_extra_waves: Annotated[int, Field(ge=0, le=64)] = 3
    """Waves after the first."""
    margin: Annotated[float, Field(ge=1)] = 1.2
    """A wave has ceil(gap x EMA of issued/informative x margin) prompts."""
    on_shortfall: Literal["shrink", "fill", "fail"] = "shrink"
    """Below the target after the last wave: train on what there is, add uninformative groups of no weight, or stop."""
    surplus: Literal["return", "keep"] = "return"
    """Informative groups beyond the target: their prompts come first in the next iteration, or the groups themselves
    are trained there, one version stale."""


class PartialRollout(Settings):
    """Long completions spread over iterations: each is cut at a budget and continues first in the next iteration.

    The budget counts tokens, not seconds, so that a run repeats itself bit for bit.
    """

    tokens: Positive
    """New tokens of a completion per iteration."""
    over_dispatch: Annotated[float, Field(ge=0, le=4)] = 0.25
    """Share of prompts issued beyond the target, to stand in for groups that are cut."""
    max_staleness: Positive = 1
    """A completion begun so many versions ago is generated to its end."""


class RolloutConfig(Settings):
    """How many prompts and completions an iteration has."""

    prompts: Positive = 64
    """Prompts per iteration; with `dynamic`, the informative groups aimed at."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Completions per prompt; most algorithms reckon credit relative to their mean reward."""
    shard_prompts: Positive = 32
    """Prompts per shard: the unit of work, of commit and of loss when a worker dies."""
    sampling: SamplingConfig = SamplingConfig()
    """How completions are drawn."""
    engine: EngineConfig = TransformersEngine()
    """What generates."""
    dynamic: DynamicSampling | None = None
    """Dynamic sampling; none trains on the first wave as it is."""
    partial: PartialRollout | None = None
    """Partial rollout; none generates every completion to its end."""
