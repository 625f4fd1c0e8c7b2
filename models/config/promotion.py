"""Configuration of what becomes of a retrained policy: what it is measured on, and what it must show. Torch-free."""

from collections.abc import Iterator
from math import isfinite
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config import Fraction, Positive, Settings
from infra.validation_errors import nearest
from models.config.data import ArithmeticData, DataConfig
from models.config.policy import PolicyConfig
from models.config.reward_terms import NumericReward
from models.config.rewards import RewardConfig, ScoringConfig
from models.config.training import HeldoutConfig

FEWEST_PROBLEMS = 30
"""Below so many, neither the bootstrap nor a normal distribution says anything of a mean."""

HELDOUT = "heldout"
"""The suite that every run has: held-out problems of its own data, with its own rewards."""

MAX_NAME = 64
"""Characters of a run's name."""

SuiteName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,15}$")]


class SuiteConfig(HeldoutConfig):
    """Held-out problems that policies are compared on, beside those of the run's own data."""

    name: SuiteName
    """What rules call it."""
    data: DataConfig = ArithmeticData()
    """Its held-out problems."""
    rewards: Annotated[tuple[RewardConfig, ...], Field(min_length=1)] = (NumericReward(),)
    """How its answers are scored; rules go by the first one unless they name another."""
    max_new_tokens: Positive | None = None
    """Longest answer; none takes `rollout.sampling.max_new_tokens`."""

    @field_validator("name")
    @classmethod
    def _is_not_taken(cls, name: str) -> str:
        if name == HELDOUT:
            raise ValueError(f"{HELDOUT!r} is the suite of the run's own held-out problems: expected another name")
        return name


class SuiteRule(Settings):
    """What the two policies are compared by."""

    suite: SuiteName = HELDOUT
    """Name of the suite."""
    term: str | None = None
    """Name of one of its rewards, such as one of weight 0 for the format of answers; none takes its first one."""

    @property
    def label(self) -> str:
        """What messages call it: `safety`, or `safety/format`."""
        return self.suite if self.term is None else f"{self.suite}/{self.term}"


