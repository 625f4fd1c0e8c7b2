"""Suites: held-out problems on which two policies are evaluated, each in a run of its own with the same seeds."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.store.runs import list_runs, open_run
from models.config.algorithms import Grpo
from models.config.budget import BudgetConfig
from models.config.data import DataConfig
from models.config.objectives import UpdateConfig
from models.config.policy import DirectoryPolicy, PolicyConfig
from models.config.promotion import HELDOUT, PromotionConfig, SuiteConfig
from models.config.rewards import ScoringConfig
from models.config.training import EvaluationConfig
from models.records.versions import directory_of, policy_of
from placement.config import AdaptivePlacement
from tasks.config.run import RunConfig, parse_config
from tasks.promotion.draft import Draft
from tasks.run.keys import StageKey
from tasks.run.preflight import preflight

Side = Literal["champion", "challenger"]
SIDES: tuple[Side, ...] = ("champion", "challenger")


@dataclass(frozen=True, slots=True)
class Suite:
    """One suite of a retrain: what is evaluated, and under which names."""

    name: str
    data: DataConfig
    scoring: ScoringConfig
    evaluation: EvaluationConfig
    retrain: RunConfig
    """Of which it is a part."""

    def run_name(self, side: Side) -> str:
        """Name of the run in which a side is evaluated."""
        return f"{self.retrain.name}.{self.name}.{side}"

    def config(self, side: Side, policy: PolicyConfig) -> RunConfig:
        """The run in which a policy is evaluated as the side. Raises BadInput where its parts do not fit together."""
        rollout = self.retrain.rollout.model_copy(
            update={"prompts": 1, "staleness": 0, "dynamic": None, "partial": None}
        )
        made = self.retrain.model_copy(
            update={
                "name": self.run_name(side),
                "policy": policy,
                "data": self.data.model_copy(update={"without": None}),
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
        return parse_config(made.model_dump(mode="json"), source=f"evaluation {self.name!r}")


def suites_of(config: RunConfig, promotion: PromotionConfig) -> Iterator[Suite]:
    """The suites that a retrain's rules ask for."""
    others = {suite.name: suite for suite in config.evaluations}
    for name in promotion.suites():
        yield _own(config) if name == HELDOUT else _other(config, others[name])


def _own(config: RunConfig) -> Suite:
    return Suite(HELDOUT, config.data, config.scoring, config.evaluation, config)


def _other(config: RunConfig, suite: SuiteConfig) -> Suite:
    scoring = config.scoring.model_copy(update={"rewards": suite.rewards})
    evaluation = EvaluationConfig(problems=suite.problems, temperature=suite.temperature)
    return Suite(suite.name, suite.data, scoring, evaluation, config)


def contenders(config: RunConfig, draft: Draft) -> dict[Side, PolicyConfig]:
    """The two policies: that of the run, and the champion, or the run's first one where there is none."""
    run = open_run(config.store, config.name)
    first, last = (policy_of(run.require(StageKey.policy(number))) for number in (0, config.iterations))
    champion = draft.policy or directory_of(run, first.adapter or first.weights)
    found = {"champion": champion, "challenger": directory_of(run, last.adapter or last.weights)}
    return {side: DirectoryPolicy(path=Path(found[side])) for side in SIDES}


async def check_suites(config: RunConfig, promotion: PromotionConfig) -> None:
    """Have the inputs of evaluations that are not the run's own checked, unless it has begun. Raises BadInput."""
    begun = config.name in list_runs(config.store)
    for suite in () if begun else suites_of(config, promotion):
        await preflight(suite.config("challenger", config.policy))
