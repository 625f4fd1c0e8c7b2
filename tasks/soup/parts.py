"""Runs of a soup. A soup trains a few policies on different mixes of rewards (backbones) and merges them for any
preference between the rewards.

The runs train the start policy and the backbones, and evaluate all policies. Each is a separate run in the soup's
store, named after the soup and its purpose. So each run resumes independently, and runs that several methods share (the
start policy, a backbone for one reward) are trained only once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, isnan
from pathlib import Path
from typing import Final

import numpy as np

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput
from rheostat.infra.store.runs import open_run
from rheostat.models.config.policy import DirectoryPolicy, MergeParent, MergePolicy, PolicyConfig
from rheostat.models.config.soup import SoupConfig
from rheostat.models.config.training import EvaluationConfig
from rheostat.models.soup.mixing import compute_backbone_weights, extrapolate_weights, mixing_matrix, preference_grid
from rheostat.tasks.config.run import RunConfig, validate_again
from rheostat.tasks.promotion.evidence import problem_scores
from rheostat.tasks.promotion.suites import Suite, policy_directory
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.keys import evaluation_key

MIN_SPREAD: Final = 1e-9
"""Standard deviation below which a reward term is considered constant."""


class Statistics(Settings):
    """Mean and standard deviation of each reward under the start policy, in the order of `soup.terms`. Rewards are
    standardized with them, so that rewards of different scale can be mixed."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def standardised(self, rewards: Sequence[float]) -> tuple[float, ...]:
        """Return the rewards as numbers of standard deviations above the start policy's mean."""
        parts = zip(rewards, self.mean, self.std, strict=True)
        return tuple((reward - mean) / std for reward, mean, std in parts)


@dataclass(frozen=True, slots=True)
class PreferencePoint:
    """Policy for one preference (weights of the rewards that sum to 1), before its evaluation."""

    preference: tuple[float, ...]
    weights: tuple[float, ...]
    """Weights with which the backbones (policies trained on mixes of rewards) are merged. Empty if the policy is not a
    merge."""
    policy: PolicyConfig
    side: str
    """Kind of the policy, such as "expert" or "oracle", for the name of its evaluation run."""


def soup_settings(config: RunConfig) -> SoupConfig:
    """Return the soup settings of a configuration. Raises BadInput if it has none."""
    if config.soup is None:
        raise BadInput(
            f"The configuration {config.name!r} has no table [soup]. Add [soup] with the rewards to be mixed."
        )
    return config.soup


def beta_of(soup: SoupConfig) -> float:
    """Return β, the share of a backbone's main reward in its mix of rewards, for a soup that does not search for the
    best β."""
    return 1.0 if soup.method == "rewarded" else soup.beta


# ---- training
def start_run(config: RunConfig) -> RunConfig:
    """Return the configuration of the run that trains the start policy by supervised warm-up. All backbones start from
    its policy."""
    return _part_config(config, f"{config.name}.start", iterations=0)


def backbone_run(
    config: RunConfig, statistics: Statistics, mix: Sequence[float], *, iterations: int | None = None
) -> RunConfig:
    """Return the configuration of the run that trains one backbone, which is the start policy trained on one mix of
    standardized rewards. `iterations` is by default the configured number."""
    places, rewards = dict(zip(soup_settings(config).terms, range(len(mix)), strict=True)), []
    for term, reward in zip(config.scoring.terms, config.scoring.rewards, strict=True):
        if (place := places.get(term)) is not None:
            standard = {"shift": statistics.mean[place], "scale": statistics.std[place]}
            reward = reward.model_copy(update={"weight": round(mix[place], 12), **standard})
        rewards.append(reward)
    return _part_config(
        config,
        f"{config.name}.for-{_format_shares(mix)}",
        iterations=config.iterations if iterations is None else iterations,
        policy=DirectoryPolicy(path=Path(policy_directory(start_run(config), 0))),
        scoring=config.scoring.model_copy(update={"rewards": tuple(rewards)}),
        warmup=None,
        dpo=None,
        preferences=config.preferences if config.scoring.trained_reward_models else None,
    )


def backbone_runs(
    config: RunConfig, statistics: Statistics, beta: float, *, iterations: int | None = None
) -> list[RunConfig]:
    """Return the configurations of the runs that train the backbones for one β, in the order of the rewards."""
    mixes = mixing_matrix(len(soup_settings(config).terms), beta).tolist()
    return [backbone_run(config, statistics, mix, iterations=iterations) for mix in mixes]


def expert_runs(config: RunConfig, statistics: Statistics) -> list[RunConfig]:
    """Return the configurations of runs that train on one reward each (experts). Their policies replace merges for
    preferences for one reward only. Empty if the soup uses no experts."""
    soup = soup_settings(config)
    return backbone_runs(config, statistics, 1.0) if soup.corners == "expert" and soup.mixes else []


def oracle_runs(config: RunConfig, statistics: Statistics) -> list[RunConfig]:
    """Return one run configuration for each evaluated preference, which trains a policy for this preference alone
    (oracle). Oracles show how much merging loses."""
    return [backbone_run(config, statistics, preference) for preference in grid_of(config)]


def search_iterations(config: RunConfig) -> int:
    """Return for how many iterations policies are trained to compare different values of β."""
    return max(1, ceil(config.iterations * soup_settings(config).search_share))


# ---- evaluation
def grid_of(config: RunConfig) -> list[tuple[float, ...]]:
    """Return the preferences for which policies are evaluated: a regular grid of reward weights that sum to 1."""
    soup = soup_settings(config)
    return preference_grid(len(soup.terms), soup.grid)