class ComparisonRule(SuiteRule):
    """A rule that compares the scores of the two policies."""

    range: tuple[float, float] | None = None
    """Lowest and highest possible score, on which the bounds rely. By default the range of the reward's kind, or 0 to 1
    if all scores are between 0 and 1. A score outside the range makes the comparison invalid. Scores without a range
    are compared by a bootstrap, which may promote more often than `alpha`; a guard never holds for them."""

    @field_validator("range")
    @classmethod
    def _is_a_range(cls, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        if ends is not None and not (isfinite(ends[1] - ends[0]) and ends[0] < ends[1]):
            raise ValueError(
                f"expected the lowest score and a higher one, both finite, found [{ends[0]:g}, {ends[1]:g}]"
            )
        return ends


class Primary(ComparisonRule):
    """A suite on which the challenger has to be better."""

    min_gain: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """What the lower bound of the gain in the mean score has to exceed."""


class Guard(ComparisonRule):
    """A suite on which the challenger may not be worse."""

    margin: Annotated[float, Field(gt=0, le=1)]
    """How far below no change the lower bound of the difference may lie."""


class Floor(SuiteRule):
    """A suite on which the challenger has to score so much, whatever the champion does."""

    least: Annotated[float, Field(ge=-1, le=1)]
    """The lowest mean score of its answers that will do, such as 0.98 of a reward for their format."""


class SuiteCheck(Settings):
    """What a suite is checked against before anything is trained."""

    suite: SuiteName
    """Its name."""
    data: DataConfig
    """What the retrain learns from."""
    max_contaminated: Fraction
    """Share of its problems that may be, or nearly be, among those."""
    policy: PolicyConfig | None = None
    """The configured policy, where the suite's is the champion that has taken its place."""


class LimitsConfig(Settings):
    """What a challenger may reach at most, whatever it gains; none of them binds unless it is given."""

    length: Annotated[float, Field(gt=0)] | None = None
    """Mean tokens of its answers to the held-out problems."""
    cut_off: Fraction | None = None
    """Share of these answers that the longest length cut off."""
    kl: Annotated[float, Field(gt=0)] | None = None
    """Nats per token between the last update's policy and the one that generated."""
    price: Annotated[float, Field(gt=0)] | None = None
    """What its run cost by `[budget.prices]`."""


class CardConfig(Settings):
    """What the card of a model says beside what its run knows, in Hugging Face's terms."""

    base_model: str | None = None
    """The Hub's name of the model that it began as, such as `Qwen/Qwen3-0.6B`."""
    license: str | None = None
    """Identifier of the licence, such as `apache-2.0`."""
    datasets: tuple[str, ...] = ()
    """Names of the data sets behind the problems."""
    language: tuple[str, ...] = ()
    """Codes of languages, such as `en`."""
    description: str = ""
    """What it is for, and what it is not for."""


class PromotionConfig(Settings):
    """Whether a retrained policy takes the place of the champion, as `rheostat retrain` decides it."""

    registry: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
    """Name under which versions are kept in the store, below `registry/`."""
    primary: Annotated[tuple[Primary, ...], Field(min_length=1)] = (Primary(),)
    """On what it has to be better; a table, or a list of them, each at a level by Holm's method."""
    guards: tuple[Guard, ...] = ()
    """On what it may not be worse."""
    limits: LimitsConfig = LimitsConfig()
    """What it may reach at most."""
    floors: tuple[Floor, ...] = ()
    """What it has to reach at least: guards allow a small loss each time, these none in the long run."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Level of the one-sided intervals: how often a challenger that is no better is promoted, at most."""
    max_missing: Fraction = 0.05
    """Share of missing scores above which nothing is decided."""
    max_contaminated: Fraction = 0.0
    """Share of a suite's problems that may be, or nearly be, among those trained on."""
    problems: Literal["new", "all"] = "new"
    """What a retrain learns from: problems that no champion's run has learnt from, or all."""
    approve: Literal["automatic", "manual"] = "automatic"
    """`manual`: a challenger that passes becomes a proposal, which a form of the deployment's flow run, or `rheostat
    promote`, signs."""
    approve_days: Annotated[float, Field(gt=0, le=365)] = 7.0
    """Days for which that form waits; then the flow run fails, and `rheostat promote` can still sign."""
    keep: Positive = 5
    """Newest promoted policies that keep their files, beside the champion."""
    card: CardConfig = CardConfig()
    """What its model card says."""

    @field_validator("primary", mode="before", json_schema_input_type=Primary | tuple[Primary, ...])
    @classmethod
    def _one_or_several(cls, given: object) -> object:
        return (given,) if isinstance(given, dict | Primary) else given

    @property
    def compared(self) -> tuple[ComparisonRule, ...]:
        """What policies are compared by, the primary ones first."""
        return (*self.primary, *self.guards)

    @property
    def rules(self) -> tuple[SuiteRule, ...]:
        """All that go by a suite, the primary ones first."""
        return (*self.compared, *self.floors)

    def suites(self) -> list[str]:
        """Names of the suites that it asks for, each once, the primary ones first."""
        return [*dict.fromkeys(rule.suite for rule in self.rules)]

    def reasons_against(
        self, suites: tuple[SuiteConfig, ...], scoring: ScoringConfig, *, heldout: int, run: str
    ) -> Iterator[str]:
        """Yield what does not go together with these suites, with the run's own evaluation, or with its name."""
        scored = {suite.name: scoring.model_copy(update={"rewards": suite.rewards}) for suite in suites}
        terms = {HELDOUT: scoring.terms, **{name: each.terms for name, each in scored.items()}}
        rewards = {HELDOUT: scoring.rewards, **{suite.name: suite.rewards for suite in suites}}
        problems = {HELDOUT: heldout, **{suite.name: suite.problems for suite in suites}}
        for rule in self.rules:
            if rule.suite not in terms:
                expected = f"expected {HELDOUT!r} or a suite of [[evaluations]]"
                yield f"promotion: {expected}, found {rule.suite!r}{nearest(rule.suite, [*terms])}"
                continue
            known = terms[rule.suite]
            if rule.term is not None and rule.term not in known:
                expected = f"expected one of the rewards of {rule.suite!r}, {', '.join(known)}"
                yield f"promotion: {expected}, found {rule.term!r}{nearest(rule.term, known)}"
            elif isinstance(rule, Guard) and rule.range is None:
                reward = rewards[rule.suite][0 if rule.term is None else known.index(rule.term)]
                if reward.is_graded and reward.score_range is None:
                    yield (
                        f"promotion: the guard of {rule.label!r} needs `range`, the lowest and the highest possible "
                        f"score, because nothing limits the scores of a reward of kind {reward.known_as!r}"
                    )
            if problems[rule.suite] < FEWEST_PROBLEMS:
                expected = f"expected a suite of at least {FEWEST_PROBLEMS} problems"
                yield f"promotion: {expected}, found {problems[rule.suite]} of {rule.suite!r}"
            if len(longest := f"{run}-20260131.{rule.suite}.champion-9999") > MAX_NAME:
                yield f"name {run!r}: the run {longest!r} would have more than {MAX_NAME} characters, use a shorter one"

    @model_validator(mode="after")
    def _rules_do_not_contradict(self) -> Self:
        named = {"primary": self.primary, "guards": self.guards, "floors": self.floors}
        for what, rules in named.items():
            names = [rule.label for rule in rules]
            if len({*names}) < len(names):
                raise ValueError(f"{what}: expected each suite and term once, found {', '.join(names)}")
        return self
