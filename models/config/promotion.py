"""Configuration of promotion: the suites on which a retrained policy is evaluated, and the rules of the gate.

The champion is the promoted policy in production, the challenger is the policy from a retrain. The gate decides whether
the challenger replaces the champion. Torch-free.
"""

from collections.abc import Iterator
from math import isfinite
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from rheostat.infra.config import Fraction, Positive, Settings, Since
from rheostat.infra.counts import format_count
from rheostat.infra.renamed import RenamedFrom
from rheostat.infra.validation_errors import nearest
from rheostat.models.config.data import DataConfig
from rheostat.models.config.environments import EnvironmentConfig
from rheostat.models.config.policy import PolicyConfig
from rheostat.models.config.reward_terms import NumericReward
from rheostat.models.config.rewards import RewardConfig, ScoringConfig
from rheostat.models.config.training import HeldoutConfig

MIN_PROBLEMS = 30
"""Minimum number of problems in a suite. With fewer problems, the confidence bounds of the gate are not reliable."""

HELDOUT = "heldout"
"""Name of the suite that every run has: the held-out problems of the run's own data, scored with the run's rewards."""

MAX_NAME = 64
"""Maximum number of characters in the name of a run."""

SuiteName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,15}$")]


class SuiteConfig(HeldoutConfig):
    """Additional suite: held-out problems with which `rheostat retrain` compares the champion and the retrained
    policy."""

    name: SuiteName
    """Name of the suite, by which `primary`, `guards` and `floors` refer to it."""
    data: DataConfig
    """Data source from which the suite's held-out problems are taken."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (NumericReward(),)
    """Rewards that score the completions. Rules use the first reward unless they name another one in `term`."""
    environment: Annotated[EnvironmentConfig | None, Since("0.2.0", before=None)] = None
    """Environment of the suite's episodes. The default is `rollout.environment`. With `kind` "verifiers", "lm_eval" or
    "inspect", and the same kind in `data`, the suite is a public benchmark of this package (docs/public-suites.md)."""
    max_new_tokens: Positive | None = None
    """Maximum tokens of a completion. The default is `rollout.sampling.max_new_tokens`."""

    @field_validator("name")
    @classmethod
    def _require_other_name(cls, name: str) -> str:
        if name == HELDOUT:
            raise ValueError(f"the name {HELDOUT!r} is reserved for the run's own held-out problems. Use another name")
        return name


class SuiteRule(Settings):
    """Fields common to all rules of the promotion gate that use a suite of held-out problems."""

    suite: SuiteName = HELDOUT
    """Name of the suite to which the rule applies. "heldout" is the suite of the run's own held-out problems."""
    term: str | None = None
    """Name of the suite's reward that the rule uses, such as a reward of weight 0 that checks the format of the
    completion. The default is the first reward."""

    @property
    def label(self) -> str:
        """Name of the rule in messages: the suite, and the reward if one is set, such as `safety` or
        `safety/format`."""
        return self.suite if self.term is None else f"{self.suite}/{self.term}"


class ComparisonRule(SuiteRule):
    """Fields common to rules that compare the scores of the champion with those of the challenger (the retrained
    policy)."""

    range: tuple[float, float] | None = None
    """Lowest and highest possible score, which the confidence bounds need. The default is the range of the reward's
    kind, or 0 to 1 if all scores are between 0 and 1. A score outside of the range makes the comparison invalid. Scores
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
    """Rule for a suite on which the challenger (the retrained policy) must be better than the champion."""

    min_gain: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """Minimum gain of the challenger in the mean score. The rule passes if the lower confidence bound of the gain
    exceeds this value."""


class Guard(ComparisonRule):
    """Rule for a suite on which the challenger (the retrained policy) must not be worse than the champion."""

    margin: Annotated[float, Field(gt=0, le=1)]
    """Tolerated loss of the challenger in the mean score. The rule passes if the lower confidence bound of the
    difference (challenger minus champion) is above -margin."""


class Floor(SuiteRule):
    """Rule for a suite on which the challenger (the retrained policy) must reach a fixed mean score, whatever the
    champion's score is."""

    min_score: Annotated[float, Field(ge=-1, le=1), RenamedFrom("least")]
    """Minimum mean score of the challenger's completions, such as 0.98 for a reward that checks their format."""


class SuiteCheck(Settings):
    """Request to check, before training, how many problems of a suite also occur in the training data
    (contamination)."""

    checks = {"problems": "rheostat.models.inspection.problems:check_suite"}

    suite: SuiteName
    """Name of the suite to check."""
    data: DataConfig
    """Training problems of the retrain."""
    max_contaminated: Fraction
    """Maximum share of the suite's problems that may also occur among the training problems, literally or nearly."""
    policy: PolicyConfig | None = None
    """Policy in the configuration, if the run starts from the champion instead. None if the run starts from this
    policy."""