def merge_points(
    config: RunConfig, statistics: Statistics, beta: float, *, search: bool = False
) -> Iterator[PreferencePoint]:
    """Yield one policy to evaluate for each preference: usually the merge of the backbones. For a preference for one
    reward only, it is the policy trained on this reward (expert) if the soup has experts."""
    iterations = search_iterations(config) if search else config.iterations
    runs = backbone_runs(config, statistics, beta, iterations=iterations)
    backbones = [policy_directory(run, iterations) for run in runs]
    experts = [] if search else [policy_directory(run, iterations) for run in expert_runs(config, statistics)]
    side = f"{soup_settings(config).method}-{beta:g}{'-search' if search else ''}"
    for preference in grid_of(config):
        if experts and 1.0 in preference:
            policy = DirectoryPolicy(path=Path(experts[preference.index(1.0)]))
            yield PreferencePoint(preference, (), policy, "expert")
            continue
        weights = compute_backbone_weights(soup_settings(config).method, preference, beta)
        parents = soup_parents(config, backbones, weights)
        yield PreferencePoint(preference, weights, MergePolicy(parents=parents), side)


def soup_parents(config: RunConfig, backbones: Sequence[str], weights: Sequence[float]) -> tuple[MergeParent, ...]:
    """Return the policies to merge, with their weights: the backbones, and with `soup.extrapolate` the start policy
    too."""
    alpha = soup_settings(config).extrapolate
    scaled, of_start = extrapolate_weights(weights, alpha)
    start = [(policy_directory(start_run(config), 0), of_start)] if alpha else []
    weighed = [*zip(backbones, scaled, strict=True), *start]
    return tuple(MergeParent(path=Path(path), weight=weight) for path, weight in weighed if abs(weight) > 1e-12)


def oracle_points(config: RunConfig, statistics: Statistics) -> Iterator[PreferencePoint]:
    """Yield the policy that was trained for each preference alone (oracle), to compare with merges."""
    for preference, run in zip(grid_of(config), oracle_runs(config, statistics), strict=True):
        yield PreferencePoint(
            preference, (), DirectoryPolicy(path=Path(policy_directory(run, run.iterations))), "oracle"
        )


def statistics_suite(config: RunConfig) -> Suite:
    """Return the evaluation that measures mean and standard deviation of the rewards under the start policy."""
    soup, rollout = soup_settings(config), config.rollout
    evaluation = EvaluationConfig(
        problems=soup.statistics_prompts, samples=rollout.group_size, temperature=rollout.sampling.temperature
    )
    return replace(point_suite(config, ()), name="statistics", evaluation=evaluation)


def point_suite(config: RunConfig, preference: Sequence[float]) -> Suite:
    """Return the evaluation of the policy for a preference. All policies are evaluated on the same problems with the
    same seeds."""
    alone, sampling = _part_config(config, config.name, preferences=None, dpo=None), config.rollout.sampling
    return Suite(f"at-{_format_shares(preference)}", config.data, config.scoring, config.evaluation, sampling, alone)


def evaluation_run(config: RunConfig, point: PreferencePoint) -> RunConfig:
    """Return the configuration of the run that evaluates the policy for a preference."""
    return point_suite(config, point.preference).config(point.side, point.policy)


def statistics_run(config: RunConfig) -> RunConfig:
    """Return the configuration of the run that evaluates the start policy."""
    start = DirectoryPolicy(path=Path(policy_directory(start_run(config), 0)))
    return statistics_suite(config).config("start", start)


def standardize(config: RunConfig) -> Statistics:
    """Compute mean and standard deviation of each reward under the start policy, whose evaluation must be finished.
    Raises BadInput if a reward is constant."""
    scores = _read_scores(config, statistics_run(config))
    for term, values in scores.items():
        if not values or np.std(values) < MIN_SPREAD:
            description = f"{len(values)} equal scores of {values[0]:g}" if values else "no scores"
            raise BadInput(
                f"soup.terms: the scores of {term!r} are standardized, so they must differ among completions of the "
                f"initial policy, but there are {description}. Use another reward, or other problems."
            )
    return Statistics(
        mean=tuple(float(np.mean(values)) for values in scores.values()),
        std=tuple(float(np.std(values)) for values in scores.values()),
    )


def rewards_of(config: RunConfig, evaluation: RunConfig) -> tuple[float, ...]:
    """Return the mean of each reward in an evaluation, in the order of `soup.terms`. Raises BadInput if a reward has no
    scores."""
    scores = _read_scores(config, evaluation)
    if missing := [term for term, values in scores.items() if not values]:
        raise BadInput(
            f"Run {evaluation.name!r} has no scores of reward {missing[0]!r}: scoring failed for every completion. "
            "Look at the logs of the run for errors of this reward."
        )
    return tuple(float(np.mean(values)) for values in scores.values())


def _read_scores(config: RunConfig, evaluation: RunConfig) -> dict[str, list[float]]:
    batch = Batch.read(open_run(evaluation.store, evaluation.name), evaluation_key(0))
    scores = problem_scores(batch, soup_settings(config).terms)
    return {term: [s for s in chain(*each.values()) if not isnan(s)] for term, each in scores.items()}


def _part_config(config: RunConfig, name: str, **changes: object) -> RunConfig:
    """Return the configuration of one run of a soup: the soup's configuration with another name and changed
    settings."""
    alone = {"name": name, "soup": None, "promotion": None, "evaluations": (), "report": False}
    return validate_again(config.model_copy(update={**alone, **changes}), source=f"soup {config.name!r}")


def _format_shares(preference: Sequence[float]) -> str:
    return "-".join(f"{round(share, 3):g}" for share in preference)
