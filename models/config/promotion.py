"""Configuration of promotion: the suites on which a retrained policy is evaluated, and the rules of the gate.

The champion is the promoted policy in production, the challenger is the policy from a retrain. The gate decides whether
the challenger replaces the champion. Torch-free.
"""

from collections.abc import Iterator
from math import isfinite
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config import Fraction, Positive, Settings
from infra.renamed import RenamedFrom
from infra.validation_errors import nearest
from models.config.data import ArithmeticData, DataConfig
from models.config.policy import PolicyConfig
from models.config.reward_terms import NumericReward
from models.config.rewards import RewardConfig, ScoringConfig
from models.config.training import HeldoutConfig

MIN_PROBLEMS = 30
"""Minimum number of problems in a suite. With fewer problems, the statistical bounds of the gate are not reliable."""

HELDOUT = "heldout"
"""Name of the suite that every run has: held-out problems of the run's own data, with the run's rewards."""

MAX_NAME = 64
"""Maximum characters of a run's name."""

SuiteName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,15}$")]


class SuiteConfig(HeldoutConfig):
    """Additional suite of held-out problems on which the gate compares policies."""

    name: SuiteName
    """Name by which the rules of the gate refer to this suite."""
    data: DataConfig = ArithmeticData()
    """Source of the suite's held-out problems."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (NumericReward(),)
    """Rewards that score the completions. Rules use the first reward unless they name another."""
    max_new_tokens: Positive | None = None
    """Maximum tokens of a completion. The default is `rollout.sampling.max_new_tokens`."""

    @field_validator("name")
    @classmethod
    def _require_other_name(cls, name: str) -> str:
        if name == HELDOUT:
            raise ValueError(f"the name {HELDOUT!r} is reserved for the run's own held-out problems. Use another name")
        return name


class SuiteRule(Settings):
    """Fields common to all rules of the gate that use a suite."""

    suite: SuiteName = HELDOUT
    """Name of the suite to which the rule applies."""
    term: str | None = None
    """Name of one of the suite's rewards, such as a reward of weight 0 that checks the format of the completion. The
    default is the first reward."""

    @property
    def label(self) -> str:
        """Name of the rule in messages: `safety`, or `safety/format`."""
        return self.suite if self.term is None else f"{self.suite}/{self.term}"


class ComparisonRule(SuiteRule):
    """A rule that compares the scores of the champion and of the challenger (the retrained policy)."""

    range: tuple[float, float] | None = None
    """Lowest and highest possible score, on which the statistical bounds rely. The default is the range of the reward's
    kind, or 0 to 1 if all scores are between 0 and 1. A score outside the range makes the comparison invalid. Scores
    without a range are compared by a bootstrap, which may promote more often than `alpha` allows. A guard on scores
    without a range never passes."""

    @field_validator("range")
    @classmethod
    def _require_range(cls, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        if ends is not None and not (isfinite(ends[1] - ends[0]) and ends[0] < ends[1]):
            raise ValueError(
                "the range must start with the lowest possible score and end with a higher one, both finite, but it "
                f"is [{ends[0]:g}, {ends[1]:g}]"
            )
        return ends


class Primary(ComparisonRule):
    """A suite on which the challenger (the retrained policy) must be better than the champion."""

    min_gain: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """Gain of the challenger in the mean score that the lower confidence bound of the gain must exceed."""


class Guard(ComparisonRule):
    """A suite on which the challenger (the retrained policy) must not be worse than the champion."""

    margin: Annotated[float, Field(gt=0, le=1)]
    """Loss in the mean score that the challenger must not reach. The rule passes if the lower confidence bound of the
    difference is above -margin."""


class Floor(SuiteRule):
    """A suite on which the challenger (the retrained policy) must reach a fixed mean score, independent of the
    champion."""

    min_score: Annotated[float, Field(ge=-1, le=1), RenamedFrom("least")]
    """Minimum mean score of the challenger's completions, such as 0.98 for a reward that checks their format."""


class SuiteCheck(Settings):
    """Check, before training, of how many problems of a suite are also in the training data (contamination)."""

    suite: SuiteName
    """Name of the suite to check."""
    data: DataConfig
    """Training problems of the retrain."""
    max_contaminated: Fraction
    """Maximum share of the suite's problems that may also occur, literally or nearly, among the training problems."""
    policy: PolicyConfig | None = None
    """The configured policy, if the champion has replaced it as the start of the run, else None."""


class LimitsConfig(Settings):
    """Absolute limits for a challenger (the retrained policy), which apply whatever its gain is. A limit that is not
    set is not checked."""

    length: Annotated[float, Field(gt=0)] | None = None
    """Maximum mean length, in tokens, of the challenger's completions for the held-out problems."""
    max_truncated: Annotated[Fraction | None, RenamedFrom("cut_off")] = None
    """Maximum share of the challenger's completions for the held-out problems that reach the length limit."""
    kl: Annotated[float, Field(gt=0)] | None = None
    """Maximum KL divergence, in nats per token, between the challenger and the policy that generated the rollouts of
    its last update."""
    price: Annotated[float, Field(gt=0)] | None = None
    """Maximum cost of the challenger's run, computed with `[budget.prices]`."""


class CardConfig(Settings):
    """Additional facts for the model card, with the field names of Hugging Face model cards."""

    base_model: str | None = None
    """Hub name of the base model, such as `Qwen/Qwen3-0.6B`."""
    license: str | None = None
    """Identifier of the license, such as `apache-2.0`."""
    datasets: tuple[str, ...] = ()
    """Names of the data sets from which the problems come."""
    language: tuple[str, ...] = ()
    """Language codes, such as `en`."""
    description: str = ""
    """Intended use of the model, and uses for which it is not intended."""


