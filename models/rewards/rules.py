"""Rule rewards for numbers and patterns, and the protocols that users' reward functions implement."""

import re
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Protocol, cast

from pydantic import Field, JsonValue, TypeAdapter

from infra.errors import BadInput
from infra.variants import implementation_of
from models.config.reward_terms import BuiltInConfig, BuiltInReward, NumericReward, PatternSteps, RegexReward
from models.rewards.answers import MAX_COMPLETION, to_latex, to_plain, unwrap
from models.rewards.numerals import Numeral, is_same_value, read_leading_numeral


class Reward(Protocol):
    """Function that judges one completion. Higher is better, and the same arguments give the same number.

    If it raises, hangs or returns something other than a finite number, the score is missing, never 0.
    """

    def __call__(self, prompt: str, completion: str, answer: str, /) -> float:
        """Return the reward of a completion. `answer` is the reference answer, empty if the data has none."""
        ...


class StepReward(Protocol):
    """Function that judges a completion step by step. It returns one number for each step."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, steps: list[str]) -> Iterable[float]:
        """Return the value of each step.

        The steps concatenated are the completion; no step is empty unless the completion is.
        """
        ...


class TokenReward(Protocol):
    """Function that judges a completion token by token. It returns one number for each token."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, tokens: list[str]) -> Iterable[float]:
        """Return the value of each token. The tokens concatenated are the completion.

        EOS and tokens that do not complete a character are empty texts.
        """
        ...


def numeric_reward(config: NumericReward) -> Reward:
    """Return a reward that compares the last number of the completion with the reference: 1 if equal, else 0.

    Numbers are compared exactly, so `1,000` equals `1000.0`. A completion without a number is wrong. Raises BadInput if
    the pattern is invalid.
    """
    _check_pattern(config.pattern, groups=1)
    return _decimal_reward(config) if config.version == 1 else _number_reward(config)


def _number_reward(config: NumericReward) -> Reward:
    """Return version 2 of the reward, which reads numbers as people write them."""
    pattern = re.compile(config.pattern)
    is_default = config.pattern == type(config).model_fields["pattern"].default

    def find(text: str) -> Numeral | None:
        """Return the number after the last `####`, or in the last match of a user's pattern."""
        if is_default:
            _, marker, rest = text[-MAX_COMPLETION:].rpartition("####")
            return _read_number(rest.partition("\n")[0].rpartition("=")[2]) if marker else None
        matches = list(pattern.finditer(text))
        return _read_number(matches[-1][1] or "") if matches else None

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return 1 or 0. Raises ValueError if the reference contains no number."""
        bare = _read_number(answer) if "####" not in answer else None
        expected = find(answer) if bare is None else bare
        if expected is None:
            raise ValueError(f"no number in the reference {answer[-60:]!r}")
        given = find(completion)
        return float(given is not None and is_same_value(expected, given))

    return reward


def _read_number(text: str) -> Numeral | None:
    """Read the number that a text starts with, in any spelling. Returns None if there is none."""
    return read_leading_numeral(to_plain(to_latex(unwrap(text))))


def _decimal_reward(config: NumericReward) -> Reward:
    """Return version 1 of the reward, which reads plain decimals."""
    pattern = re.compile(config.pattern)

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return 1 or 0. Raises ValueError if the reference contains no number."""
        bare = _number(answer)
        expected = _last(pattern, answer) if bare is None else bare
        if expected is None:
            raise ValueError(f"no number in the reference {answer[-60:]!r}")
        return float(_last(pattern, completion) == expected)

    return reward


def _last(pattern: re.Pattern[str], text: str) -> Decimal | None:
    """Return the number in the last match of the pattern, or None if there is none."""
    matches = list(pattern.finditer(text))
    return _number(matches[-1][1] or "") if matches else None


def _number(text: str) -> Decimal | None:
    """Parse a decimal number with optional thousands commas. Returns None if the text is not a finite number."""
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def pattern_reward(config: RegexReward) -> Reward:
    """Return a reward that is 1 if the pattern occurs anywhere in the completion, else 0.

    Raises BadInput if the pattern is invalid.
    """
    _check_pattern(config.pattern, groups=0)
    pattern = re.compile(config.pattern)

    def reward(prompt: str, completion: str, answer: str) -> float:
        return float(pattern.search(completion) is not None)

    return reward


class RewardMaker(Protocol):
    """Function that builds a reward from its settings. It implements one kind of built-in reward."""

    def __call__(self, config: Any, /) -> Reward:  # noqa: ANN401 -- settings differ by kind
        """Build the reward. Raises BadInput if the settings are invalid."""
        ...


def build_reward(config: BuiltInReward) -> Reward:
    """Build a reward. Raises BadInput if it cannot work, before any completion exists."""
    return cast(RewardMaker, implementation_of(config))(config)


def load_reward(settings: JsonValue) -> Reward:
    """Build a reward from settings as JSON, in the process that runs the reward."""
    adapter: TypeAdapter[BuiltInConfig] = TypeAdapter(Annotated[BuiltInConfig, Field(discriminator="kind")])
    return build_reward(adapter.validate_python(settings))


def load_segmentation(settings: JsonValue) -> Callable[[str, str, str], list[int]]:
    """Build a function that returns the lengths of a completion's steps, for a process that can be killed."""
    steps = PatternSteps.model_validate(settings)

    def cut(prompt: str, completion: str, answer: str) -> list[int]:
        """Return the length of each step in characters."""
        from models.text.steps import split_steps

        return [len(step) for step in split_steps(completion, steps)]

    return cut


def _check_pattern(pattern: str, *, groups: int) -> None:
    """Raise BadInput if the pattern is not a regular expression or has too few groups."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadInput(f"reward pattern {pattern!r} is not a regular expression: {error}") from error
    if compiled.groups < groups:
        raise BadInput(f"reward pattern {pattern!r} has no group. Put parentheses around the number to capture.")
