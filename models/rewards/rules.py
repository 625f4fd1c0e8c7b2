"""Rewards that are rules: numbers, patterns, mathematical equality; and the protocols that users' functions fit."""

import re
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Protocol, cast

from pydantic import Field, JsonValue, TypeAdapter

from infra.errors import BadInput
from infra.variants import implementation_of
from models.config.reward_terms import BuiltInConfig, BuiltInReward, NumericReward, PatternSteps, RegexReward


class Reward(Protocol):
    """Judge one completion; higher is better, and the same arguments give the same number.

    To raise, to hang or to return anything but a finite number makes the score missing, never 0.
    """

    def __call__(self, prompt: str, completion: str, answer: str, /) -> float:
        """Return the reward of a completion, given the reference answer (empty where the data has none)."""
        ...


class StepReward(Protocol):
    """Judge a completion step by step: as many numbers as steps, which concatenated are the completion."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, steps: list[str]) -> Iterable[float]:
        """Return the value of each step; a step is never empty, unless the completion is."""
        ...


class TokenReward(Protocol):
    """Judge a completion token by token: as many numbers as tokens, which concatenated are the completion."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, tokens: list[str]) -> Iterable[float]:
        """Return the value of each token; EOS, and tokens that do not finish a character, are empty texts."""
        ...


def numeric_reward(config: NumericReward) -> Reward:
    """Compare exactly, as decimals: `1,000` is `1000.0`. A completion without a number is a wrong answer."""
    _check_pattern(config.pattern, groups=1)
    pattern = re.compile(config.pattern)

    def reward(prompt: str, completion: str, answer: str) -> float:
        bare = _number(answer)
        expected = _last(pattern, answer) if bare is None else bare
        if expected is None:
            raise ValueError(f"no number in the reference {answer[-60:]!r}")
        return float(_last(pattern, completion) == expected)

    return reward


def _last(pattern: re.Pattern[str], text: str) -> Decimal | None:
    matches = list(pattern.finditer(text))
    return _number(matches[-1][1] or "") if matches else None


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def pattern_reward(config: RegexReward) -> Reward:
    """Find the pattern anywhere in the completion: 1 or 0."""
    _check_pattern(config.pattern, groups=0)
    pattern = re.compile(config.pattern)

    def reward(prompt: str, completion: str, answer: str) -> float:
        return float(pattern.search(completion) is not None)

    return reward


class RewardMaker(Protocol):
    """Makes a reward of its settings."""

    def __call__(self, config: Any, /) -> Reward:  # noqa: ANN401 -- its own settings
        """Raises BadInput where it cannot work."""
        ...


def build_reward(config: BuiltInReward) -> Reward:
    """Make a reward; what cannot work is bad input here, before any completion exists."""
    return cast(RewardMaker, implementation_of(config))(config)


def made_reward(settings: JsonValue) -> Reward:
    """Make a reward of settings as JSON: for the process that runs it."""
    adapter: TypeAdapter[BuiltInConfig] = TypeAdapter(Annotated[BuiltInConfig, Field(discriminator="kind")])
    return build_reward(adapter.validate_python(settings))


def made_cut(settings: JsonValue) -> Callable[[str, str, str], list[int]]:
    """Make what finds the lengths of a completion's steps: for the process that can be killed when it takes long."""
    steps = PatternSteps.model_validate(settings)

    def cut(prompt: str, completion: str, answer: str) -> list[int]:
        from models.text.steps import segment

        return [len(step) for step in segment(completion, steps)]

    return cut


def _check_pattern(pattern: str, *, groups: int) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadInput(f"reward pattern {pattern!r} is not a regular expression: {error}") from error
    if compiled.groups < groups:
        raise BadInput(f"reward pattern {pattern!r}: expected a group around the number, found none")
