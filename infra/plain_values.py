"""Conversion of what users' functions return to plain numbers, JSON values and texts that UTF-8 can encode.

The process that runs users' functions (infra/runner.py) loads this file. It imports nothing of Rheostat, and neither
numpy nor torch: their numbers are recognized by the methods of their scalars and arrays.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_POWER_OF_TEN = 400
"""Maximum exponent up to which a whole Decimal is converted to an int. The largest float64 is about 1e308, so larger
numbers are invalid anyway."""
MAX_FEEDBACK = 4000
"""Maximum number of characters of the feedback on a completion."""


class InvalidValue(Exception):
    """Raised when a user's function returns a value of the wrong type, or a number that is not finite."""


# ---- numbers


def to_number(value: object) -> float:
    """Convert a number to a float. The number may be a Python, decimal or numpy number, or an array or torch tensor
    without dimensions.

    Raises InvalidValue for any other type and for numbers that are not finite.
    """
    plain = _to_scalar(value)
    if not _is_number(plain):
        raise InvalidValue(f"expected a float, found {describe_type(value)}")
    try:
        number = float(plain)
    except OverflowError:
        raise InvalidValue("expected a finite float, found a number that is too large for a float") from None
    except ValueError:  # a signaling NaN
        raise InvalidValue(f"expected a finite float, found {plain!r:.40}") from None
    except TypeError:  # numpy registers some types as real numbers that have no value as a float
        raise InvalidValue(f"expected a float, found {describe_type(value)}") from None
    if not math.isfinite(number):
        raise InvalidValue(f"expected a finite float, found {number}")
    return number


def _is_number(value: object) -> bool:
    """Return whether a value is a real number of Python, the decimal module or numpy."""
    return isinstance(value, (numbers.Real, Decimal))


def _to_scalar(value: Any) -> Any:  # noqa: ANN401 -- a user's object
    """Convert a numpy scalar, or an array or tensor without dimensions, to a Python number. Other values are returned
    unchanged."""
    if _is_number(value) or not has_no_dimensions(value):
        return value
    if getattr(value, "mask", None) is not None and bool(value.mask):
        return math.nan  # the number under a mask is not the value
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except RuntimeError:  # a tensor of torch without data (device "meta")
        return value


def has_no_dimensions(value: object) -> bool:
    """Return whether a value is a numpy scalar, or an array or tensor with the shape ()."""
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and not shape


def describe_type(value: object) -> str:
    """Describe the type of a value for a message: its module and name and, for arrays and tensors, the shape.

    >>> describe_type("a"), describe_type(Fraction(1, 2))
    ('str', 'fractions.Fraction')
    """
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    shape = getattr(value, "shape", None)
    return f"{name} of shape {tuple(shape)}" if isinstance(shape, tuple) and hasattr(value, "dtype") else name


def describe_value(value: object) -> str:
    """Return a text that shows a value in a message, without memory addresses. Plain values are written as in Python,
    shortened to 80 characters. Functions, classes and modules are shown by name, and all other values by type.

    >>> describe_value([1, "a"]), describe_value(math.floor), describe_value(object())
    ("[1, 'a']", "builtin_function_or_method 'math.floor'", 'object')
    """
    if _is_plain(value):
        return f"{value!r:.80}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(name, str):
        return describe_type(value)
    module = getattr(value, "__module__", None)
    prefix = f"{module}." if isinstance(module, str) and module != "builtins" else ""
    return f"{type(value).__name__} {prefix + name!r:.200}"


def _is_plain(value: object) -> bool:
    """Return whether a value consists of texts, numbers, None, and lists, tuples and dictionaries of these."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (str, bytes, bool, int, float)


# ---- JSON


def to_json_value(value: Any) -> Any:  # noqa: ANN401 -- a user's object
    """Convert the numbers, arrays and tensors in a value to types that `json` can encode. Other objects are not
    changed."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {_to_key(key): to_json_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(each) for each in value]
    plain = _to_scalar(value)
    if isinstance(plain, (Decimal, numbers.Real)):
        return _to_json_number(plain)
    if plain is not value:  # the scalar of an array that is no number, such as a text
        return plain
    return to_json_value(value.tolist()) if hasattr(value, "shape") and hasattr(value, "tolist") else value


def _to_key(key: object) -> object:
    """Convert a key of a mapping for JSON. Numbers of numpy, torch and the decimal module become Python numbers, and
    other keys are not changed."""
    return to_json_value(key) if has_no_dimensions(key) or isinstance(key, (Decimal, Fraction)) else key


def _to_json_number(value: Any) -> int | float | bool:  # noqa: ANN401 -- a number of any library
    """Convert a number for JSON. The result is an int if the type or notation of the number has no decimal places,
    otherwise a float."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Decimal):
        exponent = value.as_tuple().exponent
        is_whole = isinstance(exponent, int) and 0 <= exponent <= MAX_POWER_OF_TEN
        return int(value) if is_whole else float(value)
    if isinstance(value, numbers.Integral) or (isinstance(value, Fraction) and value.denominator == 1):
        return int(value)
    return float(value)


# ---- texts


def repair_text(text: str) -> str:
    """Replace characters that UTF-8 cannot encode: a surrogate (half of a pair) without its other half becomes U+FFFD.

    >>> repair_text("page 1: " + chr(0xD83D)) == "page 1: " + chr(0xFFFD)
    True
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def shorten_feedback(text: str) -> str:
    """Return a feedback as a text that UTF-8 can encode. If it has more than `MAX_FEEDBACK` characters, its end is
    replaced by an ellipsis."""
    repaired = repair_text(text)
    return repaired if len(repaired) <= MAX_FEEDBACK else repaired[: MAX_FEEDBACK - 1] + "…"
