"""Suites of held-out problems on which two policies are compared. Each policy is evaluated in a separate run, and both
runs use the same seeds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput
from rheostat.infra.store.registry import open_registry
from rheostat.infra.store.runs import open_run
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.budget import BudgetConfig
from rheostat.models.config.data import DataConfig
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.environments import EnvironmentConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import PolicyConfig
from rheostat.models.config.promotion import HELDOUT, PromotionConfig, SuiteConfig
from rheostat.models.config.rewards import RewardConfig, ScoringConfig
from rheostat.models.config.training import EvaluationConfig
from rheostat.models.records.versions import directory_of, policy_of
from rheostat.placement.config import AdaptivePlacement
from rheostat.tasks.config.run import RunConfig, validate_again
from rheostat.tasks.run.reverts import policy_after

CHALLENGER: Final = "challenger"
"""Name of the retrained policy, used at the end of the names of its evaluation runs. `Opponent.side` is the name of the
other policy."""

RUN_KEY: Final = "rollout.environment"
"""Configuration key of a run's environment."""


class Opponent(Settings):
    """Policy that a retrained policy must beat: the champion, or the run's initial policy if there is no champion."""

    number: int
    """Number of the champion's registry record, or 0 for the run's initial policy."""
    policy: str
    """Directory with the files of the policy."""

    @property
    def side(self) -> str:
        """Name at the end of the policy's evaluation runs: `initial`, or for example `champion-3`."""
        return f"champion-{self.number}" if self.number else "initial"


@dataclass(frozen=True, slots=True)
class Suite:
    """Held-out problems with the rewards and sampling settings for evaluating two policies on them."""

    name: str
    data: DataConfig
    scoring: ScoringConfig
    evaluation: EvaluationConfig
    sampling: SamplingConfig
    retrain: RunConfig
    """Configuration of the retrain whose promotion rules use the suite."""
    environment: EnvironmentConfig | None = None
    """Environment of the suite's episodes, or None for that of the retrain."""

    def reward(self, term: str | None) -> RewardConfig:
        """Return the reward with this name, by default the first reward of the suite."""
        return self.scoring.rewards[0 if term is None else self.scoring.terms.index(term)]

    def run_name(self, side: str) -> str:
        """Return the name of the run that evaluates one of the two policies. `side` is CHALLENGER or
        `Opponent.side`."""
        return f"{self.retrain.name}.{self.name}.{side}"

    def config(self, side: str, policy: PolicyConfig) -> RunConfig:
        """Return the configuration of the run that evaluates one of the two policies. `side` is `CHALLENGER` or
        `Opponent.side`. Raises BadInput if the settings are inconsistent."""
        for term, reward in self.scoring.hosted_rewards.items():
            if reward.kind == "judge" and reward.model.begins_as_policy:
                raise BadInput(
                    f"evaluation {self.name!r}: reward {term} has model.shape.kind = 'policy', so each policy would "
                    "be judged by a copy of itself. Use a judge that is the same for both policies."
                )
        rollout = self.retrain.rollout.model_copy(
            update={
                "prompts": 1,
                "staleness": 0,
                "dynamic": None,
                "curriculum": None,
                "partial": None,
                "sampling": self.sampling,
                "environment": self.environment or self.retrain.rollout.environment,
            }
        )
        config = self.retrain.model_copy(
            update={
                "name": self.run_name(side),
                "policy": policy,
                "data": self.data.model_copy(update={"exclude_ids_path": None}),
                "scoring": self.scoring,
                "evaluation": self.evaluation,
                "rollout": rollout,
                "algorithm": Grpo(),
                "update": UpdateConfig(),
                "warmup": None,
                "dpo": None,
                "placement": AdaptivePlacement(),
                "budget": BudgetConfig(),
                "promotion": None,
                "iterations": 0,
            }
        )
        return validate_again(config, source=f"evaluation {self.name!r}")

    @contextmanager
    def naming_its_keys(self) -> Iterator[None]:
        """Context in which a BadInput about the environment of this suite names the key under [[evaluations]]. The runs
        that evaluate a suite have its environment at `rollout.environment`, which messages name."""
        try:
            yield
        except BadInput as error:
            if self.environment is None or RUN_KEY not in str(error):
                raise
            where = f"evaluation {self.name!r}: "
            raise BadInput(where + str(error).removeprefix(where).replace(RUN_KEY, "environment")) from error


def suites_of(config: RunConfig) -> Iterator[Suite]:
    """Yield the suites on which the promotion rules of a retrain compare policies."""
    others = {suite.name: suite for suite in config.evaluations}
    for name in promotion_rules(config).suites():
        yield _own_suite(config) if name == HELDOUT else _other_suite(config, others[name])


def promotion_rules(config: RunConfig) -> PromotionConfig:
    """Return the promotion rules of a retrain. The configuration must have a [promotion] table."""
    assert config.promotion is not None, "a gate has rules"
    return config.promotion


def _own_suite(config: RunConfig) -> Suite:
    return Suite(HELDOUT, config.data, config.scoring, config.evaluation, config.rollout.sampling, config)


def _other_suite(config: RunConfig, suite: SuiteConfig) -> Suite:
    scoring, sampling = config.scoring.model_copy(update={"rewards": suite.rewards}), config.rollout.sampling
    evaluation = EvaluationConfig(problems=suite.problems, temperature=suite.temperature, samples=suite.samples)
    if suite.max_new_tokens is not None:
        sampling = sampling.model_copy(update={"max_new_tokens": suite.max_new_tokens})
    return Suite(suite.name, suite.data, scoring, evaluation, sampling, config, suite.environment)


def find_opponent(config: RunConfig) -> Opponent:
    """Return the policy that the retrained policy must beat: the current champion, or the run's initial policy if there
    is no champion."""
    registry = open_registry(config.store, promotion_rules(config).registry)
    champion = registry.champion()
    if champion is None:
        return Opponent(number=0, policy=policy_directory(config, 0))
    return Opponent(number=champion.number, policy=registry.locate(champion))


def policies_to_compare(config: RunConfig, opponent: Opponent) -> dict[str, PolicyConfig]:
    """Return the two policies to evaluate, by their names in evaluation runs: `CHALLENGER` and `Opponent.side`."""
    directories = {opponent.side: opponent.policy, CHALLENGER: policy_directory(config, config.iterations)}
    return {side: config.policy.with_path(Path(directory)) for side, directory in directories.items()}


def policy_directory(config: RunConfig, iterations: int) -> str:
    """Return the directory of a run's policy (or of its adapter) after a number of iterations."""
    run = open_run(config.store, config.name)
    policy = policy_of(policy_after(run, iterations))
    return directory_of(run, policy.adapter or policy.weights)
