"""What a reward finds about a completion: a number, or one for each step or token; or why there is none."""

import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, cast

from models.config.reward_terms import RuleReward, Segmentation, TargetReward
from models.rewards.rules import Reward, StepReward, TokenReward, build_reward
from models.text.steps import StepValues, segment

Value = float | StepValues
UNSPELT: Final = "the completion's tokens do not spell its text"
"""The reason that a completion has no values of steps or tokens."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a reward sees."""

    prompt: str
    completion: str
    answer: str
    tokens: tuple[str, ...] | None = None
    """Texts of the completion's tokens; none where nobody asks, or where they do not spell the completion."""


class NoValue(Exception):
    """What a reward returned is no value of a completion."""


def build_valuer(config: RuleReward) -> Callable[[Case], Value]:
    """Make what values a case; it raises whatever the reward raises, and NoValue."""
    reward: object = build_reward(config)
    if isinstance(config, TargetReward) and config.per == "step":
        return lambda case: _step_values(cast(StepReward, reward), case, config.steps)
    if isinstance(config, TargetReward) and config.per == "token":
        return lambda case: _token_values(cast(TokenReward, reward), case)
    return lambda case: _number(cast(Reward, reward)(case.prompt, case.completion, case.answer))


def value_of(valuer: Callable[[Case], Value], case: Case) -> tuple[Value | None, str | None]:
    """Return a value, or none and the reason: anything that a reward raises is a missing score."""
    try:
        return valuer(case), None
    except NoValue as error:
        return None, one_line(str(error))
    except (Exception, SystemExit) as error:
        return None, one_line(f"{type(error).__name__}: {error}")


def one_line(message: str) -> str:
    """Shorten, and mask memory addresses: the reason is part of a shard, and the same inputs give the same digest."""
    masked = re.sub(r"\b0x[0-9a-f]+", "0x…", " ".join(message.split()))
    return masked[:200].encode("utf-8", "replace").decode()


def _step_values(reward: StepReward, case: Case, segmentation: Segmentation) -> StepValues:
    steps = segment(case.completion, segmentation)
    lengths = tuple(map(len, steps))  # what the function does to its list is its own affair
    found = reward(case.prompt, case.completion, case.answer, steps=steps)
    return StepValues(lengths, _numbers(found, "steps", expected=len(lengths)))


def _token_values(reward: TokenReward, case: Case) -> StepValues:
    if case.tokens is None:
        raise NoValue(UNSPELT)
    found = reward(case.prompt, case.completion, case.answer, tokens=list(case.tokens))
    return StepValues(tuple(map(len, case.tokens)), _numbers(found, "tokens", expected=len(case.tokens)))


def _numbers(found: object, name: str, *, expected: int) -> tuple[float, ...]:
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping):
        raise NoValue(f"expected {expected} floats, one for each of the {name}, found {type(found).__name__}")
    values = tuple(_number(value) for value in islice(found, expected + 1))
    if len(values) != expected:
        more = "more" if len(values) > expected else str(len(values))
        raise NoValue(f"expected {expected} floats, one for each of the {name}, found {more}")
    return values


def _number(found: object) -> float:
    if not isinstance(found, numbers.Real):
        raise NoValue(f"expected a float, found {type(found).__name__}")
    number = float(found)
    if not math.isfinite(number):
        raise NoValue(f"expected a finite float, found {number}")
    return number
