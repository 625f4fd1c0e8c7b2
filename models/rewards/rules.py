"""Rule rewards for numbers and patterns, and the signatures of users' reward functions."""

import re
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Protocol, cast

from pydantic import Field, JsonValue, TypeAdapter

from rheostat.infra.errors import BadInput
from rheostat.infra.variants import implementation_of
from rheostat.models.config.reward_terms import BuiltInReward, NumericReward, PatternSteps, RegexReward
from rheostat.models.config.rewards import BuiltInConfig
from rheostat.models.rewards.answers import MAX_COMPLETION, to_latex, to_plain, unwrap
from rheostat.models.rewards.numerals import Numeral, is_same_value, read_leading_numeral, read_numeral


class Reward(Protocol):
    """Reward function that scores one completion. Higher is better, and the same arguments must give the same number.

    If the function raises an exception, hangs, or returns something other than a finite number, the score is missing.
    It is never replaced by 0.
    """

    def __call__(self, prompt: str, completion: str, answer: str, /) -> float:
        """Return the reward of a completion. `answer` is the reference answer, empty if the data has none."""
        ...


class StepReward(Protocol):
    """Reward function that returns one score for each step of a completion."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, steps: list[str]) -> Iterable[float]:
        """Return one number for each step.

        The concatenation of the steps is the completion. No step is empty unless the completion is empty.
        """
        ...


class TokenReward(Protocol):
    """Reward function that returns one score for each token of a completion."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, tokens: list[str]) -> Iterable[float]:
        """Return one number for each token. The concatenation of the tokens is the completion.

        EOS, and tokens that do not complete a character, are empty texts.
        """
        ...


def numeric_reward(config: NumericReward) -> Reward:
    """Return a reward function whose score is 1 if the number in the completion equals the number in the reference,
    else 0.

    Numbers are compared by value, so `1,000` equals `1000.0`. A completion without a number is wrong. Raises BadInput
    if the configured pattern is invalid.
    """
    _check_pattern(config.pattern, groups=1)
    return _decimal_reward(config) if config.version == 1 else _number_reward(config)


def _number_reward(config: NumericReward) -> Reward:
    """Return version 2 of the numeric reward function, which reads numbers in many notations, such as fractions or with
    units."""
    pattern = re.compile(config.pattern)
    is_default = config.pattern == type(config).model_fields["pattern"].default

    def find(text: str) -> Numeral | None:
        """Return the number after the last `####`, or in the last match of a configured pattern."""
        if is_default:
            _, marker, rest = text[-MAX_COMPLETION:].rpartition("####")
            return _read_number(rest.lstrip().partition("\n")[0].rpartition("=")[2]) if marker else None
        matches = list(pattern.finditer(text))
        return _read_number(matches[-1][1] or "") if matches else None

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return 1 or 0. Raises ValueError if the reference contains no number."""
        bare = _read_number(answer) if "####" not in answer else None
        expected = find(answer) if bare is None else bare
        if expected is None:
            raise ValueError(
                "the reward 'numeric' compares numbers, but the reference answer of this problem contains no number. "
                f"Its end is {answer[-60:]!r}"
            )
        given = find(completion)
        return float(given is not None and is_same_value(expected, given))

    return reward


def _read_number(text: str) -> Numeral | None:
    """Return the number at the start of a text, in any notation, or None if the text does not start with a number."""
    plain = to_plain(to_latex(unwrap(text)))
    return read_numeral(plain, decimal_comma=True) or read_leading_numeral(plain)


def _decimal_reward(config: NumericReward) -> Reward:
    """Return version 1 of the numeric reward function, which reads only plain decimals."""
    pattern = re.compile(config.pattern)

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return 1 or 0. Raises ValueError if the reference contains no number."""
        bare = _number(answer)
        expected = _last(pattern, answer) if bare is None else bare
        if expected is None:
            raise ValueError(
                "the reward 'numeric' compares numbers, but the reference answer of this problem contains no number. "
                f"Its end is {answer[-60:]!r}"
            )
        return float(_last(pattern, completion) == expected)

    return reward


def _last(pattern: re.Pattern[str], text: str) -> Decimal | None:
    """Return the number in the last match of a pattern, or None if there is no match or the match is not a number."""
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
    """Return a reward function whose score is 1 if the regular expression matches anywhere in the completion, else 0.
    Raises BadInput if the expression is invalid."""
    _check_pattern(config.pattern, groups=0)
    pattern = re.compile(config.pattern)

    def reward(prompt: str, completion: str, answer: str) -> float:
        return float(pattern.search(completion) is not None)

    return reward


class RewardMaker(Protocol):
    """Function that builds the reward function for one kind of built-in reward from its settings. `build_reward` calls
    the function of the configured kind."""

    def __call__(self, config: Any, /) -> Reward:  # noqa: ANN401 -- settings differ by kind
        """Return the reward function. Raises BadInput if the settings are invalid."""
        ...


def build_reward(config: BuiltInReward) -> Reward:
    """Build the reward function of a built-in reward. Raises BadInput if the settings cannot be used."""
    return cast(RewardMaker, implementation_of(config))(config)


def load_reward(settings: JsonValue) -> Reward:
    """Build the reward function of a built-in reward from its settings in JSON. Called in the process that runs reward
    functions."""
    adapter: TypeAdapter[BuiltInConfig] = TypeAdapter(Annotated[BuiltInConfig, Field(discriminator="kind")])
    return build_reward(adapter.validate_python(settings))


def load_segmentation(settings: JsonValue) -> Callable[[str, str, str], list[int]]:
    """Return a function that splits completions into steps and returns the steps' lengths in characters. Called in a
    process that can be killed."""
    steps = PatternSteps.model_validate(settings)

    def cut(prompt: str, completion: str, answer: str) -> list[int]:
        """Divide the completion into steps and return the length of each step in characters."""
        from rheostat.models.text.steps import split_steps

        return [len(step) for step in split_steps(completion, steps)]

    return cut


def _check_pattern(pattern: str, *, groups: int) -> None:
    """Raise BadInput if the pattern is not a valid regular expression or has fewer than `groups` groups."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadInput(f"the reward's pattern {pattern!r} is not a valid regular expression: {error}") from error
    if compiled.groups < groups:
        raise BadInput(
            f"the reward's pattern {pattern!r} has no group. Put parentheses around the part that matches the number."
        )
