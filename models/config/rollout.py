"""Configuration of rollout: number of prompts, dynamic sampling, partial rollout, curriculum. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field

from rheostat.infra.config import Fraction, Positive, Settings, Since
from rheostat.infra.renamed import RenamedValue
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.engines import EngineConfig, SamplingConfig, TransformersEngine
from rheostat.models.config.environments import EnvironmentConfig


class DynamicSampling(Settings):
    """Dynamic sampling (DAPO, arXiv 2503.14476): an iteration generates further waves of prompts until it has
    `rollout.prompts` informative groups. A group (the completions of one prompt) is informative if its raw scores of
    the reward term `metric` are not all equal."""

    metric: str | None = None
    """Name of the reward term whose scores decide whether a group is informative. The default is the first term."""
    max_extra_waves: Annotated[int, Field(ge=0, le=64)] = 3
    """Maximum number of waves of prompts in an iteration after the first wave."""
    margin: Annotated[float, Field(ge=1)] = 1.2
    """Factor that makes waves larger, to be on the safe side. A wave has ceil(gap x ratio x margin) prompts: gap is the
    number of informative groups that are still missing, and ratio the moving average of prompts per informative
    group."""
    on_shortfall: Literal["shrink", "fill", "fail"] = "shrink"
    """Action if informative groups are still missing after the last wave: "shrink" trains on fewer groups, "fill" adds
    groups that are not informative with weight 0, "fail" ends the run with an error."""
    surplus: Annotated[Literal["requeue", "keep"], RenamedValue("return", "requeue")] = "requeue"
    """Use of the informative groups beyond the target (surplus groups): "requeue" discards them and puts their prompts
    first in the next iteration. "keep" trains on them in the next iteration, in which they are one policy version
    old."""


class PartialRollout(Settings):
    """Generation of long completions over several iterations (partial rollout). Each iteration adds a limited number of
    tokens to a completion.

    Continued completions come first in an iteration. Without `iteration_seconds`, the limit counts tokens and not
    seconds, so a run is reproducible bit for bit.
    """

    tokens: Positive
    """Maximum number of tokens that one iteration adds to a completion. In an episode, only the tokens that the policy
    generates count."""
    iteration_seconds: Annotated[float | None, Field(gt=0), Since("0.2.0", before=None)] = None
    """Time in seconds after which the episodes of a rollout shard are cut, and continue in the next iteration. A turn
    that is being generated, and a step of an environment, still end. If not set, time does not cut episodes."""
    over_dispatch: Annotated[float, Field(ge=0, le=4)] = 0.25
    """Share of prompts that are issued in addition to the target. They replace groups whose completions are not
    finished when the token limit is reached."""
    max_staleness: Positive = 1
    """Age of an unfinished completion, in policy versions, from which it is generated to its end without limits of
    tokens and time."""


class DifficultyCurriculum(Settings):
    """Choice of prompts by difficulty: of several candidates, the prompt is issued whose last known solve rate is
    nearest to a target (arXiv 2507.04632).

    The solve rate of a prompt is the mean score of its last group in the reward term `metric`, as a share of the range
    of scores. Rates between 0 and 1 give a training signal, and a rate of 0.5 gives the strongest one (arXiv
    2504.03380). A prompt is a candidate exactly once per epoch, so it is issued at most once per epoch.
    """

    metric: str | None = None
    """Name of the reward term whose scores are the solve rate. The default is the first term."""
    target: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Solve rate of the most useful prompt."""
    candidates: Annotated[int, Field(ge=1, le=64)] = 4
    """Number of prompts among which each prompt is chosen. The others wait for the next epoch. With more candidates,
    the chosen prompts are nearer to the target and are repeated more often, because an epoch issues only one prompt in
    `candidates`. With 1, prompts are issued in random order, which needs `min_part_factor`."""
    explore: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the prompts that are chosen without regard to solve rates: the first candidate without a known solve
    rate or, if all are known, the first candidate. So every prompt can be issued in every epoch."""
    unseen_solve_rate: Fraction = 0.25
    """Solve rate that a prompt without a known solve rate counts as. At the target, new prompts come before all known
    ones. Far from the target, known prompts are repeated first."""
    min_part_factor: Annotated[Annotated[float, Field(gt=0, le=1)] | None, Since("0.2.0", before=None)] = None
    """If set, files of a mixture from which more can be learned are sampled more often. The weight of each file is
    multiplied by L / max L, but at least by this factor. The learnability L of a file is the mean of p (1 - p) over the
    last known solve rates p of its prompts (arXiv 2502.12272). The weight of a file without known solve rates is
    multiplied by 1."""


class RolloutConfig(Settings):
    """Settings for generating completions: how many per iteration, by which engine and policy version, and in which
    environment."""

    checks = {"policy": "rheostat.models.inspection.engines:estimate_memory"}

    prompts: Positive = 64
    """Number of prompts per iteration. With `dynamic`, this is the target number of informative groups."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Number of completions per prompt. Most algorithms compare the reward of a completion with the mean reward of
    these completions."""
    shard_prompts: Positive = 32
    """Number of prompts per shard. A worker generates and commits one shard at a time, so at most one shard is lost if
    the worker dies."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling settings for completions: temperature, truncation and maximum length."""
    denoising: Annotated[DenoisingConfig | None, Since("0.1.0", before=None)] = None
    """Denoising settings for a text-to-image policy. Only the temperature of `sampling` then has an effect."""
    engine: EngineConfig = TransformersEngine()
    """Inference engine that generates the completions."""
    staleness: Annotated[int, Field(ge=0, le=64), Since("0.1.0", before=0)] = 0
    """Number of policy versions by which the policy that generates completions lags behind. Iteration k is generated by
    version max(0, k - 1 - staleness), so generation can begin while earlier iterations are still being trained."""
    dynamic: DynamicSampling | None = None
    """Dynamic sampling, which generates more prompts until enough groups are informative (have unequal rewards). If not
    set, every iteration trains on the prompts of its first wave."""
    partial: PartialRollout | None = None
    """Partial rollout, which spreads long completions over several iterations. If not set, every completion is
    generated to its end."""
    curriculum: Annotated[DifficultyCurriculum | None, Since("0.2.0", before=None)] = None
    """Curriculum, which chooses prompts by their solve rates in earlier iterations. If not set, all prompts are issued
    in random order."""
    environment: Annotated[EnvironmentConfig | None, Since("0.1.0", before=None)] = None
    """Environment that replies to the policy's turns. If not set, a completion consists of one turn."""