class LimitsConfig(Settings):
    """Absolute limits for a challenger (the retrained policy). The limits apply regardless of the gain. A limit that is
    not set is not checked."""

    length: Annotated[float, Field(gt=0)] | None = None
    """Maximum mean length, in tokens, of the challenger's completions of the held-out problems."""
    max_truncated: Annotated[Fraction | None, RenamedFrom("cut_off")] = None
    """Maximum share of the challenger's completions of the held-out problems that are cut at the length limit."""
    kl: Annotated[float, Field(gt=0)] | None = None
    """Maximum KL divergence, in nats per token, of the challenger from the policy that generated the rollouts for its
    last update."""
    price: Annotated[float, Field(gt=0)] | None = None
    """Maximum cost of the run that trained the challenger, computed with `[budget.prices]`."""


class CardConfig(Settings):
    """Additional facts for the model card of a promoted policy, with the field names of Hugging Face model cards."""

    base_model: str | None = None
    """Name of the base model on the Hugging Face Hub, such as `Qwen/Qwen3-0.6B`."""
    license: str | None = None
    """Identifier of the license, such as `apache-2.0`."""
    datasets: tuple[str, ...] = ()
    """Names of the data sets from which the problems come."""
    language: tuple[str, ...] = ()
    """Codes of the languages that the model generates, such as `en`."""
    description: str = ""
    """Intended use of the model, and uses for which it is not intended."""


class PromotionConfig(Settings):
    """Conditions under which `rheostat retrain` replaces the champion with a retrained policy (the gate)."""

    registry: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
    """Name of the registry in which the promoted policies are recorded. It is stored below `registry/` in the store."""
    primary: Annotated[tuple[Primary, ...], Field(min_length=1)] = (Primary(),)
    """Suites on which the challenger must be better than the champion: one table, or a list of tables. If there are
    several, their significance levels are corrected by Holm's method."""
    guards: tuple[Guard, ...] = ()
    """Suites on which the challenger must not be worse than the champion."""
    limits: LimitsConfig = LimitsConfig()
    """Absolute limits for the challenger, such as the length of its completions or the cost of its run."""
    floors: tuple[Floor, ...] = ()
    """Suites on which the challenger must reach a minimum score. Guards allow a small loss in each retrain; floors
    prevent these losses from adding up."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Significance level of the one-sided confidence intervals: the maximum probability of promoting a challenger that
    is no better than the champion."""
    max_missing: Fraction = 0.05
    """Maximum share of scores that may be missing. If more are missing, the gate makes no decision and the champion
    stays."""
    max_contaminated: Fraction = 0.0
    """Maximum share of a suite's problems that may also occur among the training problems, literally or nearly."""
    problems: Literal["new", "all"] = "new"
    """Training problems of a retrain: "new" uses only problems on which no champion so far was trained, "all" uses all
    problems."""
    approve: Literal["automatic", "manual"] = "automatic"
    """Approval of a challenger that passes all rules. With `automatic` it becomes the champion at once. With `manual`
    it becomes a proposal, which a person approves in a form of the Prefect flow run or with `rheostat promote`."""
    approve_days: Annotated[float, Field(gt=0, le=365)] = 7.0
    """Number of days for which the form of `approve = "manual"` waits for an answer. After that the flow run fails, but
    `rheostat promote` can still approve the proposal."""
    keep: Positive = 5
    """Number of newest promoted policies whose files are kept. The files of the champion are kept in any case."""
    card: CardConfig = CardConfig()
    """Additional facts for the model card of a promoted policy."""

    @field_validator("primary", mode="before", json_schema_input_type=Primary | tuple[Primary, ...])
    @classmethod
    def _wrap_single_rule(cls, value: object) -> object:
        return (value,) if isinstance(value, dict | Primary) else value

    @property
    def compared(self) -> tuple[ComparisonRule, ...]:
        """Rules that compare the champion with the challenger: the primary rules, followed by the guards."""
        return (*self.primary, *self.guards)

    @property
    def rules(self) -> tuple[SuiteRule, ...]:
        """All rules that use a suite: the primary rules, followed by guards and floors."""
        return (*self.compared, *self.floors)

    def suites(self) -> list[str]:
        """Return the name of each suite that a rule uses, once. The suites of primary rules come first."""
        return [*dict.fromkeys(rule.suite for rule in self.rules)]

    def find_conflicts(
        self, suites: tuple[SuiteConfig, ...], scoring: ScoringConfig, *, heldout: int, run: str
    ) -> Iterator[str]:
        """Yield one message for each conflict of the rules with the configured suites, with the run's own evaluation
        (`heldout` problems, `scoring`) or with the name of the run."""
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
                    f"promotion: suite {rule.suite!r} has {format_count(problems[rule.suite], 'problem')}, but the "
                    f"gate needs at least {MIN_PROBLEMS} problems"
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