class PromotionConfig(Settings):
    """Conditions under which `rheostat retrain` replaces the champion with a retrained policy (the gate)."""

    registry: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
    """Name of the registry that contains the promoted versions, stored below `registry/` in the store."""
    primary: Annotated[tuple[Primary, ...], Field(min_length=1)] = (Primary(),)
    """Suites on which the challenger must be better than the champion: a table, or a list of tables. Several suites are
    tested by Holm's method."""
    guards: tuple[Guard, ...] = ()
    """Suites on which the challenger must not be worse than the champion."""
    limits: LimitsConfig = LimitsConfig()
    """Absolute limits for the challenger, such as the length of its completions or the cost of its run."""
    floors: tuple[Floor, ...] = ()
    """Suites on which the challenger must reach a minimum score. Guards allow a small loss in each retrain; floors stop
    these losses from adding up."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Significance level of the one-sided confidence intervals: the maximum probability of promoting a challenger that
    is no better than the champion."""
    max_missing: Fraction = 0.05
    """Maximum share of missing scores. If more scores are missing, the gate makes no decision."""
    max_contaminated: Fraction = 0.0
    """Maximum share of a suite's problems that may also occur, literally or nearly, among the training problems."""
    problems: Literal["new", "all"] = "new"
    """Training problems of a retrain: "new" uses only problems on which no champion's run was trained, "all" uses all
    problems."""
    approve: Literal["automatic", "manual"] = "automatic"
    """Approval of a challenger that passes all rules. With `manual` it becomes a proposal, which a person approves in a
    form of the deployment's flow run or with `rheostat promote`."""
    approve_days: Annotated[float, Field(gt=0, le=365)] = 7.0
    """Number of days for which the form of `approve = "manual"` waits. After that the flow run fails, but `rheostat
    promote` can still approve the proposal."""
    keep: Positive = 5
    """Number of newest promoted policies whose files are kept, in addition to the champion."""
    card: CardConfig = CardConfig()
    """Additional facts for the model card of a promoted policy."""

    @field_validator("primary", mode="before", json_schema_input_type=Primary | tuple[Primary, ...])
    @classmethod
    def _wrap_single_rule(cls, value: object) -> object:
        return (value,) if isinstance(value, dict | Primary) else value

    @property
    def compared(self) -> tuple[ComparisonRule, ...]:
        """Rules that compare the champion and the challenger: the primary rules, then the guards."""
        return (*self.primary, *self.guards)

    @property
    def rules(self) -> tuple[SuiteRule, ...]:
        """All rules that use a suite: the primary rules, then guards, then floors."""
        return (*self.compared, *self.floors)

    def suites(self) -> list[str]:
        """Return the names of the suites that the rules use, without repetitions. The suites of primary rules come
        first."""
        return [*dict.fromkeys(rule.suite for rule in self.rules)]

    def find_conflicts(
        self, suites: tuple[SuiteConfig, ...], scoring: ScoringConfig, *, heldout: int, run: str
    ) -> Iterator[str]:
        """Yield one line per conflict of the rules with the suites, the run's own evaluation or the run's name."""
        suite_scoring = {suite.name: scoring.model_copy(update={"rewards": suite.rewards}) for suite in suites}
        terms = {HELDOUT: scoring.terms, **{name: each.terms for name, each in suite_scoring.items()}}
        rewards = {HELDOUT: scoring.rewards, **{suite.name: suite.rewards for suite in suites}}
        problems = {HELDOUT: heldout, **{suite.name: suite.problems for suite in suites}}
        for rule in self.rules:
            if rule.suite not in terms:
                allowed = f"Use {HELDOUT!r} or a suite of [[evaluations]]"
                yield f"promotion: there is no suite {rule.suite!r}. {allowed}{nearest(rule.suite, [*terms])}"
                continue
            suite_terms = terms[rule.suite]
            if rule.term is not None and rule.term not in suite_terms:
                allowed = f"Use one of {', '.join(suite_terms)}{nearest(rule.term, suite_terms)}"
                yield f"promotion: suite {rule.suite!r} has no reward {rule.term!r}. {allowed}"
            elif isinstance(rule, Guard) and rule.range is None:
                reward = rewards[rule.suite][0 if rule.term is None else suite_terms.index(rule.term)]
                if reward.is_graded and reward.score_range is None:
                    yield (
                        f"promotion: the guard of {rule.label!r} needs `range`, the lowest and the highest possible "
                        f"score, because nothing limits the scores of a reward of kind {reward.label!r}"
                    )
            if problems[rule.suite] < MIN_PROBLEMS:
                yield (
                    f"promotion: suite {rule.suite!r} has {problems[rule.suite]} problems, but the gate needs at least "
                    f"{MIN_PROBLEMS} problems"
                )
            if len(longest := f"{run}-20260131.{rule.suite}.champion-9999") > MAX_NAME:
                yield (
                    f"name is {run!r}, so the name of the run {longest!r} would exceed {MAX_NAME} characters. Use a "
                    "shorter name"
                )

    @model_validator(mode="after")
    def _require_unique_rules(self) -> Self:
        rules_by_key = {"primary": self.primary, "guards": self.guards, "floors": self.floors}
        for key, rules in rules_by_key.items():
            names = [rule.label for rule in rules]
            if len({*names}) < len(names):
                raise ValueError(
                    f"{key}: each suite and term may be listed only once, found {', '.join(names)}. Remove the "
                    "repetition"
                )
        return self
